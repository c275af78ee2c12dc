// Which calls of one forward made which bytes, and from what.
//
// A second forward is recognised call by call: one is the same as a call of the
// first if its operator is, and its arguments came about in the same way.  A
// parameter is itself.  What else no call of this forward made (the region's
// arguments, buffers, casts in autocast's cache) is told apart by its geometry
// only, because it may be another tensor in the second forward.
//
// One forward's, one thread's; holds no tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_set>
#include <vector>

#include "base/storage_map.h"

namespace lowtide::activation {

// Hash of a sequence that went on with `value`.
std::uint64_t combine(std::uint64_t hash, std::uint64_t value);

class Lineage {
 public:
  // Of a forward of these arguments: never parameters, as the same ones are
  // none when the forward is computed again.
  explicit Lineage(const std::vector<at::Tensor>& arguments = {});

  // The same number for values that came about in the same way.  A leaf that
  // requires grad is given, whoever wrote its bytes.
  std::uint64_t of(const at::Tensor& tensor);
  // A parameter: nobody's result from here on.
  void given(const at::Tensor& parameter);

  // `output` is what the call `number` returned at `place`; `call` is the hash
  // of its operator and arguments.  Does nothing for bytes that a call made
  // before: the output is an alias.
  void made(const at::Tensor& output, std::uint64_t call, std::int64_t number,
            std::int64_t place);
  // A call wrote to the bytes of `tensor`, whether its version says so or not.
  void wrote(const at::Tensor& tensor, std::uint64_t call);

  struct Producer {
    std::int64_t number = -1;  // none
    std::int64_t place = 0;
    bool written_since = false;
  };
  Producer producer_of(const at::Tensor& tensor);

 private:
  struct Entry {
    std::uint64_t origin;
    std::int64_t version;  // that `origin` is of
    Producer producer;
    std::int64_t made_at;  // version
  };
  Entry* find(const at::Tensor& tensor);
  std::uint64_t origin_of(const at::Tensor& tensor);
  void forget(const at::Tensor& tensor);

  base::StorageMap<Entry> entries_;
  // They outlive the forward.
  std::unordered_set<const c10::TensorImpl*> arguments_;
  std::unordered_set<const c10::TensorImpl*> parameters_;
};

}  // namespace lowtide::activation
