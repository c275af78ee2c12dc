#include "shard/neighbours.h"

#include "base/check.h"
#include "shard/storage.h"

namespace lowtide::shard {
namespace {

// What was allocated at once.
const c10::Storage& allocation_of(const at::Tensor& tensor) {
  const c10::Storage* storage = &tensor.storage();
  while (const auto* owner = owner_of(*storage)) {
    storage = owner;
  }
  return *storage;
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.has_storage() && tensor.layout() == at::kStrided &&
         !tensor.key_set().has_any(c10::DispatchKeySet(
             {c10::DispatchKey::Python, c10::DispatchKey::Conjugate,
              c10::DispatchKey::Negative})) &&
         tensor.is_contiguous();
}

std::int64_t bytes_from(const void* base, const void* data) {
  return static_cast<const char*>(data) - static_cast<const char*>(base);
}

}  // namespace

at::Tensor neighbours_as_one(at::TensorList tensors, at::TensorList like) {
  LOWTIDE_INVARIANT(!tensors.empty() && tensors.size() == like.size(),
                    "as many tensors as they are like");
  const auto& first = tensors[0];
  if (!is_plain(first)) {
    return {};
  }
  const auto& allocation = allocation_of(first);
  const void* const begin = data_or_null(allocation);
  const auto dtype = first.scalar_type();
  const void* const data = data_or_null(first.storage());
  if (begin == nullptr || data == nullptr) {  // asleep
    return {};
  }
  const auto offset =
      bytes_from(begin, data) + first.storage_offset() * itemsize(dtype);
  std::int64_t numel = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& tensor = tensors[i];
    if (!is_plain(tensor) || tensor.scalar_type() != dtype ||
        tensor.numel() != like[i].numel()) {
      return {};
    }
    const void* const there = data_or_null(tensor.storage());
    if (there == nullptr ||
        allocation_of(tensor).unsafeGetStorageImpl() !=
            allocation.unsafeGetStorageImpl() ||
        bytes_from(begin, there) + tensor.storage_offset() * itemsize(dtype) !=
            offset + numel * itemsize(dtype)) {
      return {};
    }
    numel += tensor.numel();
  }
  if (offset % itemsize(dtype) != 0) {
    return {};
  }
  return flat_view(allocation, dtype, offset, numel);
}

std::vector<at::Tensor> parts_of(const at::Tensor& whole, at::TensorList like) {
  std::vector<at::Tensor> parts;
  parts.reserve(like.size());
  const auto size = itemsize(whole.scalar_type());
  auto offset = whole.storage_offset() * size;
  for (const auto& one : like) {
    const auto bytes = one.numel() * size;
    parts.push_back(tensor_over(sub_storage(whole.storage(), offset, bytes),
                                whole.scalar_type(), one.sizes(), one.strides(),
                                0));
    offset += bytes;
  }
  LOWTIDE_INVARIANT(offset == (whole.storage_offset() + whole.numel()) * size,
                    "parts are all of the whole");
  return parts;
}

}  // namespace lowtide::shard
