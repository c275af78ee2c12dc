// How what runs at once shares a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "phantom/time/costs.h"
#include "phantom/time/machine.h"
#include "phantom/time/span.h"

namespace lowtide::phantom {

// Whose work it is: numbers are given in the order of issue, and of what
// happens at the same time the lower number is first.
struct Owner {
  std::int64_t number = 0;
  std::size_t stream = 0;
  int priority = 0;  // lower: more urgent
};

// [Note: Sharing a device]
// Work is fluid: between two happenings every kernel progresses at one rate,
// and the rate is 1 when it is alone.
//
// Multiprocessors.  A grid of b blocks wants the share
//   s = min(1, b / (multiprocessors x resident blocks))
// of the device, an unknown grid all of it; the time that a kernel takes alone
// is that of its work, however few its blocks.  Collectives hold a
// multiprocessor for each channel: NCCL launches a block for each
// (ncclLaunchKernel in src/enqueue.cc), whose threads, up to 640
// (NCCL_MAX_NTHREADS), are compiled to have up to 96 registers
// (makefiles/common.mk), which is most of a multiprocessor's 65536.  With the
// fraction f of the device free of them, every kernel gets
//   phi = min(1, f / sum of s)
// of what it wants, and its FLOPs take 1 / phi as long.  Moving bytes needs few
// multiprocessors, and the floor is a latency: both stay as they are.
//
// Memory.  A kernel that would end after d' seconds and moves bytes for m
// seconds asks for the fraction m / d' of the bandwidth.  What collectives and
// copies move is taken first; if the kernels ask for more than the rest, all of
// those that move bytes are slower by the same factor.
//
// Links.  Collectives that run at the same time over the same links share
// them: if the fractions of the time for which they fill the link alone add up
// to more than 1, all are slower by that sum.
//
// [Note: A collective waits for multiprocessors]
// Blocks are not taken off a multiprocessor, so a collective finds a device
// full of a kernel's blocks and gets multiprocessors when blocks end.  On a
// more urgent stream it is first in line when the kernel's present wave of
// blocks is over; otherwise the kernel's remaining blocks go first, until its
// last wave has begun.  A wave is 1 / ceil(b / (multiprocessors x resident
// blocks)) of the kernel; of unknown grids one takes `block_seconds`.  Assumed:
// the last wave leaves room, and no kernel keeps its blocks from beginning to
// end (persistent ones do, and a collective would wait for their end).  Kernels
// that begin while it waits come behind it.
class Multiprocessors {
 public:
  explicit Multiprocessors(const Accelerator& accelerator);

  void begin(const Owner& owner, const Work& work, std::int64_t blocks,
             Moment now);
  // A collective; or a copy, which holds no multiprocessors.  It begins now or
  // waits: begun() says which.
  void ask(const Owner& owner, const CollectiveCost& cost, Moment now);

  // When something happens next: the end of some work, or the moment at which a
  // collective gets multiprocessors.  Infinity: nothing runs.
  Moment next() const { return next_.time; }
  // It happens, at next().  Returns whether work has ended, and whose.
  bool happen(Owner& ended);
  // What began to run since this was asked last, in order.
  std::vector<Owner> begun();

 private:
  static constexpr Moment kNever = std::numeric_limits<Moment>::infinity();

  struct Progress {
    Owner owner;
    double alone = 0;     // seconds that it takes alone
    double slowness = 1;  // how many times as long it takes at present
    Moment end = 0;       // at this rate
    double left = 0;      // seconds alone, at the time of the last change
    // Seconds alone that are left at `now`.
    double left_at(Moment now) const;
    void change_rate(double slowness_from_now, Moment now);
  };
  struct Kernel : Progress {
    KernelCost cost;
    double share = 1;
    double waves = 1;
  };
  struct Holder : Progress {
    CollectiveCost cost;
  };
  // A kernel that a collective waits for, until `left` of it is left.
  struct Obstacle {
    std::int64_t number = 0;
    double left = 0;
    double multiprocessors = 0;
  };
  struct Waiting {
    Owner owner;
    CollectiveCost cost;
    std::vector<Obstacle> obstacles;
  };
  enum class What : std::uint8_t { kernel_ends, holder_ends, obstacle_leaves };
  struct Next {
    Moment time = kNever;
    std::int64_t number = std::numeric_limits<std::int64_t>::max();
    What what = What::kernel_ends;
    std::size_t index = 0;
    std::size_t obstacle = 0;
  };

  double held() const;
  double left_when_it_yields(const Kernel& kernel, const Owner& to,
                             Moment now) const;
  bool fits(const Waiting& waiting) const;
  void let_begin(Moment now);
  void share_out(Moment now);
  void share_links(Moment now);
  void find_next(Moment now);

  Accelerator accelerator_;
  std::vector<Kernel> kernels_;
  std::vector<Holder> holders_;
  std::vector<Waiting> waiting_;
  std::vector<Owner> begun_;
  double granted_ = 1;  // phi of [Note: Sharing a device]
  Next next_;
};

}  // namespace lowtide::phantom
