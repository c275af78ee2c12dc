#include "base/seen_version.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>
#include <utility>

#include "base/check.h"

namespace lowtide::base {

namespace {

c10::intrusive_ptr<c10::TensorImpl> detached(const at::Tensor& tensor,
                                             bool may_change) {
  const auto* const impl = tensor.unsafeGetTensorImpl();
  // A dispatch mode need not see this; a tensor subclass must.
  std::optional<c10::impl::ExcludeDispatchKeyGuard> unseen;
  if (!impl->is_python_dispatch()) unseen.emplace(c10::DispatchKey::Python);
  return impl->shallow_copy_and_detach(impl->version_counter(), may_change);
}

}  // namespace

at::Tensor without_history(const at::Tensor& tensor) {
  return at::Tensor(detached(tensor, /*may_change=*/false));
}

at::Tensor over_bytes(const at::Tensor& tensor, at::ScalarType dtype,
                      at::IntArrayRef sizes, at::IntArrayRef strides,
                      std::int64_t offset) {
  auto impl = detached(tensor, /*may_change=*/true);
  impl->set_storage_and_dtype(tensor.storage(),
                              c10::scalarTypeToTypeMeta(dtype));
  impl->set_sizes_and_strides(sizes, strides, offset);
  return at::Tensor(std::move(impl));
}

SeenVersion::SeenVersion(const at::Tensor& tensor)
    : counter_(tensor.unsafeGetTensorImpl()->version_counter()),
      version_(counter_.enabled() ? counter_.current_version() : 0) {}

bool SeenVersion::changed() const { return now() != version_; }

void SeenVersion::throw_modified(const std::string& who,
                                 const std::string& what,
                                 const std::string& as_seen,
                                 const std::string& next_step) const {
  throw Error(
      error_text(who, concat(what, " at version ", seen(), as_seen),
                 concat("version ", now(), ": something wrote to it in place"),
                 next_step));
}

std::uint32_t SeenVersion::now() const {
  return counter_.enabled() ? counter_.current_version() : 0;
}

}  // namespace lowtide::base
