// A process group, for as long as torch has it.
//
// [Note: Whose a group is]
// torch's: destroy_process_group ends it, which waits for its threads.  Kept
// alive by a model it would end with the interpreter, and the process with it
// where a thread of gloo's still holds an object of Python's (std::terminate).
// A weak reference of c10's would not do: an object lives until those are gone,
// too.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <mutex>
#include <string>

namespace c10d {
class ProcessGroup;
}

namespace lowtide::comm {

class BorrowedGroup {
 public:
  // `name`: under which torch has it.
  BorrowedGroup(c10::intrusive_ptr<c10d::ProcessGroup> group, std::string name);
  ~BorrowedGroup();

  std::int64_t rank() const { return rank_; }
  std::int64_t size() const { return size_; }
  // Throws lowtide::Error once it was given back.
  c10::intrusive_ptr<c10d::ProcessGroup> get() const;
  bool is(const c10::intrusive_ptr<c10d::ProcessGroup>& group) const;
  // Where torch has ended it.  On any thread, without the GIL.
  void give_back();

 private:
  mutable std::mutex mutex_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::string name_;
  std::int64_t rank_;
  std::int64_t size_;
};

}  // namespace lowtide::comm
