#include "activation/lineage.h"

namespace lowtide::activation {
namespace {

constexpr std::uint64_t kGiven = 0;

bool has_bytes(const at::Tensor& tensor) {
  return tensor.has_storage() && !tensor.is_inference();
}

std::uint64_t with_geometry(std::uint64_t origin, const at::Tensor& tensor) {
  // Subclasses may have sizes that only Python knows.
  if (tensor.unsafeGetTensorImpl()->is_python_dispatch()) return origin;
  if (tensor.is_nested()) return origin;
  for (const auto size : tensor.sizes()) {
    origin = combine(origin, static_cast<std::uint64_t>(size));
  }
  if (tensor.layout() != at::kStrided) return origin;
  for (const auto stride : tensor.strides()) {
    origin = combine(origin, static_cast<std::uint64_t>(stride));
  }
  return combine(origin, static_cast<std::uint64_t>(tensor.storage_offset()));
}

}  // namespace

// What 0 and 1, or -1 and -2, make of a hash must differ in all of its bits:
// geometries are small numbers, one after the other.
std::uint64_t combine(std::uint64_t hash, std::uint64_t value) {
  hash = (hash * 0x9ddfea08eb382d69) ^ value;
  hash = (hash ^ (hash >> 32)) * 0xd6e8feb86659fd93;
  return hash ^ (hash >> 32);
}

Lineage::Lineage(const std::vector<at::Tensor>& arguments) {
  for (const auto& argument : arguments) {
    arguments_.insert(argument.unsafeGetTensorImpl());
  }
}

Lineage::Entry* Lineage::find(const at::Tensor& tensor) {
  return has_bytes(tensor) ? entries_.find(tensor) : nullptr;
}

std::uint64_t Lineage::of(const at::Tensor& tensor) {
  if (tensor.requires_grad() && tensor.is_leaf()) forget(tensor);
  return with_geometry(origin_of(tensor), tensor);
}

std::uint64_t Lineage::origin_of(const at::Tensor& tensor) {
  const Entry* const entry = find(tensor);
  if (entry == nullptr || entry->origin == kGiven) {
    const auto* const base = tensor.is_view()
                                 ? tensor._base().unsafeGetTensorImpl()
                                 : tensor.unsafeGetTensorImpl();
    if (parameters_.contains(base)) {
      return reinterpret_cast<std::uintptr_t>(base);
    }
  }
  if (entry == nullptr) return kGiven;
  // Writes that no call announced.
  const auto unseen =
      static_cast<std::uint64_t>(tensor._version() - entry->version);
  return unseen == 0 ? entry->origin : combine(entry->origin, unseen);
}

void Lineage::given(const at::Tensor& parameter) {
  const auto* const impl = parameter.unsafeGetTensorImpl();
  if (!arguments_.contains(impl)) parameters_.insert(impl);
  forget(parameter);
}

void Lineage::forget(const at::Tensor& tensor) {
  if (Entry* const entry = find(tensor); entry != nullptr) {
    entry->origin = kGiven;
    entry->version = tensor._version();
    entry->producer = {};
  }
}

void Lineage::made(const at::Tensor& output, std::uint64_t call,
                   std::int64_t number, std::int64_t place) {
  if (!has_bytes(output) || find(output) != nullptr) return;
  const std::int64_t version = output._version();
  entries_.put(output, {combine(call, static_cast<std::uint64_t>(place)),
                        version, Producer{number, place}, version});
}

void Lineage::wrote(const at::Tensor& tensor, std::uint64_t call) {
  if (!has_bytes(tensor)) return;
  if (Entry* const entry = find(tensor); entry != nullptr) {
    entry->origin = combine(entry->origin, call);
    entry->version = tensor._version();
    entry->producer.written_since = true;
    return;
  }
  const std::int64_t version = tensor._version();
  entries_.put(tensor, {call, version, {}, version});
}

Lineage::Producer Lineage::producer_of(const at::Tensor& tensor) {
  const Entry* const entry = find(tensor);
  if (entry == nullptr) return {};
  Producer producer = entry->producer;
  producer.written_since |= entry->made_at != tensor._version();
  return producer;
}

}  // namespace lowtide::activation
