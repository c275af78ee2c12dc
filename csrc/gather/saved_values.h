// What autograd saves while gathers are rematerialised: a tensor over gathered
// bytes becomes a claim on its site, every other one is kept as it is.
//
// Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <vector>

#include "base/seen_version.h"
#include "base/storage_map.h"
#include "gather/site.h"

namespace lowtide::gather {

// A saved tensor, held by the node that saved it.
class SavedValue {
 public:
  // Kept, without history.
  explicit SavedValue(const at::Tensor& tensor);
  // On the gathered bytes of `site`.
  SavedValue(std::shared_ptr<Site> site, const at::Tensor& tensor);
  ~SavedValue();
  SavedValue(const SavedValue&) = delete;
  SavedValue& operator=(const SavedValue&) = delete;

  // Throws lowtide::Error when the bytes were written to since; see Site::take.
  at::Tensor unpack() const;

 private:
  at::Tensor kept_;
  const base::SeenVersion version_;
  std::shared_ptr<Site> site_;
  std::size_t consumer_ = 0;
  at::ScalarType dtype_;
  std::vector<std::int64_t> sizes_, strides_;
  std::int64_t offset_ = 0;
};

// The gathers of one forward, by their bytes.
class SavedValues {
 public:
  void add(const at::Tensor& gathered, std::shared_ptr<Site> site);
  // Throws lowtide::Error for a gathered tensor that was written to.
  std::unique_ptr<SavedValue> pack(const at::Tensor& tensor);

 private:
  std::shared_ptr<Site> site_of(const at::Tensor& tensor) const;

  mutable std::mutex mutex_;
  base::StorageMap<std::shared_ptr<Site>> sites_;
};

}  // namespace lowtide::gather
