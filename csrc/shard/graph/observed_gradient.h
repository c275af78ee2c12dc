// Sees that `.grad` of a leaf was cleared where there was nothing to clear.
//
// [Note: Cleared gradients]
// While gradients wait for a reduction `.grad` is None, and zero_grad, a
// module's or an optimizer's, leaves alone what is None.  Yet it means to drop
// what has been accumulated.  A leaf keeps `.grad` in its autograd metadata,
// which is replaced by one that observes: a write, as of `p.grad = None`, and a
// read by a function that `clears` knows.  Both are looked at when the next
// backward begins, parameter by parameter, and change no collective: ranks need
// not agree on them.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace lowtide::shard {

class ObservedGradient {
 public:
  // Whether the code that reads a `.grad` on this thread is about to clear it;
  // may be null.
  using Clears = bool (*)();
  // Called on a read of a `.grad` that is None because somebody took it: throws
  // if the reader needs it; may be null.
  using Misses = void (*)();

  // Several leaves may stand for one parameter.  Not views.
  ObservedGradient(const std::vector<at::Tensor>& leaves, Clears clears,
                   Misses misses = nullptr);

  // Looks from now on, and forgets what has been seen; or does not look.
  void observe(bool observe);
  // Whether one of the leaves was cleared since, outside of any backward.
  bool cleared() const;
  // From now on a gradient that is not there has been taken, or is not there.
  void set_taken(bool taken) const;

 private:
  struct Seen;
  struct Meta;

  std::shared_ptr<Seen> seen_;
  std::vector<at::Tensor> leaves_;
};

}  // namespace lowtide::shard
