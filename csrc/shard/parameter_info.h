// What is known of a unit's parameters before anything is allocated.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace lowtide::shard {

struct ParameterInfo {
  std::string name;                 // for errors: fully qualified
  std::vector<std::int64_t> sizes;  // global
  at::ScalarType storage_dtype;     // of the shards
  at::ScalarType compute_dtype;     // of the full parameter
  at::ScalarType reduce_dtype;      // of its gradient on the wire
  // Which dimension is split over the ranks.  Another than the first one must
  // be a multiple of their number, see [Note: Other dimensions].
  std::int64_t shard_dim = 0;
  // An AllGatherExtension has its values and says what is gathered; here it has
  // rows, but no bytes.
  bool extended = false;
  // Its gradient may come in the dtype it was computed in, see [Note: The dtype
  // of a gradient]; else in that of the full parameter.
  bool gradient_as_computed = false;
  // Set where the program chose it by `grad_dtype`: the dtype of `.grad`, which
  // is else the shards', and in which autograd sums what arrives, else as it is
  // reduced.  Units reduce the narrower with the wider ones.
  std::optional<at::ScalarType> gradient_dtype = std::nullopt;
  std::optional<at::ScalarType> arriving_dtype = std::nullopt;
  // Its gradient is a part of a sum over ranks that are none of the unit's
  // group, which ModuleView::local_gradient makes.
  bool summed_before = false;

  // Of one rank; `rows`: its rows if dim 0 is split.
  std::vector<std::int64_t> local_sizes(std::int64_t world_size,
                                        std::int64_t rows) const;
  // [outer, N, width]: what comes before the split dimension, the ranks, and
  // one rank's part of what comes from it on.
  std::array<std::int64_t, 3> split(std::int64_t world_size) const;
  at::ScalarType dtype_of_grad() const {
    return gradient_dtype.value_or(storage_dtype);
  }
  at::ScalarType dtype_on_arrival() const {
    return arriving_dtype.value_or(reduce_dtype);
  }
  bool casts() const { return !extended && storage_dtype != compute_dtype; }
};

// One list for all parts of a unit: copies share it, so a name, which is known
// only when the root is, stands once.
class ParameterInfos {
 public:
  ParameterInfos(std::vector<ParameterInfo> infos)  // NOLINT: a list is one
      : infos_(std::make_shared<std::vector<ParameterInfo>>(std::move(infos))) {
  }

  const ParameterInfo& operator[](std::size_t i) const { return (*infos_)[i]; }
  const ParameterInfo& of(std::int32_t i) const {
    return (*infos_)[static_cast<std::size_t>(i)];
  }
  std::size_t size() const { return infos_->size(); }
  auto begin() const { return infos_->cbegin(); }
  auto end() const { return infos_->cend(); }

  void rename(const std::vector<std::string>& names) {
    for (std::size_t i = 0; i < names.size(); ++i) {
      (*infos_)[i].name = names[i];
    }
  }

 private:
  std::shared_ptr<std::vector<ParameterInfo>> infos_;
};

}  // namespace lowtide::shard
