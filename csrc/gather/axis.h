// One process group on one device, along which values are gathered: issues its
// collectives and knows the sites whose value backward will need.
//
// Streams: an all-gather goes out on `gather`, a reduce-scatter on `reduce`,
// both behind what compute holds when they are issued; compute waits before it
// uses the result, and before the bytes go back.  All ranks issue the same
// collectives in the same order because they run the same program; `Agreement`
// compares what they are about to do in the first step.
//
// Thread-safe, if no two threads issue collectives of one axis at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "comm/collectives.h"
#include "memory/device_memory.h"

namespace lowtide::gather {

class Site;

// What one name came to since the last reset.
struct Figures {
  std::int64_t gathers = 0;     // in forward
  std::int64_t regathers = 0;   // in backward
  std::int64_t prefetched = 0;  // of these, under an earlier node
  std::int64_t unused = 0;      // of these, for nothing
  std::int64_t shadowed = 0;    // kept, because other hooks were active
};

// A tensor that a collective is still writing.
class Arriving {
 public:
  Arriving(std::shared_ptr<memory::DeviceMemory> memory, at::Tensor tensor,
           std::unique_ptr<comm::Pending> pending);
  // Waits, so that the bytes do not go back while they are written.
  ~Arriving();
  Arriving(Arriving&&) = default;
  Arriving& operator=(Arriving&&) = delete;

  // For compute to use from now on.  Throws lowtide::Error when the collective
  // failed.
  at::Tensor take();

 private:
  std::shared_ptr<memory::DeviceMemory> memory_;
  at::Tensor tensor_;
  std::unique_ptr<comm::Pending> pending_;
};

class Axis {
 public:
  // Raises where the ranks of the group differ in `lines`.  Collective.
  using Compare = std::function<void(const std::vector<std::string>& lines)>;

  // `compare_bits`: sites look whether what they kept still has its bits, which
  // writes that no version counter sees change (LOWTIDE_DEBUG).
  Axis(std::shared_ptr<comm::Collectives> collectives,
       std::shared_ptr<memory::DeviceMemory> memory, Compare compare,
       bool compare_bits = false);

  comm::Collectives& collectives() const { return *collectives_; }
  std::int64_t size() const { return collectives_->size(); }
  bool compares_bits() const { return compare_bits_; }
  // "<value> (rank r of w)"
  std::string on_rank(const std::string& value) const;

  // `shard` of every rank, one after the other along dim 0; all shards have
  // the same sizes.  `ours`: from the ledger's memory, for as long as backward
  // needs it, instead of torch's.
  Arriving all_gather(const at::Tensor& shard, const std::string& name,
                      bool ours);
  // This rank's slice along dim 0 of the sum over ranks.
  Arriving reduce_scatter(const at::Tensor& partial, const std::string& name);

  // Before the gather of a forward.  A line not seen before is compared with
  // the other ranks'.
  void announce(const std::string& line);
  // Before a collective in backward; the first time all lines are compared, in
  // order.
  void agree();

  // --- sites, in the order of their forwards -------------------------------
  std::int64_t enter(const std::weak_ptr<Site>& site);
  void leave(std::int64_t number);
  // Issues the gather of the last site ahead of `number` that this backward
  // will reach, unless it is there already, or too large.
  void prefetch_before(std::int64_t number);

  template <typename Change>
  void count(const std::string& name, Change&& change) {
    const std::lock_guard lock(mutex_);
    change(figures_[name]);
  }
  std::map<std::string, Figures> figures() const;
  void reset_figures();

 private:
  const std::shared_ptr<comm::Collectives> collectives_;
  const std::shared_ptr<memory::DeviceMemory> memory_;
  const Compare compare_;
  const bool compare_bits_;

  mutable std::mutex mutex_;
  std::map<std::int64_t, std::weak_ptr<Site>> sites_;
  std::int64_t num_sites_ = 0;
  std::set<std::string> known_;
  std::vector<std::string> first_step_;
  bool agreed_ = false;
  std::map<std::string, Figures> figures_;
};

}  // namespace lowtide::gather
