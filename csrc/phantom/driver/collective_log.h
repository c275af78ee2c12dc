// What a process asked of NCCL, in order.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace lowtide::dry {

// One call.  New communicators are calls, too: "init", "split".
struct Call {
  const char* kind = "";
  // What a rank gives: of an all_gather or a gather its shard, of a
  // reduce_scatter or an all_to_all its whole input, else all of it.
  std::size_t bytes = 0;
  const char* type = "-";
  const char* reduction = "-";
  int peer = -1;  // the root, or who is at the other end; by rank in the group
  std::int64_t communicator = 0;  // its number; 0: of none
  std::int64_t stream = 0;        // its number; 0: a default one
  int priority = 0;               // of the stream
  int most_ctas = 0;              // of a new communicator
  int depth = 0;                  // of groups (ncclGroupStart) around it
  std::int64_t group = 0;         // the outermost one's number; 0: none
};

// Thread-safe.
class CollectiveLog {
 public:
  // Who hears of a call, by its number from 0 on, on the thread that makes it
  // and while no lock is held.
  using Heard = void (*)(std::int64_t number);
  std::atomic<Heard> heard = nullptr;

  // Of the calling thread: NCCL's groups are.
  void enter_group();
  void leave_group();
  static int depth();

  // Depth and group are filled in.
  void add(Call call);

  std::int64_t size() const;
  // A line a call, its fields in their order with tabs between them.  Valid
  // until the next call.
  const char* lines();

 private:
  mutable std::mutex mutex_;
  std::atomic<std::int64_t> last_group_ = 0;
  std::vector<Call> calls_;
  std::string lines_;
};

CollectiveLog& collective_log();

}  // namespace lowtide::dry
