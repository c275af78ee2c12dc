// The names given to values by `tag`, and what became of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/storage_map.h"

namespace lowtide::activation {

// Which storages carry which names at which version.  A name on a view, or on
// one block's output, is found on every tensor over the same bytes.
// Thread-safe; holds no tensor.
class NameBook {
 public:
  void add(const at::Tensor& tensor, const std::string& name);
  // Empty once somebody wrote to the bytes.
  std::vector<std::string> of(const at::Tensor& tensor) const;
  // Every name ever added.
  std::set<std::string> all() const;

 private:
  struct Names {
    std::int64_t version;
    std::vector<std::string> names;
  };

  mutable std::mutex mutex_;
  base::StorageMap<Names> names_;
  std::set<std::string> all_;
};

// One name of one region's policy; values and storage bytes since the last
// reset.
struct NameFigures {
  std::int64_t matched = 0;  // values seen under the name
  std::int64_t kept = 0;     // held on the device on request
  std::int64_t kept_bytes = 0;
  std::int64_t moved = 0;  // sent to the host, or to be sent
  std::int64_t moved_bytes = 0;
  std::int64_t shared = 0;      // bytes already under another name or region
  std::int64_t recomputed = 0;  // not stored, as listed
  std::map<std::string, std::int64_t> skipped;  // reason -> values
};

// Thread-safe.
class RegionFigures {
 public:
  template <typename Change>
  void change(const std::string& name, Change&& change) {
    const std::lock_guard lock(mutex_);
    change(names_[name]);
  }
  std::map<std::string, NameFigures> names() const;
  void reset();

 private:
  mutable std::mutex mutex_;
  std::map<std::string, NameFigures> names_;
};

}  // namespace lowtide::activation
