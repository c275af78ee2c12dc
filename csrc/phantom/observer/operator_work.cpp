#include "phantom/observer/operator_work.h"

#include <ATen/Context.h>
#include <ATen/core/function_schema.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "phantom/observer/operator_traits.h"

namespace lowtide::dry {
namespace {

using at::Tensor;
using c10::IValue;
using phantom::Rate;
using phantom::Work;
using Values = c10::ArrayRef<const IValue>;

// "aten::add_" -> "add".
std::string_view plain_name(std::string_view name) {
  name.remove_prefix(std::min(name.size(), name.find("::") + 2));
  if (name.size() > 1 && name.back() == '_') name.remove_suffix(1);
  return name;
}

double size(const Tensor& tensor, std::int64_t dim) {
  return static_cast<double>(tensor.size(dim));
}

// Broadcast dimensions count once.
double elements(const Tensor& tensor) {
  double count = 1;
  for (std::int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) == 0) return 0;
    if (tensor.stride(d) != 0) count *= size(tensor, d);
  }
  return count;
}

bool counts(const Tensor& tensor) {
  return tensor.defined() && tensor.is_cuda() &&
         tensor.layout() == at::kStrided &&
         !tensor.unsafeGetTensorImpl()->is_python_dispatch();
}

double bytes_of(const Tensor& tensor) {
  if (!counts(tensor)) return 0;
  return elements(tensor) * static_cast<double>(tensor.itemsize());
}

double bytes_in(const IValue& value) {
  double bytes = 0;
  if (value.isTensor()) {
    bytes = bytes_of(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorVector()) {
      bytes += bytes_of(tensor);
    }
  } else if (value.isOptionalTensorList()) {
    for (const auto& tensor : value.toOptionalTensorVector()) {
      if (tensor) bytes += bytes_of(*tensor);
    }
  }
  return bytes;
}

bool never_reads(std::string_view name) {
  static const std::unordered_set<std::string_view> names = {
      "zero",        "fill",      "copy",       "normal", "uniform",  "random",
      "exponential", "geometric", "log_normal", "cauchy", "bernoulli"};
  return names.contains(name);
}

// Reads as many elements of its first argument as it returns.
bool chooses(std::string_view name) {
  static const std::unordered_set<std::string_view> names = {
      "index", "index_select", "gather", "take", "nll_loss_forward"};
  return names.contains(name);
}

// Changes as many elements of its first argument as its last tensor has.
bool places(std::string_view name) {
  static const std::unordered_set<std::string_view> names = {
      "index_put",   "_index_put_impl", "index_add",      "index_copy",
      "scatter_add", "scatter",         "scatter_reduce", "add_rows"};
  return names.contains(name);
}

struct Touched {
  double bytes = 0;
  double chosen_from = 0;  // of these as many as are returned
};

Touched touched_by(std::string_view name, const c10::FunctionSchema& schema,
                   Values arguments) {
  Touched all;
  double last = 0;
  const auto count = std::min(arguments.size(), schema.arguments().size());
  for (std::size_t a = 0; a < count; ++a) {
    const c10::Argument& argument = schema.arguments()[a];
    const double touched = bytes_in(arguments[a]);
    if (a > 0 && touched > 0) last = touched;
    if (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) {
      if (a == 0 && places(name)) continue;
      all.bytes +=
          argument.is_out() || never_reads(name) ? touched : 2 * touched;
    } else if (a == 0 && chooses(name)) {
      all.chosen_from = touched;
    } else {
      all.bytes += touched;
    }
  }
  const bool in_place =
      count > 0 && schema.arguments()[0].alias_info() != nullptr;
  if (in_place && places(name)) all.bytes += 2 * last;
  return all;
}

// Where the first factor stands among the arguments of a product.
std::optional<std::size_t> first_factor(std::string_view name) {
  static const std::unordered_map<std::string_view, std::size_t> factors = {
      {"mm", 0},
      {"bmm", 0},
      {"mv", 0},
      {"dot", 0},
      {"vdot", 0},
      {"_int_mm", 0},
      {"_scaled_mm", 0},
      {"_scaled_mm_v2", 0},
      {"_grouped_mm", 0},
      {"_scaled_grouped_mm", 0},
      {"_scaled_grouped_mm_v2", 0},
      {"addmm", 1},
      {"_addmm_activation", 1},
      {"addmv", 1},
      {"baddbmm", 1},
      {"addbmm", 1}};
  return found_in(factors, name);
}

