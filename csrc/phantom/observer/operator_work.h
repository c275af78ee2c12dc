// What an operator does on a device: the numbers that its time is computed
// from.
#pragma once

#include <ATen/record_function.h>

#include "phantom/time/costs.h"

namespace lowtide::dry {

// Bytes: every argument of a device is read once, every result written once;
// what is changed in place both; indexing reads and writes no more elements
// than it returns or is given.  FLOPs: of products, convolutions and attention;
// 0 for the rest.  Sources of the formulas are beside them.
//
// Made when an operator begins, because its arguments are there no longer when
// it ends.
class OperatorWork {
 public:
  // An operator, or only a range that others are in, such as autograd's?
  static bool is_known_of(const at::RecordFunction& function);

  explicit OperatorWork(const at::RecordFunction& function);

  // When it has ended.
  phantom::Work with_results(const at::RecordFunction& function) const;

 private:
  phantom::Work work_;            // of the arguments
  double chosen_from_ = 0;        // bytes: of them as many as are returned
  double flops_of_position_ = 0;  // of a convolution's result
};

}  // namespace lowtide::dry
