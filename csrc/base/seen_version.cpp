#include "base/seen_version.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>

namespace lowtide::base {

at::Tensor without_history(const at::Tensor& tensor) {
  const auto* const impl = tensor.unsafeGetTensorImpl();
  // A dispatch mode need not see this; a tensor subclass must.
  std::optional<c10::impl::ExcludeDispatchKeyGuard> unseen;
  if (!impl->is_python_dispatch()) unseen.emplace(c10::DispatchKey::Python);
  return at::Tensor(impl->shallow_copy_and_detach(
      impl->version_counter(), /*allow_tensor_metadata_change=*/false));
}

SeenVersion::SeenVersion(const at::Tensor& tensor)
    : counter_(tensor.unsafeGetTensorImpl()->version_counter()),
      version_(counter_.enabled() ? counter_.current_version() : 0) {}

bool SeenVersion::changed() const { return now() != version_; }

std::uint32_t SeenVersion::now() const {
  return counter_.enabled() ? counter_.current_version() : 0;
}

}  // namespace lowtide::base
