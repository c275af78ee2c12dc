// Operators that make, resize and exchange storages.
#include <ATen/EmptyTensor.h>

#include <optional>
#include <utility>

#include "phantom/device/device_allocator.h"
#include "phantom/device/kernels.h"
#include "phantom/device/phantom_device.h"
#include "phantom/device/storage.h"

namespace lowtide::phantom {
namespace {

using at::IntArrayRef;
using at::Tensor;
using c10::Device;
using c10::Layout;
using c10::MemoryFormat;
using c10::ScalarType;
using c10::Storage;

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

Tensor empty(IntArrayRef size, std::optional<ScalarType> dtype,
             std::optional<Layout>, std::optional<Device> device,
             std::optional<bool>, std::optional<MemoryFormat> format) {
  require_device(device.value_or(kPhantomDevice));
  return at::detail::empty_generic(size, &device_allocator(), kKeys,
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride,
                     std::optional<ScalarType> dtype, std::optional<Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  require_device(device.value_or(kPhantomDevice));
  return at::detail::empty_strided_generic(size, stride, &device_allocator(),
                                           kKeys, c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, IntArrayRef size,
                      std::optional<MemoryFormat> format) {
  auto* const impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    impl->set_sizes_contiguous(size);
    auto& storage = *impl->unsafe_storage().unsafeGetStorageImpl();
    const std::size_t needed = at::detail::computeStorageNbytesContiguous(
        size, impl->dtype().itemsize(),
        static_cast<std::size_t>(impl->storage_offset()));
    if (impl->numel() > 0 && needed > storage.nbytes()) {
      resize_storage(storage, needed);
    }
  }
  if (format && *format != MemoryFormat::Preserve) {
    impl->empty_tensor_restride(*format);
  }
  return self;
}

Tensor& set_storage_at(Tensor& result, Storage storage, std::int64_t offset,
                       IntArrayRef size, IntArrayRef stride) {
  auto* const impl = result.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (stride.empty() && !size.empty()) {
    impl->set_sizes_contiguous(size);
    impl->set_storage_offset(offset);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  return result;
}

Tensor& set_storage(Tensor& result, Storage storage) {
  const auto numel =
      static_cast<std::int64_t>(storage.nbytes() / result.itemsize());
  return set_storage_at(result, std::move(storage), 0, {numel}, {1});
}

Tensor& set_tensor(Tensor& result, const Tensor& source) {
  return set_storage_at(result, source.storage(), source.storage_offset(),
                        source.sizes(), source.strides());
}

Tensor& set_empty(Tensor& result) {
  return set_storage_at(result, make_storage(0), 0, {0}, {1});
}

void record_tensor_stream(Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), stream);
}

// Whether `parameter.data = tensor` may put one in place of the other.  Torch
// has a list of devices that share the plain TensorImpl; PrivateUse1 is not on
// it, and Module.to() would replace parameters where CUDA keeps them.
bool may_take_data_of(const Tensor& self, const Tensor& from) {
  const auto plain = [](const Tensor& tensor) {
    const auto type = tensor.device().type();
    return tensor.layout() == at::kStrided &&
           (type == kPhantom || type == c10::kCPU);
  };
  return plain(self) && plain(from);
}

}  // namespace

void register_storage_kernels(torch::Library& aten) {
  aten.impl("empty.memory_format", &empty);
  aten.impl("empty_strided", &empty_strided);
  aten.impl("resize_", &resize_);
  aten.impl("set_.source_Storage_storage_offset", &set_storage_at);
  aten.impl("set_.source_Storage", &set_storage);
  aten.impl("set_.source_Tensor", &set_tensor);
  aten.impl("set_", &set_empty);
  aten.impl("record_stream", &record_tensor_stream);
  aten.impl("_has_compatible_shallow_copy_type", &may_take_data_of);
}

}  // namespace lowtide::phantom
