#include "phantom/observer/known_values.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/all.h>
#include <ATen/ops/any.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "phantom/observer/driver.h"

namespace lowtide::dry {
namespace {

// Of a storage whose values are computed with.
constexpr std::int64_t kMostBytes = 4096;
// Of a tensor of equal truth values.
constexpr std::int64_t kMostTruths = std::int64_t{1} << 26;

thread_local bool computing = false;

std::uintptr_t address(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer);
}

std::int64_t bytes_of(const c10::Storage& storage) {
  return static_cast<std::int64_t>(storage.nbytes());
}

// Reads nothing of what it writes.
bool overwrites(std::string_view name) {
  return name == "aten::fill_" || name == "aten::zero_" ||
         name == "aten::copy_";
}

// What is said of all numbers by an operator that asks for finiteness.
std::optional<bool> says_finite(std::string_view name) {
  static const std::unordered_map<std::string_view, bool> kNames = {
      {"aten::isfinite", true},  {"aten::isinf", false},
      {"aten::isnan", false},    {"aten::isneginf", false},
      {"aten::isposinf", false},
  };
  const auto found = kNames.find(name);
  if (found == kNames.end()) return std::nullopt;
  return found->second;
}

// Neither random nor of sizes that depend on values, nor only of storages.
bool computes(const at::RecordFunction& function) {
  static const std::unordered_set<std::string_view> kOthers = {
      "aten::_local_scalar_dense",
      "aten::_unique2",
      "aten::detach_",
      "aten::empty_like",
      "aten::item",
      "aten::masked_select",
      "aten::new_empty",
      "aten::new_empty_strided",
      "aten::nonzero",
      "aten::record_stream",
      "aten::requires_grad_",
      "aten::resize_",
      "aten::retain_grad",
      "aten::set_",
      "aten::unique_consecutive",
      "aten::unique_dim",
  };
  const std::string_view name = function.name();
  return name.starts_with("aten::") && !kOthers.contains(name);
}

bool is_random(const c10::OperatorHandle& op) {
  const auto tags = op.getTags();
  return std::find(tags.begin(), tags.end(),
                   at::Tag::nondeterministic_seeded) != tags.end();
}

std::optional<at::Tensor> on_host(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (!tensor.has_storage() || tensor.layout() != at::kStrided ||
      tensor.unsafeGetTensorImpl()->is_python_dispatch()) {
    return std::nullopt;
  }
  if (tensor.is_cpu()) {
    if (tensor.numel() > kMostBytes) return std::nullopt;
    return tensor.detach().clone();
  }
  if (!tensor.is_cuda()) return std::nullopt;
  const auto& storage = tensor.storage();
  const auto bytes = bytes_of(storage);
  if (first_byte(storage) == nullptr) return std::nullopt;
  if (bytes <= kMostBytes && driver_knows(first_byte(storage), bytes)) {
    auto copy = at::empty_strided(tensor.sizes(), tensor.strides(),
                                  tensor.options().device(at::kCPU));
    driver_copies(copy.mutable_data_ptr(), tensor.const_data_ptr(),
                  bytes_of(copy.storage()));
    return copy;
  }
  if (const auto truth = uniform_truths().of(tensor);
      truth && tensor.numel() <= kMostTruths) {
    return at::full({}, *truth, at::kBool).expand(tensor.sizes());
  }
  return std::nullopt;
}

// `value` with its tensors on the host; counts those that were on a device.
std::optional<at::IValue> on_host(const at::IValue& value, int& on_device) {
  const auto one = [&](const at::Tensor& tensor) {
    if (tensor.defined() && tensor.is_cuda()) ++on_device;
    return on_host(tensor);
  };
  if (value.isTensor()) {
    auto copy = one(value.toTensor());
    if (!copy) return std::nullopt;
    return *std::move(copy);
  }
  if (value.isTensorList()) {
    std::vector<at::Tensor> copies;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      auto copy = one(tensor);
      if (!copy) return std::nullopt;
      copies.push_back(*std::move(copy));
    }
    return copies;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> copies;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      auto copy = one(tensor.value_or(at::Tensor()));
      if (!copy) return std::nullopt;
      copies.push_back(tensor ? copy : std::nullopt);
    }
    return copies;
  }
  if (value.isDevice()) return at::IValue(c10::Device(at::kCPU));
  if (value.isGenerator() || value.isStorage()) return std::nullopt;
  return value;
}

// As large as a tensor of a device that is written to.
std::optional<at::IValue> place_for(const at::IValue& value, int& on_device) {
  const at::Tensor to = value.isTensor() ? value.toTensor() : at::Tensor();
  if (!to.defined() || !to.is_cuda() || to.layout() != at::kStrided ||
      to.unsafeGetTensorImpl()->is_python_dispatch() ||
      first_byte(to.storage()) == nullptr ||
      to.nbytes() > static_cast<std::size_t>(kMostBytes)) {
    return std::nullopt;
  }
  ++on_device;
  return at::empty_strided(to.sizes(), to.strides(),
                           to.options().device(at::kCPU));
}

// The program's modes and graphs have no part in what is computed here.
class Apart {
 public:
  Apart() { computing = true; }
  ~Apart() { computing = false; }
  Apart(const Apart&) = delete;
  Apart& operator=(const Apart&) = delete;

