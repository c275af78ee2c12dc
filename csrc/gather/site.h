// One gather of one forward whose result is not kept: the shard is, and
// backward gathers it again.
//
// [Note: One re-gather per backward] The value belongs to the graph task that
// asked for it.  The first consumer's `take` issues the gather, or finds it
// issued by a prefetch; the others share the tensor; after the last living one
// the site lets go.  What a partial or failed backward leaves goes when its
// graph task does.  Outside of a backward nothing is ever issued.
//
// Thread-safe; one graph task takes from one thread at a time, as autograd does
// for nodes of one device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/seen_version.h"
#include "base/torch_version.h"
#include "gather/axis.h"

namespace lowtide::gather {

// Gathers ahead of their use may hold this much.
inline constexpr std::int64_t kPrefetchBytes = std::int64_t{256} << 20;

class Site : public std::enable_shared_from_this<Site> {
  struct Private {
    explicit Private() = default;
  };

 public:
  // `shard` is what was gathered, on this rank.
  static std::shared_ptr<Site> make(std::shared_ptr<Axis> axis,
                                    std::string name, const at::Tensor& shard,
                                    std::int64_t prefetch_bytes);
  Site(Private, std::shared_ptr<Axis> axis, std::string name,
       const at::Tensor& shard, std::int64_t prefetch_bytes);
  ~Site();

  const std::string& name() const { return name_; }
  std::int64_t gathered_bytes() const;
  // The bytes in memory that hold what was gathered in forward; a later write
  // to them is an error in `take`.
  void watch(const at::Tensor& gathered) { gathered_.emplace(gathered); }
  // Throws lowtide::Error if the shard or the gathered bytes were written to.
  void require_unmodified() const;
  // The node in whose backward, or before it, the value is needed.
  void set_node(base::WeakNodePtr node);

  // --- consumers -----------------------------------------------------------
  std::size_t add_consumer();
  void drop_consumer(std::size_t consumer);  // its node is gone

  // --- backward ------------------------------------------------------------
  // Issues the gather, if it was not issued in this graph task.
  void start();
  // The gathered value for `consumer`, for compute to read.  Throws
  // lowtide::Error outside of backward, when shard or gathered value were
  // written to, and when the collective failed.
  at::Tensor take(std::size_t consumer);
  // Has the earlier site's gather under way from here on.
  void prefetch_earlier();

  enum class Ahead : std::uint8_t { not_needed, done, too_large };
  // Issues the gather ahead of its use, if this backward will need it.
  Ahead prefetch();

 private:
  struct Value {
    std::optional<Arriving> arriving;
    at::Tensor tensor;
    std::vector<bool> taken;
    bool prefetched = false;
    bool used = false;
    bool released = false;
  };
  bool needed_in_this_backward() const;
  std::shared_ptr<Value> issue(bool ahead);
  bool all_taken(const Value& value) const;
  void release(Value& value, std::vector<at::Tensor>& released);
  void forget_at_end_of(std::int64_t graph_task);
  void require_same_bits() const;
  [[noreturn]] void modified(const char* what, const base::SeenVersion& seen,
                             const char* next_step) const;

  const std::shared_ptr<Axis> axis_;
  const std::string name_;
  const at::Tensor shard_;
  const base::SeenVersion shard_version_;
  const std::optional<std::int64_t> shard_digest_;  // where bits are compared
  const std::int64_t prefetch_bytes_;
  std::optional<base::SeenVersion> gathered_;
  base::WeakNodePtr node_;
  std::int64_t number_ = 0;

  mutable std::mutex mutex_;
  std::vector<bool> alive_;                                // consumers
  std::map<std::int64_t, std::shared_ptr<Value>> values_;  // by graph task
};

}  // namespace lowtide::gather
