// What is known of DataPtrs by their deleter, which says what their context is.
#pragma once

#include <c10/core/Allocator.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace lowtide::base {

// Filled while libraries are loaded, read from then on.
template <class Known>
class ByDeleter {
 public:
  void add(c10::DeleterFnPtr deleter, Known known) {
    kinds_.emplace_back(deleter, known);
  }
  // Null for a DataPtr of another kind.
  const Known* find(const c10::DataPtr& bytes) const {
    const auto kind =
        std::ranges::find(kinds_, bytes.get_deleter(),
                          &std::pair<c10::DeleterFnPtr, Known>::first);
    return kind == kinds_.end() ? nullptr : &kind->second;
  }

 private:
  std::vector<std::pair<c10::DeleterFnPtr, Known>> kinds_;
};

}  // namespace lowtide::base
