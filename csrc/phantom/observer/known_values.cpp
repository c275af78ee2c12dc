#include "phantom/observer/known_values.h"

#include <ATen/core/LegacyTypeDispatch.h>
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

#include "phantom/observer/assumptions.h"
#include "phantom/observer/driver.h"
#include "phantom/observer/operator_traits.h"

namespace lowtide::dry {
namespace {

// Of a storage whose values are computed with: as many as the driver keeps of a
// copy (kept_bytes.h).
constexpr std::int64_t kMostBytes = std::int64_t{1} << 20;
// Of a tensor of equal truth values.
constexpr std::int64_t kMostTruths = std::int64_t{1} << 26;

thread_local bool computing = false;

std::int64_t bytes_of(const c10::Storage& storage) {
  return static_cast<std::int64_t>(storage.nbytes());
}

// torch's own checks of values, such as those of distributions.
constexpr std::string_view kRequires = "aten::_is_all_true";

// What an operator says of all numbers that nobody computed: that they are
// finite, and as they should be.
std::optional<bool> says_of_all(std::string_view name) {
  static const std::unordered_map<std::string_view, bool> kNames = {
      {"aten::isfinite", true},  {"aten::isinf", false},
      {"aten::isnan", false},    {"aten::isneginf", false},
      {"aten::isposinf", false}, {kRequires, true},
  };
  return found_in(kNames, name);
}

// What decides a result alone, whatever else there is: true of "or", false of
// "and".
std::optional<bool> decisive(std::string_view name) {
  static const std::unordered_map<std::string_view, bool> kNames = {
      {"aten::bitwise_or", true},   {"aten::bitwise_or_", true},
      {"aten::logical_or", true},   {"aten::logical_or_", true},
      {"aten::bitwise_and", false}, {"aten::bitwise_and_", false},
      {"aten::logical_and", false}, {"aten::logical_and_", false},
  };
  return found_in(kNames, name);
}

// What has a kernel of its own: what others call inside is recorded itself. Not
// what hands out memory or has sizes that depend on values.
bool computes(std::string_view name, const OperatorTraits& traits) {
  static const std::unordered_set<std::string_view> kOthers = {
      "aten::_local_scalar_dense", "aten::_unique2",      "aten::empty",
      "aten::empty_strided",       "aten::masked_select", "aten::nonzero",
      "aten::record_stream",       "aten::resize_",       "aten::set_",
      "aten::unique_consecutive",  "aten::unique_dim",
  };
  const bool has_results = !traits.made.empty() || !traits.written.empty();
  const bool has_kernel = traits.has_kernel || name == "aten::copy_";
  return name.starts_with("aten::") && has_kernel && has_results &&
         !traits.is_random && !kOthers.contains(name);
}

// Of a tensor of equal truth values.
std::optional<bool> truth_of(const at::Tensor& tensor) {
  if (tensor.scalar_type() != at::kBool || tensor.numel() > kMostTruths) {
    return std::nullopt;
  }
  return uniform_truths().of(tensor);
}

bool all_known(const at::IValue& value) {
  if (value.isTensor()) return is_known(value.toTensor());
  if (value.isTensorList()) {
    const auto tensors = value.toTensorVector();
    return std::all_of(tensors.begin(), tensors.end(),
                       [](const at::Tensor& each) { return is_known(each); });
  }
  if (value.isOptionalTensorList()) {
    const auto tensors = value.toOptionalTensorVector();
    return std::all_of(tensors.begin(), tensors.end(), [](const auto& each) {
      return !each || is_known(*each);
    });
  }
  return !value.isGenerator() && !value.isStorage();
}

// One that is known.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (tensor.is_cpu()) return tensor.detach().clone();
  if (const auto truth = truth_of(tensor)) {
    return at::full({}, *truth, at::kBool).expand(tensor.sizes());
  }
  auto copy = at::empty_strided(tensor.sizes(), tensor.strides(),
                                tensor.options().device(at::kCPU));
  driver_copies(copy.mutable_data_ptr(), tensor.const_data_ptr(),
                bytes_of(copy.storage()));
  return copy;
}

// `value`, which is known, with its tensors on the host.
at::IValue on_host(const at::IValue& value) {
  if (value.isTensor()) return on_host(value.toTensor());
  if (value.isTensorList()) {
    auto copies = value.toTensorVector();
    for (at::Tensor& tensor : copies) tensor = on_host(tensor);
    return copies;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> copies;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      copies.push_back(tensor ? std::optional(on_host(*tensor)) : std::nullopt);
    }
    return copies;
  }
  if (value.isDevice()) return at::IValue(c10::Device(at::kCPU));
  return value;
}

// Of a result: that it can be computed here, and kept.
bool is_small(const at::IValue& value) {
  const auto one = [](const at::Tensor& tensor) {
    if (!tensor.defined()) return true;
    if (tensor.layout() != at::kStrided) return false;
    return tensor.nbytes() <= static_cast<std::size_t>(kMostBytes) ||
           (tensor.scalar_type() == at::kBool && tensor.numel() <= kMostTruths);
  };
  if (value.isTensor()) return one(value.toTensor());
  if (!value.isTensorList()) return true;
  const auto tensors = value.toTensorVector();
  return std::all_of(tensors.begin(), tensors.end(), one);
}