 private:
  c10::impl::ExcludeDispatchKeyGuard below_{
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::python_ks |
      c10::DispatchKeySet({
          c10::DispatchKey::PythonTLSSnapshot,
          c10::DispatchKey::PythonDispatcher,
          c10::DispatchKey::PreDispatch,
          c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
          c10::DispatchKey::FuncTorchDynamicLayerBackMode,
          c10::DispatchKey::AutocastCPU,
          c10::DispatchKey::AutocastCUDA,
          c10::DispatchKey::Functionalize,
      })};
};

void write(const at::Tensor& to, const at::Tensor& value) {
  if (!to.defined() || !to.is_cuda() || !value.defined() || !to.has_storage() ||
      to.unsafeGetTensorImpl()->is_python_dispatch() ||
      first_byte(to.storage()) == nullptr || to.sizes() != value.sizes() ||
      !to.is_non_overlapping_and_dense()) {
    return;
  }
  if (to.nbytes() <= static_cast<std::size_t>(kMostBytes)) {
    auto same = at::empty_strided(to.sizes(), to.strides(),
                                  to.options().device(at::kCPU));
    same.copy_(value);
    driver_copies(to.mutable_data_ptr(), same.const_data_ptr(),
                  static_cast<std::int64_t>(same.nbytes()));
    return;
  }
  if (to.scalar_type() != at::kBool || value.scalar_type() != at::kBool) return;
  const bool all = value.all().item<bool>();
  if (all == value.any().item<bool>()) uniform_truths().set(to, all);
}

void write(const at::IValue& to, const at::IValue& value) {
  if (to.isTensor() && value.isTensor()) {
    write(to.toTensor(), value.toTensor());
  } else if (to.isTensorList() && value.isTensorList()) {
    const auto tensors = to.toTensorVector();
    const auto values = value.toTensorVector();
    for (std::size_t i = 0; i < std::min(tensors.size(), values.size()); ++i) {
      write(tensors[i], values[i]);
    }
  }
}

}  // namespace

void UniformTruths::set(const at::Tensor& tensor, bool value) {
  const auto& storage = tensor.storage();
  if (static_cast<std::int64_t>(tensor.nbytes()) != bytes_of(storage)) return;
  const std::lock_guard lock(mutex_);
  truths_[address(first_byte(storage))] = {bytes_of(storage), value};
}

std::optional<bool> UniformTruths::of(const at::Tensor& tensor) const {
  if (tensor.scalar_type() != at::kBool) return std::nullopt;
  const std::lock_guard lock(mutex_);
  const auto found = truths_.find(address(first_byte(tensor.storage())));
  if (found == truths_.end() ||
      found->second.bytes != bytes_of(tensor.storage())) {
    return std::nullopt;
  }
  return found->second.value;
}

void UniformTruths::forget(const void* first, std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (truths_.empty()) return;
  const auto begin = address(first);
  const auto end = begin + static_cast<std::uintptr_t>(bytes);
  auto one = truths_.upper_bound(begin);
  if (one != truths_.begin()) --one;
  while (one != truths_.end() && one->first < end) {
    const auto stop =
        one->first + static_cast<std::uintptr_t>(one->second.bytes);
    one = stop > begin ? truths_.erase(one) : std::next(one);
  }
}

UniformTruths& uniform_truths() {
  static UniformTruths truths;
  return truths;
}

std::unique_ptr<KnownCall> KnownCall::before(
    const at::RecordFunction& function) {
  if (computing || !computes(function)) return nullptr;
  auto call = std::make_unique<KnownCall>();
  int on_device = 0;
  {
    const Apart apart;
    for (const at::IValue& input : function.inputs()) {
      auto copy = call->arguments_.empty() && overwrites(function.name())
                      ? place_for(input, on_device)
                      : on_host(input, on_device);
      if (!copy) {
        call->arguments_.clear();
        on_device = 0;
        break;
      }
      call->arguments_.push_back(*std::move(copy));
    }
  }
  if (on_device > 0) {
    const auto schema = function.operator_schema();
    if (!schema) return nullptr;
    for (std::size_t i = 0; i < call->arguments_.size(); ++i) {
      const auto* alias = schema->arguments()[i].alias_info();
      if (alias != nullptr && alias->isWrite()) {
        call->written_.emplace_back(i, function.inputs()[i]);
      }
    }
    return call;
  }
  call->arguments_.clear();
  call->finite_ = says_finite(function.name());
  return call->finite_ ? std::move(call) : nullptr;
}

void KnownCall::after(const at::RecordFunction& function) const {
  const auto outputs = function.outputs();
  const Apart apart;
  if (finite_) {
    if (outputs.size() == 1 && outputs[0].isTensor()) {
      const auto& to = outputs[0].toTensor();
      if (to.numel() <= kMostTruths) {
        write(to, at::full({}, *finite_, at::kBool).expand(to.sizes()));
      }
    }
    return;
  }
  const auto name = function.operator_name();
  if (!name) return;
  const auto op = c10::Dispatcher::singleton().findSchema(*name);
  if (!op || is_random(*op)) return;
  torch::jit::Stack stack(arguments_);
  try {
    op->callBoxed(stack);
  } catch (const std::exception&) {
    return;  // not for the host
  }
  for (std::size_t i = 0; i < std::min(outputs.size(), stack.size()); ++i) {
    write(outputs[i], stack[i]);
  }
  for (const auto& [i, to] : written_) write(to, arguments_[i]);
}

}  // namespace lowtide::dry
