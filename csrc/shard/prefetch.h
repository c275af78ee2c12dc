// Which units are gathered ahead while one unit runs, and when: those that the
// user listed, or what the recorded order has next.
//
// Forward: before the unit's own kernels, whose stream the next gather waits
// for, or behind the last block of rows where the unit reads rows.  Backward:
// as late as the rest of the unit's backward covers the gather (policy.h).
//
// Threads: one at a time.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace lowtide::shard {

// A unit as whoever gathers it ahead sees it.
class UnitAhead {
 public:
  virtual ~UnitAhead() = default;
  virtual std::int32_t number() const = 0;
  // Nothing if it is gathered, or never is as a whole.
  virtual void gather_ahead() = 0;
  virtual bool is_gathered_in_backward() const = 0;
  // Of another unit's gradients, as many as take as long as its gather (see
  // elements_that_cover in policy.h).
  virtual std::int64_t elements_to_cover(std::int64_t tokens) const = 0;
};

class Prefetch {
 public:
  using Listed = std::vector<std::weak_ptr<UnitAhead>>;
  // One unit, and those that run inside it at its beginning.
  using Next = std::vector<UnitAhead*>;

  // --- forward --------------------------------------------------------------
  // Gathers the units that are `listed`, or where none is `next`.
  static void gather(const Listed& listed, const Next& next);
  // The unit reads its rows: `gather_put_off` follows behind the last block.
  void put_off(Next next) { in_forward_ = std::move(next); }
  void gather_put_off(const Listed& listed) const;
  void forget_forward() { in_forward_.clear(); }

  // --- backward -------------------------------------------------------------
  void expect(Next next) { in_backward_ = std::move(next); }
  // Gathers what is listed, or what was expected if `elements` of the unit's
  // gradients, in the order they are expected, cover nothing of it; else
  // returns that it waits for `gradients_before` of them.  `tokens`: of the
  // unit; 0: its gradients hide nothing.
  bool waits(const Listed& listed, c10::ArrayRef<std::int64_t> elements,
             std::int64_t tokens);
  std::size_t gradients_before() const { return gradients_before_; }
  // One has come; returns whether the gather that waits may leave.
  bool on_gradient();
  void gather_expected();
  void forget_backward() { in_backward_.clear(); }

 private:
  Next in_forward_;
  Next in_backward_;
  std::size_t gradients_before_ = 0;
  std::size_t gradients_come_ = 0;
};

}  // namespace lowtide::shard
