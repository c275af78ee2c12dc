// A process group, for as long as torch has it.
//
// [Note: Whose a group is]
// torch's: destroy_process_group ends it, which waits for its threads.  Kept
// alive by a model it would end with the interpreter, and the process with it
// where a thread of gloo's still holds an object of Python's (std::terminate).
// A weak reference of c10's would not do: an object lives until those are gone,
// too.  Where torch destroys all groups it drops Python's objects of them
// before it takes the groups from its list, so that one may still seem to be
// torch's when its object ends: what has ended is looked for again where a
// group is borrowed, and before the interpreter ends.
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
  BorrowedGroup(const BorrowedGroup&) = delete;
  BorrowedGroup& operator=(const BorrowedGroup&) = delete;

  // All that torch has ended, of this process.  On any thread, without the GIL.
  static void give_back_ended();

  std::int64_t rank() const { return rank_; }
  std::int64_t size() const { return size_; }
  // Throws lowtide::Error once it was given back.
  c10::intrusive_ptr<c10d::ProcessGroup> get() const;
  bool is(const c10::intrusive_ptr<c10d::ProcessGroup>& group) const;

 private:
  // The group, where torch has ended it.
  c10::intrusive_ptr<c10d::ProcessGroup> take_if_ended();

  mutable std::mutex mutex_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::string name_;
  std::int64_t rank_;
  std::int64_t size_;
};

}  // namespace lowtide::comm
