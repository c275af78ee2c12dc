#include "phantom/device/operator_work.h"

#include <ATen/Context.h>
#include <ATen/core/function_schema.h>

#include <algorithm>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "phantom/device/operator_list.h"
#include "phantom/device/phantom_device.h"

namespace lowtide::phantom {
namespace {

using at::Tensor;
using c10::IValue;
using Values = at::ArrayRef<IValue>;

// "aten::add_" -> "add".
std::string_view plain_name(const c10::FunctionSchema& schema) {
  std::string_view name = schema.name();
  name.remove_prefix(std::min(name.size(), name.find("::") + 2));
  if (name.size() > 1 && name.back() == '_') name.remove_suffix(1);
  return name;
}

std::vector<Tensor> tensors_in(const IValue& value) {
  std::vector<Tensor> found;
  if (value.isTensor()) {
    found.push_back(value.toTensor());
  } else if (value.isTensorList()) {
    found = value.toTensorVector();
  } else if (value.isOptionalTensorList()) {
    for (const auto& tensor : value.toOptionalTensorVector()) {
      if (tensor) found.push_back(*tensor);
    }
  }
  // Numbers come as tensors of the host.
  const auto elsewhere = [](const Tensor& tensor) {
    return !tensor.defined() || !is_phantom(tensor);
  };
  found.erase(std::remove_if(found.begin(), found.end(), elsewhere),
              found.end());
  return found;
}

double bytes_in(const IValue& value) {
  double bytes = 0;
  for (const Tensor& tensor : tensors_in(value)) bytes += bytes_touched(tensor);
  return bytes;
}

bool overwrites(std::string_view name) {
  static const std::unordered_set<std::string_view> names = {
      "zero",        "fill",      "copy",       "normal", "uniform",  "random",
      "exponential", "geometric", "log_normal", "cauchy", "bernoulli"};
  return names.count(name) > 0;
}

// Reads as many elements of its first argument as it returns.
bool chooses(std::string_view name) {
  static const std::unordered_set<std::string_view> names = {
      "index", "index_select", "gather", "take", "nll_loss_forward"};
  return names.count(name) > 0;
}

// Changes as many elements of its first argument as its last tensor has.
bool places(std::string_view name) {
  static const std::unordered_set<std::string_view> names = {
      "index_put",   "_index_put_impl", "index_add",     "index_copy",
      "scatter_add", "scatter",         "scatter_reduce"};
  return names.count(name) > 0;
}

double bytes_of_call(const c10::FunctionSchema& schema, Values arguments,
                     Values results) {
  const std::string_view name = plain_name(schema);
  double bytes = 0, largest_result = 0, last = 0;
  for (std::size_t r = 0; r < results.size(); ++r) {
    const auto* alias = schema.returns()[r].alias_info();
    const double written = bytes_in(results[r]);
    largest_result = std::max(largest_result, written);
    if (alias == nullptr) bytes += written;
  }
  for (std::size_t a = 0; a < arguments.size(); ++a) {
    const c10::Argument& argument = schema.arguments()[a];
    const double touched = bytes_in(arguments[a]);
    if (a > 0 && touched > 0) last = touched;
    if (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) {
      if (a == 0 && places(name)) continue;
      bytes += argument.is_out() || overwrites(name) ? touched : 2 * touched;
    } else if (a == 0 && chooses(name)) {
      bytes += std::min(touched, largest_result);
    } else {
      bytes += touched;
    }
  }
  const bool in_place = !schema.arguments().empty() &&
                        schema.arguments()[0].alias_info() != nullptr;
  return in_place && places(name) ? bytes + 2 * last : bytes;
}

double product_flops(const Tensor& a, const Tensor& b) {
  const double columns = b.dim() >= 2 ? static_cast<double>(b.size(-1)) : 1.0;
  return 2 * static_cast<double>(a.numel()) * columns;
}

// One convolution with `output` as its result, or one of the two products of
// its backward.
double convolution_flops(const Tensor& input, const Tensor& weight,
                         const Tensor& output, bool transposed) {
  if (weight.numel() == 0) return 0;
  const double per_position =
      static_cast<double>(weight.numel()) / static_cast<double>(weight.size(0));
  const Tensor& positions = transposed ? input : output;
  return 2 * static_cast<double>(positions.numel()) * per_position;
}

// Where the first factor stands among the arguments of a product.
std::optional<std::size_t> first_factor(std::string_view name) {
  static const std::unordered_map<std::string_view, std::size_t> factors = {
      {"mm", 0},         {"bmm", 0},     {"mv", 0},
      {"dot", 0},        {"vdot", 0},    {"_int_mm", 0},
      {"_scaled_mm", 0}, {"addmm", 1},   {"_addmm_activation", 1},
      {"addmv", 1},      {"baddbmm", 1}, {"addbmm", 1}};
  const auto found = factors.find(name);
  if (found == factors.end()) return std::nullopt;
  return found->second;
}

double flops_of_call(std::string_view name, Values arguments, Values results) {
  if (const auto first = first_factor(name)) {
    return product_flops(arguments[*first].toTensor(),
                         arguments[*first + 1].toTensor());
  }
  if (name == "convolution") {
    return convolution_flops(arguments[0].toTensor(), arguments[1].toTensor(),
                             results[0].toTensor(), arguments[6].toBool());
  }
  if (name == "convolution_backward") {
    const auto wanted = arguments[10].toBoolList();
    const double each =
        convolution_flops(arguments[1].toTensor(), arguments[2].toTensor(),
                          arguments[0].toTensor(), arguments[7].toBool());
    return each * ((wanted[0] ? 1 : 0) + (wanted[1] ? 1 : 0));
  }
  return 0;
}

at::ScalarType dtype_of_call(std::string_view name, Values arguments) {
  const std::size_t first = first_factor(name).value_or(0);
  const auto tensors = tensors_in(arguments[first]);
  return tensors.empty() ? at::kFloat : tensors[0].scalar_type();
}

}  // namespace

double bytes_touched(const Tensor& tensor) {
  if (!tensor.defined()) return 0;
  double elements = 1;
  for (std::int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) == 0) return 0;
    if (tensor.stride(d) != 0) elements *= static_cast<double>(tensor.size(d));
  }
  return elements * static_cast<double>(tensor.itemsize());
}