// Whether a device has or gets a place there; a result that an operator is
// given may have no bytes yet.
bool is_place(const at::IValue& value) {
  if (!value.isTensor() || !is_small(value)) return false;
  const at::Tensor& to = value.toTensor();
  return to.defined() && to.is_cuda() && to.layout() == at::kStrided &&
         !to.unsafeGetTensorImpl()->is_python_dispatch();
}

at::IValue place_for(const at::IValue& value) {
  const at::Tensor& to = value.toTensor();
  return at::empty_strided(to.sizes(), to.strides(),
                           to.options().device(at::kCPU));
}

bool is_on_device(const at::IValue& value) {
  if (value.isTensor()) {
    return value.toTensor().defined() && value.toTensor().is_cuda();
  }
  if (value.isTensorList()) {
    const auto tensors = value.toTensorVector();
    return std::any_of(tensors.begin(), tensors.end(),
                       [](const auto& each) { return each.is_cuda(); });
  }
  return value.isDevice() && value.toDevice().is_cuda();
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

bool is_known(const at::Tensor& tensor) {
  if (!tensor.defined()) return true;
  if (!tensor.has_storage() || tensor.layout() != at::kStrided ||
      tensor.unsafeGetTensorImpl()->is_python_dispatch()) {
    return false;
  }
  const auto& storage = tensor.storage();
  if (tensor.is_cpu()) return bytes_of(storage) <= kMostBytes;
  if (!tensor.is_cuda() || first_byte(storage) == nullptr) return false;
  if (bytes_of(storage) <= kMostBytes &&
      driver_knows(first_byte(storage), bytes_of(storage))) {
    return true;
  }
  const auto bytes = static_cast<std::int64_t>(tensor.nbytes());
  if (bytes <= kMostBytes && tensor.is_non_overlapping_and_dense() &&
      driver_knows(tensor.const_data_ptr(), bytes)) {
    return true;
  }
  return truth_of(tensor).has_value();
}

namespace {

// Of an operator not all of whose arguments are known; none if it can be
// anything.
std::optional<bool> said_by(const at::RecordFunction& function) {
  const auto decides = decisive(function.name());
  if (!decides) return says_of_all(function.name());
  const Apart apart;
  for (const auto& input : function.inputs()) {
    if (!input.isTensor() || !is_known(input.toTensor())) continue;
    const at::Tensor& known = input.toTensor();
    if (*decides && known.scalar_type() != at::kBool) continue;
    const auto same = on_host(known).to(at::kBool).eq(*decides);
    if (same.all().item<bool>()) return decides;
  }
  return std::nullopt;
}

}  // namespace

StorageFacts<bool>& uniform_truths() {
  static StorageFacts<bool> truths;
  return truths;
}

std::unique_ptr<KnownCall> KnownCall::before(
    const at::RecordFunction& function) {
  if (computing) return nullptr;
  const auto& traits = traits_of(function);
  if (!says_of_all(function.name()) && !computes(function.name(), traits)) {
    return nullptr;
  }
  auto call = std::make_unique<KnownCall>();
  const auto inputs = function.inputs();
  const auto is_overwritten = [&](std::size_t i) {
    return i < traits.overwritten.size() && traits.overwritten[i];
  };
  bool known = false;  // a call that only the host has a part in is no device's
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!(is_overwritten(i) ? is_place(inputs[i]) : all_known(inputs[i]))) {
      call->said_ = said_by(function);
      return call->said_ ? std::move(call) : nullptr;
    }
    known = known || is_on_device(inputs[i]);
  }
  if (!known) return nullptr;
  const Apart apart;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    call->arguments_.push_back(is_overwritten(i) ? place_for(inputs[i])
                                                 : on_host(inputs[i]));
  }
  for (const auto i : traits.written) {
    if (i < inputs.size()) call->written_.emplace_back(i, inputs[i]);
  }
  return call;
}

bool KnownCall::after(const at::RecordFunction& function) const {
  const auto& outputs = function.outputs();
  const Apart apart;
  if (said_) {
    if (function.name() == kRequires) {
      assume(
          "what torch requires of values that nobody computed is taken to "
          "hold");
    }
    if (outputs.size() == 1 && outputs[0].isTensor()) {
      const auto& to = outputs[0].toTensor();
      if (to.numel() <= kMostTruths) {
        write(to, at::full({}, *said_, at::kBool).expand(to.sizes()));
      }
    }
    return true;
  }
  if (!std::all_of(outputs.begin(), outputs.end(), is_small)) return false;
  torch::jit::Stack stack(arguments_);
  try {
    traits_of(function).handle->callBoxed(stack);
  } catch (const std::exception&) {
    return false;  // not for the host
  }
  for (std::size_t i = 0; i < std::min(outputs.size(), stack.size()); ++i) {
    write(outputs[i], stack[i]);
  }
  for (const auto& [i, to] : written_) write(to, arguments_[i]);
  return true;
}

}  // namespace lowtide::dry
