// What the engine asks of a process group, and the one place where bytes on
// the wire are counted.
//
// Every call is asynchronous and is issued from the stream that is current
// (device::StreamScope): it runs after what that stream holds already.  All
// ranks must issue the same calls in the same order; the engine's plans
// guarantee it.  Implementations never hold the Python GIL; callers release it
// around issuing and waiting.  Tensors without elements are left out of a call,
// and a call with none left does nothing and is not counted.
//
// Implementations: C10dCollectives (any c10d process group),
// RecordingCollectives (tests: one process stands for all ranks, and the
// happens-before edges of a real backend are told to the ScriptedRuntime).
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"

namespace lowtide::comm {

enum class Kind : std::uint8_t {
  all_gather,
  reduce_scatter,
  all_reduce,
  broadcast,
  all_to_all,
};
inline constexpr std::size_t kNumKinds = 5;

// Sum in an order that depends on the rank that gets the slice, not on timing;
// `average` is the backend's own, in the reduced dtype: [Note: Averages] in
// c10d_collectives.cpp.
enum class Reduction : std::uint8_t { sum, average };

struct Count {
  std::int64_t calls = 0;
  // Bytes this rank puts on the wire under a bandwidth-optimal algorithm:
  // (W - 1) / W of the full buffer for all-gather, reduce-scatter, all-to-all
  // and broadcast, twice that for all-reduce.
  std::int64_t wire_bytes = 0;
};
using Counters = std::array<Count, kNumKinds>;

std::string_view kind_name(Kind kind);  // "all-gather", ...

// What `rank` got while it waited for others: `cause`, and who failed first.
std::string failure_text(const std::string& cause, std::int64_t rank,
                         std::int64_t size);

// What Pending::wait and a failed issue throw: names the collective, its label
// and the first line of `cause`, and says what to do.
Error collective_failed(Kind kind, const std::string& label,
                        const std::exception& cause, std::int64_t rank,
                        std::int64_t size);

// One collective on its way; holds its tensors until it was waited for.
class Pending {
 public:
  virtual ~Pending() = default;
  // With device streams: the current stream waits, the host does not.  On
  // gloo: the host blocks.  Throws lowtide::Error naming the collective and
  // its label when a peer failed or the group's timeout passed.  Waiting twice
  // is a no-op.
  virtual void wait() = 0;
  // For owners that die instead of waiting: with device streams the current
  // stream waits, the host never does, and what failed is ignored.
  virtual void abandon() {}
};

class Collectives {
 public:
  virtual ~Collectives() = default;

  virtual std::int64_t rank() const = 0;
  virtual std::int64_t size() const = 0;
  virtual std::string backend() const = 0;  // "gloo", "nccl", "fake", ...

  // Every rank's ins[k] lands in rank order in outs[k]: contiguous uint8
  // tensors, outs[k].numel() == size() * ins[k].numel().  One call on the wire
  // for the whole list.  `label` names the unit in errors and traces.
  virtual std::unique_ptr<Pending> all_gather(std::vector<at::Tensor>& outs,
                                              std::vector<at::Tensor>& ins,
                                              const std::string& label) = 0;

  // out = reduction over ranks of that rank's slice of `in`; contiguous, one
  // dtype, in.numel() == size() * out.numel().  The input is not modified.
  virtual std::unique_ptr<Pending> reduce_scatter(at::Tensor& out,
                                                  at::Tensor& in,
                                                  Reduction reduction,
                                                  const std::string& label) = 0;

  // The same for a list in one call; all of one dtype.
  virtual std::unique_ptr<Pending> reduce_scatter_coalesced(
      std::vector<at::Tensor>& outs, std::vector<at::Tensor>& ins,
      Reduction reduction, const std::string& label) = 0;

  // Slice r of `in` goes to rank r, slice r of `out` is from rank r;
  // contiguous, one dtype and size.
  virtual std::unique_ptr<Pending> all_to_all(at::Tensor& out, at::Tensor& in,
                                              const std::string& label) = 0;

  // Every rank's `tensor` becomes the reduction over ranks of it, in place;
  // contiguous.
  virtual std::unique_ptr<Pending> all_reduce(at::Tensor& tensor,
                                              Reduction reduction,
                                              const std::string& label) = 0;

  // Rank 0's `values`, on every rank; the same number of them everywhere.
  // Blocks the host: for agreements outside the steady step.
  virtual std::vector<std::int64_t> from_rank_zero(
      std::vector<std::int64_t> values, const std::string& label) = 0;

  const Counters& counters() const { return counters_; }
  void reset_counters() { counters_ = {}; }

 protected:
  void count(Kind kind, std::int64_t full_bytes);

 private:
  Counters counters_{};
};

}  // namespace lowtide::comm
