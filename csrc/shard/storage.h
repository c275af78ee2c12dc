// A storage whose bytes can be moved: tensors, views and what autograd saved
// follow it, versions stay, and torch.compile sees the same tensor.
//
// `p.data = other` would leave saved tensors behind (NaN gradients) and
// `resize_` would need version-counter tricks; repointing needs neither.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <string>
#include <utility>

#include "base/tensor_over.h"

namespace lowtide::shard {

using base::owning_storage;
using base::tensor_over;

// Bytes of an element.
inline std::int64_t itemsize(at::ScalarType dtype) {
  return static_cast<std::int64_t>(c10::elementSize(dtype));
}

// [Note: Reads of what was given back]
// A tensor outlives the bytes it shows: a parameter that someone kept, a view
// of it, what autograd saved.  Read in between, a null pointer would end the
// process and an old one give numbers of something else.  StorageImpl has an
// error for reads of tensors without bytes, made for fake tensors; these do the
// same, so that every operator on every device raises `error` instead.
//
// Says `error` from now on, whenever bytes are away.
void set_read_error(const c10::Storage& storage, std::string error);
// The text for `what` of `unit`.
std::string read_error(const std::string& unit, const std::string& what);
// Shows `bytes` bytes of `data`; takes them away again.  A storage with an
// error keeps its size meanwhile, so that views can be made and raise it too.
void show_bytes(const c10::Storage& storage, c10::DataPtr data,
                std::int64_t bytes);
void hide_bytes(const c10::Storage& storage);
// What data() gives, null if away.
const void* data_or_null(const c10::Storage& storage);

class RepointedStorage {
 public:
  // Unbound: null data.  `bytes`: the size until it is bound.
  explicit RepointedStorage(c10::Device device, std::int64_t bytes = 0);
  // Reads while unbound raise `error` ([Note: Reads of what was given back]).
  void set_read_error(std::string error) const {
    shard::set_read_error(storage_, std::move(error));
  }
  // Whether Tensor.numpy() was called on it: the array has the bytes' address
  // and no share in them.  Never of a device's memory.
  bool has_array() const;

  // Shows `bytes` bytes at `data`, which the caller keeps alive until unbind.
  void bind(void* data, std::int64_t bytes);
  // The same for bytes [offset, offset + bytes) of what `owner` owns, which
  // live until both are unbound: torch, having sent a tensor to another
  // process, keeps what its storage showed for as long as that one reads it.
  void bind_within(const RepointedStorage& owner, std::int64_t offset,
                   std::int64_t bytes);
  void unbind();
  // The same, but the storage owns the bytes until unbind, or until the last
  // tensor on it dies: a collective that still writes keeps them alive.
  void own(c10::DataPtr lease, std::int64_t bytes);

  // A tensor on this storage, whether bound or not.  Normal (not inference),
  // no autograd history.  `offset` in elements.
  at::Tensor view(at::ScalarType dtype, at::IntArrayRef sizes,
                  at::IntArrayRef strides, std::int64_t offset = 0) const;

  // How many tensors (and others) hold the storage.
  std::int64_t use_count() const;
  const void* data() const { return data_or_null(storage_); }
  void* mutable_data() const { return storage_.mutable_data(); }

 private:
  c10::Storage storage_;
};

// A storage of its own over [offset, offset + bytes) of `owner`, which it keeps
// alive.
c10::Storage sub_storage(const c10::Storage& owner, std::int64_t offset,
                         std::int64_t bytes);
// The bytes of a storage within `owner`, as sub_storage shows them.
c10::DataPtr bytes_within(const c10::Storage& owner, std::int64_t offset);
// The storage that `storage` is within; null if it has bytes of its own.
const c10::Storage* owner_of(const c10::Storage& storage);

// A tensor over part of `base`'s storage, without the dispatcher: what
// base.as_strided(sizes, strides, offset) gives, `offset` in elements from the
// start of the storage.
at::Tensor strided_view(const at::Tensor& base, at::IntArrayRef sizes,
                        at::IntArrayRef strides, std::int64_t offset);

// Elements [begin, begin + numel) of the flat tensor `base`.
inline at::Tensor slice_of(const at::Tensor& base, std::int64_t begin,
                           std::int64_t numel) {
  return strided_view(base, {numel}, {1}, base.storage_offset() + begin);
}

// A contiguous 1-D tensor over `numel` elements at byte `offset` of `storage`.
at::Tensor flat_view(const c10::Storage& storage, at::ScalarType dtype,
                     std::int64_t byte_offset, std::int64_t numel);

}  // namespace lowtide::shard
