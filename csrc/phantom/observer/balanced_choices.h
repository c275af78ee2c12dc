// What a router chooses: integers that nobody computed, each of so many values
// equally often.
//
// So of a mixture's tokens every expert gets the same share: masks that ask for
// one expert have as many elements as that, a map of who chose whom is marked
// where it is scattered to, and counts by expert are equal.
// Sizes that follow from masks are those, not all elements.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "phantom/observer/storage_facts.h"

namespace lowtide::dry {

// How many values each element was chosen of.
StorageFacts<std::int64_t>& choices();
// Of the elements of a mask those that are not zero, 0 to 1.
StorageFacts<double>& shares();

// One call of an operator that chooses, compares choices or counts them.
class BalancedCall {
 public:
  // None for all others.
  static std::optional<BalancedCall> before(const at::RecordFunction& function);
  // When it has computed what nobody knows.
  void after(const at::RecordFunction& function) const;

 private:
  std::size_t place_ = 0;  // of the result that the rest is about
  std::optional<std::int64_t> choices_;
  std::optional<double> share_;
  // Elements of which one in `share_` makes a result true.
  std::optional<std::int64_t> joined_;
  std::optional<std::int64_t> counted_;  // what the results add up to
};

}  // namespace lowtide::dry
