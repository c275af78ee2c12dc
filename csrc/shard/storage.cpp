#include "shard/storage.h"

#include <c10/core/StorageImpl.h>

#include <memory>
#include <optional>

#include "base/check.h"
#include "base/wrapped_bytes.h"

namespace lowtide::shard {
namespace {

// torch has a way to make a storage raise and none to make it stop, as a gather
// needs.  An explicit instantiation may name a private member.
template <bool c10::StorageImpl::*Flag>
struct Raising {
  friend bool& raises(c10::StorageImpl& impl) { return impl.*Flag; }
};
template struct Raising<&c10::StorageImpl::throw_on_immutable_data_ptr_>;
bool& raises(c10::StorageImpl& impl);

// Tensor.numpy() marks a storage as one that must not be resized, which shows
// that an array has its address.  Only a storage with an allocator can lose the
// mark.
class FixedSize final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    throw Error(base::error_text("a unit's storage", "its size to stay",
                                 base::concat("a resize to ", bytes, " bytes"),
                                 "Copy the tensor first."));
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

c10::Allocator* fixed_size() {
  static FixedSize allocator;
  return &allocator;
}

void drop_owner(void* context) { delete static_cast<c10::Storage*>(context); }

const base::Wrapping kParts(&drop_owner, [](void* owner) {
  return &static_cast<c10::Storage*>(owner)
              ->unsafeGetStorageImpl()
              ->_mutable_data_ptr_no_checks();
});

// Of one storage and of those that are bound within it.
struct Shared : c10::intrusive_ptr_target {
  explicit Shared(c10::DataPtr all) : bytes(std::move(all)) {}
  c10::DataPtr bytes;
};

void let_go(void* shared) {
  c10::intrusive_ptr<Shared>::reclaim(static_cast<Shared*>(shared));
}

const base::Wrapping kShared(&let_go, [](void* shared) {
  return &static_cast<Shared*>(shared)->bytes;
});

c10::DataPtr part_of(c10::intrusive_ptr<Shared> shared, std::int64_t offset) {
  auto* const data = static_cast<char*>(shared->bytes.get()) + offset;
  const auto device = shared->bytes.device();
  return {data, shared.release(), &let_go, device};
}

}  // namespace

void set_read_error(const c10::Storage& storage, std::string error) {
  auto* impl = storage.unsafeGetStorageImpl();
  impl->get_extra_meta().custom_data_ptr_error_msg_ = std::move(error);
  raises(*impl) = data_or_null(storage) == nullptr;
}

std::string read_error(const std::string& unit, const std::string& what) {
  return base::error_text(
      what, base::concat("a read while its unit '", unit, "' is gathered"),
      "one when it had no bytes",
      "Read it inside of the unit's forward or backward, or between unshard() "
      "and reshard(); what is kept for later is a clone().");
}

void show_bytes(const c10::Storage& storage, c10::DataPtr data,
                std::int64_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  raises(*impl) = false;
  impl->set_data_ptr_noswap(std::move(data));
  impl->set_nbytes(static_cast<std::size_t>(bytes));
}

void hide_bytes(const c10::Storage& storage) {
  auto* impl = storage.unsafeGetStorageImpl();
  raises(*impl) = impl->get_extra_meta().custom_data_ptr_error_msg_.has_value();
  impl->set_data_ptr_noswap(c10::DataPtr(nullptr, storage.device()));
  if (!raises(*impl)) {
    impl->set_nbytes(std::size_t{0});
  }
}

const void* data_or_null(const c10::Storage& storage) {
  return storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
}

RepointedStorage::RepointedStorage(c10::Device device, std::int64_t bytes)
    : storage_(c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), c10::SymInt(bytes),
          c10::DataPtr(nullptr, device), fixed_size(),
          /*resizable=*/device.is_cpu())) {}

bool RepointedStorage::has_array() const {
  return storage_.device().is_cpu() && !storage_.resizable();
}

void RepointedStorage::bind(void* data, std::int64_t bytes) {
  show_bytes(storage_, c10::DataPtr(data, storage_.device()), bytes);
}

void RepointedStorage::bind_within(const RepointedStorage& owner,
                                   std::int64_t offset, std::int64_t bytes) {
  const auto& all =
      owner.storage_.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  LOWTIDE_INVARIANT(all.get() == nullptr || all.get_deleter() == &let_go,
                    "what others are within owns its bytes");
  show_bytes(storage_,
             all.get() == nullptr
                 ? c10::DataPtr(nullptr, storage_.device())
                 : part_of(c10::intrusive_ptr<Shared>::reclaim_copy(
                               static_cast<Shared*>(all.get_context())),
                           offset),
             bytes);
}

void RepointedStorage::own(c10::DataPtr lease, std::int64_t bytes) {
  show_bytes(storage_,
             lease.get() == nullptr
                 ? std::move(lease)
                 : part_of(c10::make_intrusive<Shared>(std::move(lease)), 0),
             bytes);
}

void RepointedStorage::unbind() { hide_bytes(storage_); }

at::Tensor RepointedStorage::view(at::ScalarType dtype, at::IntArrayRef sizes,
                                  at::IntArrayRef strides,
                                  std::int64_t offset) const {
  return tensor_over(storage_, dtype, sizes, strides, offset);
}

std::int64_t RepointedStorage::use_count() const {
  return static_cast<std::int64_t>(storage_.use_count());
}

c10::DataPtr bytes_within(const c10::Storage& owner, std::int64_t offset) {
  auto* data = static_cast<char*>(owner.mutable_data()) + offset;
  auto keep_alive = std::make_unique<c10::Storage>(owner);
  return {data, keep_alive.release(), &drop_owner, owner.device()};
}

c10::Storage sub_storage(const c10::Storage& owner, std::int64_t offset,
                         std::int64_t bytes) {
  return owning_storage(bytes_within(owner, offset), bytes);
}

const c10::Storage* owner_of(const c10::Storage& storage) {
  const auto& bytes =
      storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  return bytes.get_deleter() == &drop_owner
             ? static_cast<const c10::Storage*>(bytes.get_context())
             : nullptr;
}

at::Tensor strided_view(const at::Tensor& base, at::IntArrayRef sizes,
                        at::IntArrayRef strides, std::int64_t offset) {
  return tensor_over(base.storage(), base.scalar_type(), sizes, strides,
                     offset);
}

at::Tensor flat_view(const c10::Storage& storage, at::ScalarType dtype,
                     std::int64_t byte_offset, std::int64_t numel) {
  const auto itemsize = static_cast<std::int64_t>(c10::elementSize(dtype));
  LOWTIDE_INVARIANT(byte_offset % itemsize == 0,
                    "a slice starts at a whole element");
  return tensor_over(storage, dtype, {numel}, {1}, byte_offset / itemsize);
}

}  // namespace lowtide::shard