Rate rate_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
    case at::kComplexDouble:
      return Rate::fp64;
    case at::kHalf:
    case at::kBFloat16:
      return Rate::half;
    case at::kFloat:
      return at::globalContext().allowTF32CuBLAS() ? Rate::tf32 : Rate::fp32;
    default:
      return c10::elementSize(dtype) == 1 ? Rate::eight_bit : Rate::fp32;
  }
}

std::optional<Work> operator_work(const c10::OperatorHandle& op,
                                  Values arguments, Values results) {
  const auto rule = find_rule(op);
  if (rule && rule->memory == Memory::view) return std::nullopt;
  const std::string_view name = plain_name(op.schema());
  Work work;
  work.bytes = bytes_of_call(op.schema(), arguments, results);
  if (work.bytes == 0) return std::nullopt;
  work.flops = flops_of_call(name, arguments, results);
  if (work.flops > 0) work.rate = rate_of(dtype_of_call(name, arguments));
  return work;
}

double attention_flops(const Tensor& query, const Tensor& key,
                       const Tensor& value, bool is_causal, bool is_backward) {
  const auto size = [](const Tensor& tensor, std::int64_t dim) {
    return static_cast<double>(tensor.size(dim));
  };
  const double scores =
      size(query, 0) * size(query, 1) * size(query, 2) * size(key, 2);
  // Scores and results forward; scores again, two of either kind backward.
  const double by_query = is_backward ? 3 : 1, by_value = is_backward ? 2 : 1;
  const double flops =
      2 * scores * (by_query * size(query, 3) + by_value * size(value, 3));
  return is_causal ? flops / 2 : flops;
}

}  // namespace lowtide::phantom
