#include "base/tensor_over.h"

#include <c10/core/InferenceMode.h>

#include <utility>

namespace lowtide::base {

at::Tensor tensor_over(c10::Storage storage, at::ScalarType dtype,
                       at::IntArrayRef sizes, at::IntArrayRef strides,
                       std::int64_t offset) {
  const c10::InferenceMode normal(false);
  const auto key =
      c10::computeDispatchKey(dtype, c10::Layout::Strided, storage.device());
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

at::Tensor bytes_of(const at::Tensor& tensor) {
  const auto bytes = static_cast<std::int64_t>(tensor.nbytes());
  const auto first =
      tensor.storage_offset() * static_cast<std::int64_t>(tensor.itemsize());
  return tensor_over(tensor.storage(), at::kByte, {bytes}, {1}, first);
}

c10::Storage owning_storage(c10::DataPtr lease, std::int64_t bytes) {
  return {c10::Storage::use_byte_size_t(), static_cast<std::size_t>(bytes),
          std::move(lease), nullptr, /*resizable=*/false};
}

}  // namespace lowtide::base