// An addition and a multiplication for each element of `a` and column of `b`;
// of grouped products, too, whatever is divided among the groups.
double product_flops(const Tensor& a, const Tensor& b) {
  const double columns = b.dim() >= 2 ? size(b, -1) : 1.0;
  return 2 * static_cast<double>(a.numel()) * columns;
}

// For each position and channel of a convolution's result, or of a transposed
// one's input: a multiplication and an addition for each weight that meets it.
double flops_of_position(const Tensor& weight) {
  if (weight.numel() == 0) return 0;
  return 2 * static_cast<double>(weight.numel()) / size(weight, 0);
}

// The arguments of an operator by the names of its schema.
class Named {
 public:
  Named(const c10::FunctionSchema& schema, Values arguments)
      : schema_(schema), arguments_(arguments) {}

  const IValue* find(const std::string& name) const {
    const auto place = schema_.argumentIndexWithName(name);
    if (!place || static_cast<std::size_t>(*place) >= arguments_.size()) {
      return nullptr;
    }
    return &arguments_[static_cast<std::size_t>(*place)];
  }
  const Tensor* tensor(const std::string& name) const {
    const auto* value = find(name);
    const bool there =
        value && value->isTensor() && value->toTensor().defined();
    return there ? &value->toTensor() : nullptr;
  }
  bool flag(const std::string& name) const {
    const auto* value = find(name);
    return value && value->isBool() && value->toBool();
  }
  std::int64_t number(const std::string& name) const {
    const auto* value = find(name);
    return value && value->isInt() ? value->toInt() : 0;
  }

 private:
  const c10::FunctionSchema& schema_;
  Values arguments_;
};

// Of the arguments: all of a transposed convolution or of a backward, whose two
// products are as large as forward.
struct Convolution {
  double flops = 0;
  double of_position = 0;  // else: of each element of the result
};

Convolution convolution_of(std::string_view name, const Named& arguments) {
  const Tensor* input = arguments.tensor("input");
  if (input == nullptr) input = arguments.tensor("self");
  const Tensor* weight = arguments.tensor("weight");
  if (input == nullptr || weight == nullptr) return {};
  const double each = flops_of_position(*weight);
  const bool transposed = arguments.flag("transposed") ||
                          name.find("transpose") != std::string_view::npos;
  const Tensor* output = arguments.tensor("grad_output");
  if (output == nullptr && !transposed) return {0, each};
  const Tensor& positions = transposed ? *input : *output;
  const double product = each * static_cast<double>(positions.numel());
  const auto* wanted = arguments.find("output_mask");
  if (output == nullptr || wanted == nullptr || !wanted->isBoolList()) {
    return {product};
  }
  const auto mask = wanted->toBoolList();
  return {product * ((mask.get(0) ? 1 : 0) + (mask.get(1) ? 1 : 0))};
}

// Two products of scores and values forward; in backward the scores again and
// two of either kind (FlashAttention, arXiv 2205.14135, section 3): 2.5 times.
double flops_of_attention(std::string_view name, const Named& arguments) {
  const Tensor* query = arguments.tensor("query");
  const Tensor* key = arguments.tensor("key");
  const Tensor* value = arguments.tensor("value");
  if (!query || !key || !value || query->dim() < 3) return 0;
  // [batch, heads, tokens, width]; of the others [batch, tokens, heads, width],
  // or without a batch where sequences are packed.
  const bool heads_first = name.starts_with("_scaled_dot_product") ||
                           name.starts_with("_cudnn_attention");
  const std::int64_t tokens = heads_first ? -2 : -3;
  const double rows =
      static_cast<double>(query->numel()) / size(*query, -1);  // of scores
  const auto longest = arguments.number("max_k");
  const double columns = query->dim() == 3 && longest > 0
                             ? static_cast<double>(longest)
                             : size(*key, tokens);
  const bool is_backward = name.find("backward") != std::string_view::npos;
  const double by_query = is_backward ? 3 : 1, by_value = is_backward ? 2 : 1;
  const double flops =
      2 * rows * columns *
      (by_query * size(*query, -1) + by_value * size(*value, -1));
  const bool is_causal =
      arguments.flag("is_causal") || arguments.number("custom_mask_type") > 0;
  return is_causal ? flops / 2 : flops;
}

bool is_attention(std::string_view name) {
  return name.find("attention") != std::string_view::npos;
}

