// Which calls of one forward made which bytes, and from what.
//
// A second forward is recognised call by call: one is the same as a call of the
// first if its operator is, and its arguments came about in the same way.  What
// no call of this forward made (arguments, parameters, buffers) is told apart
// by its geometry only: parameters are gathered, and cast by autocast, in the
// first forward but not in the second.
//
// One forward's, one thread's; holds no tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_map>

namespace lowtide::activation {

class Lineage {
 public:
  // The same number for values that came about in the same way.  A leaf that
  // requires grad is given, whoever wrote its bytes.
  std::uint64_t of(const at::Tensor& tensor);
  // A parameter: nobody's result from here on.
  void given(const at::Tensor& tensor);

  // `output` is what the call `number` returned at `place`; `call` is the hash
  // of its operator and arguments.  Does nothing for bytes that a call made
  // before: the output is an alias.
  void made(const at::Tensor& output, std::uint64_t call, std::int64_t number,
            std::int64_t place);
  // A call wrote to the bytes of `tensor`.
  void wrote(const at::Tensor& tensor, std::uint64_t call);

  struct Producer {
    std::int64_t number = -1;  // none
    std::int64_t place = 0;
    bool written_since = false;
  };
  Producer producer_of(const at::Tensor& tensor);

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10::StorageImpl> identity;
    std::uint64_t origin;
    std::int64_t version;  // that `origin` is of
    Producer producer;     // without `written_since`
    std::int64_t made_at;  // version
  };
  Entry* find(const at::Tensor& tensor);

  std::unordered_map<const c10::StorageImpl*, Entry> entries_;
};

}  // namespace lowtide::activation
