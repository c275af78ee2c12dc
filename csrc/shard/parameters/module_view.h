// The unit's face on its modules: which parameters `module._parameters` shows,
// and how local gradients become `.grad`.  Implementations take the GIL.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace lowtide::shard {

class ModuleView {
 public:
  virtual ~ModuleView() = default;
  virtual void show_full() = 0;
  virtual void show_shards() = 0;
  // From now on parameter i's full one, which is not shown now.
  virtual void replace_full(std::int32_t /*parameter*/,
                            const at::Tensor& /*full*/) {}
  // DTensors over `locals`, the local gradients of `parameters`.
  virtual std::vector<at::Tensor> wrap_gradients(
      const std::vector<std::int32_t>& parameters,
      const std::vector<at::Tensor>& locals) = 0;
  // Whether a layer has added parameter i's gradient to main_gradient since the
  // last call; `gradient`, what it gave autograd, then stands for none unless
  // `zero_out` asked for zeros in its place.
  struct MainGradientUse {
    bool added = false;
    bool zero_out = false;
  };
  virtual MainGradientUse took_main_gradient(std::int32_t /*parameter*/) {
    return {};
  }
  // Whether the code that reads a `.grad` on this thread is about to clear it;
  // null: nobody knows.  See graph/observed_gradient.h.
  using Clears = bool (*)();
  virtual Clears clears_gradients() const { return nullptr; }
  // Throws if the code that found no `.grad` on this thread clips or unscales
  // gradients, which an optimizer in backward has taken; null: nobody knows.
  using Misses = void (*)();
  virtual Misses misses_gradients() const { return nullptr; }
  // This rank's part of a gradient that is a DTensor, the sum of one that is
  // `summed_before`, and any other subclass as a plain tensor.
  virtual at::Tensor local_gradient(std::int32_t parameter,
                                    const at::Tensor& gradient) = 0;
};

}  // namespace lowtide::shard