double flops_of_call(std::string_view name, const c10::FunctionSchema& schema,
                     Values arguments) {
  if (const auto first = first_factor(name)) {
    const bool there = arguments.size() > *first + 1 &&
                       arguments[*first].isTensor() &&
                       arguments[*first + 1].isTensor();
    return there ? product_flops(arguments[*first].toTensor(),
                                 arguments[*first + 1].toTensor())
                 : 0;
  }
  return is_attention(name) ? flops_of_attention(name, Named(schema, arguments))
                            : 0;
}

bool convolves(std::string_view name) {
  return name.find("convolution") != std::string_view::npos;
}

Rate rate_of(at::ScalarType dtype, bool in_convolution) {
  const auto& context = at::globalContext();
  switch (dtype) {
    case at::kDouble:
    case at::kComplexDouble:
      return Rate::fp64;
    case at::kHalf:
    case at::kBFloat16:
      return Rate::half;
    case at::kFloat: {
      const bool tf32 =
          in_convolution ? context.allowTF32CuDNN() : context.allowTF32CuBLAS();
      return tf32 ? Rate::tf32 : Rate::fp32;
    }
    default:
      return c10::elementSize(dtype) == 1 ? Rate::eight_bit : Rate::fp32;
  }
}

// Of the first factor.
at::ScalarType dtype_of_call(std::string_view name, Values arguments) {
  const std::size_t first = first_factor(name).value_or(0);
  for (std::size_t a = first; a < arguments.size(); ++a) {
    if (arguments[a].isTensor() && arguments[a].toTensor().defined()) {
      return arguments[a].toTensor().scalar_type();
    }
  }
  return at::kFloat;
}

// lowtide's own, called without the dispatcher (csrc/base/trace.h): they write
// their first argument, which some read before.
double bytes_of_range(std::string_view name, Values arguments) {
  if (arguments.empty()) return 0;
  if (places(name)) return 3 * bytes_in(arguments.back());
  double bytes =
      name.find("add") != std::string_view::npos ? bytes_in(arguments[0]) : 0;
  for (const IValue& argument : arguments) bytes += bytes_in(argument);
  return bytes;
}

// Copying a schema takes longer than most operators; the text of a name stays
// where it is.
const std::optional<c10::FunctionSchema>& schema_of(
    const at::RecordFunction& function) {
  static std::mutex mutex;
  static std::unordered_map<const void*, std::optional<c10::FunctionSchema>>
      known;
  const std::lock_guard lock(mutex);
  const auto found = known.find(function.name());
  if (found != known.end()) return found->second;
  return known.emplace(function.name(), function.operator_schema())
      .first->second;
}

}  // namespace

bool OperatorWork::is_known_of(const at::RecordFunction& function) {
  return schema_of(function).has_value() ||
         std::string_view(function.name()).starts_with("lowtide::");
}

OperatorWork::OperatorWork(const at::RecordFunction& function) {
  const auto& schema = schema_of(function);
  const auto arguments = function.inputs();
  if (!schema) {
    work_.bytes = bytes_of_range(plain_name(function.name()), arguments);
    return;
  }
  const auto name = plain_name(function.name());
  const auto touched = touched_by(name, *schema, arguments);
  work_.bytes = touched.bytes;
  chosen_from_ = touched.chosen_from;
  if (convolves(name)) {
    const auto found = convolution_of(name, Named(*schema, arguments));
    work_.flops = found.flops;
    flops_of_position_ = found.of_position;
  } else {
    work_.flops = flops_of_call(name, *schema, arguments);
    work_.is_attention = is_attention(name);
  }
  if (work_.flops > 0 || flops_of_position_ > 0) {
    work_.rate = rate_of(dtype_of_call(name, arguments), convolves(name));
  }
}

Work OperatorWork::with_results(const at::RecordFunction& function) const {
  const auto& schema = schema_of(function);
  if (!schema) return work_;
  const auto& results = function.outputs();
  Work work = work_;
  double largest = 0;
  for (std::size_t r = 0; r < results.size(); ++r) {
    const double written = bytes_in(results[r]);
    largest = std::max(largest, written);
    const bool is_new = r >= schema->returns().size() ||
                        schema->returns()[r].alias_info() == nullptr;
    if (is_new) work.bytes += written;
  }
  work.bytes += std::min(chosen_from_, largest);
  if (flops_of_position_ > 0 && !results.empty() && results[0].isTensor() &&
      results[0].toTensor().defined()) {
    work.flops =
        flops_of_position_ * static_cast<double>(results[0].toTensor().numel());
  }
  return work;
}

}  // namespace lowtide::dry
