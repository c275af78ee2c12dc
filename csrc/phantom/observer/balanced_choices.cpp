#include "phantom/observer/balanced_choices.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cmath>
#include <string_view>
#include <unordered_map>

#include "phantom/observer/assumptions.h"
#include "phantom/observer/operator_traits.h"

namespace lowtide::dry {
namespace {

using Values = c10::ArrayRef<const c10::IValue>;

// Of counts that are written: more than any router has experts.
constexpr std::int64_t kMostCounts = std::int64_t{1} << 16;

enum class Kind {
  kChooses,
  kSame,
  kEqual,
  kUnequal,
  kOneHot,
  kNot,
  kAny,
  kSum,
  kMarks
};

std::optional<Kind> kind_of(std::string_view name) {
  static const std::unordered_map<std::string_view, Kind> kKinds = {
      {"aten::topk", Kind::kChooses},    {"aten::argmax", Kind::kChooses},
      {"aten::argmin", Kind::kChooses},  {"aten::multinomial", Kind::kChooses},
      {"aten::_to_copy", Kind::kSame},   {"aten::clone", Kind::kSame},
      {"aten::index", Kind::kSame},      {"aten::index_select", Kind::kSame},
      {"aten::repeat", Kind::kSame},     {"aten::eq", Kind::kEqual},
      {"aten::ne", Kind::kUnequal},      {"aten::one_hot", Kind::kOneHot},
      {"aten::logical_not", Kind::kNot}, {"aten::bitwise_not", Kind::kNot},
      {"aten::any", Kind::kAny},         {"aten::sum", Kind::kSum},
      {"aten::scatter", Kind::kMarks},   {"aten::scatter_", Kind::kMarks},
  };
  return found_in(kKinds, name);
}

// A tensor of a device with bytes; none for what stands for one.
const at::Tensor* tensor_at(Values values, std::size_t place) {
  if (place >= values.size() || !values[place].isTensor()) return nullptr;
  const at::Tensor& tensor = values[place].toTensor();
  const bool has = tensor.defined() && tensor.is_cuda() &&
                   tensor.has_storage() && tensor.layout() == at::kStrided &&
                   !tensor.unsafeGetTensorImpl()->is_python_dispatch() &&
                   first_byte(tensor.storage()) != nullptr;
  return has ? &tensor : nullptr;
}

std::int64_t integer_at(Values values, std::size_t place, std::int64_t other) {
  return place < values.size() && values[place].isInt() ? values[place].toInt()
                                                        : other;
}

// None for a dimension that is not there: the operator will say so.
std::optional<std::int64_t> size_along(const at::Tensor& tensor,
                                       std::int64_t dimension) {
  const auto dimensions = std::max<std::int64_t>(tensor.dim(), 1);
  if (dimension < -dimensions || dimension >= dimensions) return std::nullopt;
  return tensor.dim() == 0 ? 1 : tensor.size(dimension);
}

// As equal as whole numbers are.
void write_counts(const at::Tensor& counts, std::int64_t total) {
  const auto places = counts.numel();
  if (places == 0 || places > kMostCounts || !counts.is_contiguous()) return;
  const c10::impl::ExcludeDispatchKeyGuard below(
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::python_ks);
  auto equal = at::empty(counts.sizes(), at::kLong);
  auto* const each = equal.mutable_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < places; ++i) {
    each[i] = total / places + (i < total % places ? 1 : 0);
  }
  equal = equal.to(counts.scalar_type());
  driver_copies(counts.mutable_data_ptr(), equal.const_data_ptr(),
                static_cast<std::int64_t>(equal.nbytes()));
  assume("counts of choices are equal, as of balanced experts");
}

}  // namespace

StorageFacts<std::int64_t>& choices() {
  static StorageFacts<std::int64_t> choices;
  return choices;
}

StorageFacts<double>& shares() {
  static StorageFacts<double> shares;
  return shares;
}

std::optional<BalancedCall> BalancedCall::before(
    const at::RecordFunction& function) {
  const auto kind = kind_of(function.name());
  const auto inputs = function.inputs();
  // A scatter marks in its first tensor what its third has chosen.
  const std::size_t chosen = kind == Kind::kMarks ? 2 : 0;
  const auto* from = kind ? tensor_at(inputs, chosen) : nullptr;
  if (from == nullptr) return std::nullopt;
  const auto of = choices().of(*from);
  const auto share = shares().of(*from);
  if (*kind != Kind::kChooses && !of && !share) return std::nullopt;
  BalancedCall call;
  switch (*kind) {
    case Kind::kChooses: {
      // Behind the number of a topk comes the dimension; a multinomial has a
      // number and chooses along the last.
      const std::string_view name = function.name();
      const bool is_topk = name == "aten::topk";
      const std::size_t place = is_topk ? 2 : 1;
      const bool is_last = name == "aten::multinomial";
      call.place_ = is_topk ? 1 : 0;
      call.choices_ =
          size_along(*from, is_last ? -1 : integer_at(inputs, place, -1));
      break;
    }
    case Kind::kSame:
      call.choices_ = of;
      call.share_ = share;
      break;
    case Kind::kEqual:
      if (of) call.share_ = 1 / static_cast<double>(*of);
      break;
    case Kind::kUnequal:
      if (of) call.share_ = 1 - 1 / static_cast<double>(*of);
      break;
    case Kind::kOneHot:
      if (of) {
        const auto classes = integer_at(inputs, 1, -1);
        call.share_ = 1 / static_cast<double>(classes > 0 ? classes : *of);
      }
      break;
    case Kind::kNot:
      if (share) call.share_ = 1 - *share;
      break;
    case Kind::kAny:
      call.share_ = share;
      call.joined_ = from->numel();
      break;
    case Kind::kSum:
      if (share) {
        call.counted_ =
            std::llround(*share * static_cast<double>(from->numel()));
      }
      break;
    case Kind::kMarks: {
      const auto* marked = tensor_at(inputs, 0);
      if (of && marked && marked->numel() > 0 &&
          at::isIntegralType(marked->scalar_type(), /*includeBool=*/true)) {
        call.share_ = static_cast<double>(from->numel()) /
                      static_cast<double>(marked->numel());
      }
      break;
    }
  }
  return call;
}

void BalancedCall::after(const at::RecordFunction& function) const {
  const auto& results = function.outputs();
  const auto* to = tensor_at(Values(results.data(), results.size()), place_);
  if (to == nullptr || to->numel() == 0) return;
  if (choices_) choices().set(*to, *choices_);
  if (share_) {
    const auto joined = joined_ ? *joined_ / to->numel() : 1;
    shares().set(*to, std::min(1.0, *share_ * static_cast<double>(joined)));
  }
  if (counted_) write_counts(*to, *counted_);
}

}  // namespace lowtide::dry
