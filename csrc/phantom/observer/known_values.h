// What operators make of values that are known: those of the host, and that
// numbers are finite.
//
// A small operator whose arguments are all known is computed on the host, and
// its results are known; so are those of one that needs none, such as arange.
// So what a program derives from lengths, labels, counters and flags that the
// host made is right.  Of isfinite, isnan and isinf the answer is that all
// numbers are finite, for tensors of any size, and what torch itself requires
// of values holds.  What is true "or" anything is true, what is false "and"
// anything false.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "phantom/observer/storage_facts.h"

namespace lowtide::dry {

// Storages of truth values that are all the same, of any size: the driver keeps
// bytes of small ones only.
StorageFacts<bool>& uniform_truths();

// Whether `tensor` is small and the host made it, or truth values that are all
// the same.
bool is_known(const at::Tensor& tensor);

// The arguments of an operator as they were before it ran.
class KnownCall {
 public:
  // Nothing where the results will not be known.
  static std::unique_ptr<KnownCall> before(const at::RecordFunction& function);
  // False where they are not, after all.
  bool after(const at::RecordFunction& function) const;

 private:
  std::vector<at::IValue> arguments_;  // on the host; empty where it has said_
  std::vector<std::pair<std::size_t, at::IValue>> written_;  // by number
  std::optional<bool> said_;  // what the operator says of all numbers
};

}  // namespace lowtide::dry
