#include "activation/lineage.h"

#include <c10/util/hash.h>

namespace lowtide::activation {
namespace {

constexpr std::uint64_t kGiven = 0;

bool has_bytes(const at::Tensor& tensor) {
  return tensor.has_storage() && !tensor.is_inference();
}

std::uint64_t with_geometry(std::uint64_t origin, const at::Tensor& tensor) {
  // Subclasses may have sizes that only Python knows.
  if (tensor.unsafeGetTensorImpl()->is_python_dispatch()) return origin;
  for (const auto size : tensor.sizes()) {
    origin = c10::hash_combine(origin, static_cast<std::uint64_t>(size));
  }
  if (tensor.layout() != at::kStrided) return origin;
  for (const auto stride : tensor.strides()) {
    origin = c10::hash_combine(origin, static_cast<std::uint64_t>(stride));
  }
  return c10::hash_combine(origin,
                           static_cast<std::uint64_t>(tensor.storage_offset()));
}

}  // namespace

Lineage::Entry* Lineage::find(const at::Tensor& tensor) {
  if (!has_bytes(tensor)) return nullptr;
  const auto found = entries_.find(tensor.storage().unsafeGetStorageImpl());
  // An expired identity: the address was used again.
  if (found == entries_.end() || found->second.identity.expired()) {
    return nullptr;
  }
  return &found->second;
}

std::uint64_t Lineage::of(const at::Tensor& tensor) {
  if (tensor.requires_grad() && tensor.is_leaf()) given(tensor);
  const Entry* const entry = find(tensor);
  if (entry == nullptr) return with_geometry(kGiven, tensor);
  // Writes that no call announced.
  const auto unseen =
      static_cast<std::uint64_t>(tensor._version() - entry->version);
  return with_geometry(
      unseen == 0 ? entry->origin : c10::hash_combine(entry->origin, unseen),
      tensor);
}

void Lineage::given(const at::Tensor& tensor) {
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
  entries_.insert_or_assign(
      output.storage().unsafeGetStorageImpl(),
      Entry{output.storage().getWeakStorageImpl(),
            c10::hash_combine(call, static_cast<std::uint64_t>(place)), version,
            Producer{number, place}, version});
}

void Lineage::wrote(const at::Tensor& tensor, std::uint64_t call) {
  if (!has_bytes(tensor)) return;
  if (Entry* const entry = find(tensor); entry != nullptr) {
    entry->origin = c10::hash_combine(entry->origin, call);
    entry->version = tensor._version();
    return;
  }
  const std::int64_t version = tensor._version();
  entries_.insert_or_assign(
      tensor.storage().unsafeGetStorageImpl(),
      Entry{tensor.storage().getWeakStorageImpl(), call, version, {}, version});
}

Lineage::Producer Lineage::producer_of(const at::Tensor& tensor) {
  const Entry* const entry = find(tensor);
  if (entry == nullptr) return {};
  Producer producer = entry->producer;
  producer.written_since = entry->made_at != tensor._version();
  return producer;
}

}  // namespace lowtide::activation
