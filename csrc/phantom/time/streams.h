// What streams have to do, and when they do it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "phantom/time/costs.h"
#include "phantom/time/machine.h"
#include "phantom/time/multiprocessors.h"
#include "phantom/time/span.h"

namespace lowtide::phantom {

using CommunicatorId = std::int64_t;
using EventNumber = std::int64_t;  // of one record, from 1 on
enum class Direction : std::uint8_t { to_device, to_host };

// One kernel in a queue.
struct Ticket {
  std::size_t stream = 0;
  std::size_t place = 0;
};

struct History {
  std::vector<Span> spans;
  std::vector<PhaseMark> marks;
};

// Work of a stream.
struct KernelLaunch {
  std::string_view name;
  std::int64_t blocks = 0;
  Work work = {};
};
struct TransferCall {
  std::string_view name;
  double bytes = 0;
  Direction direction = Direction::to_device;
};
struct CollectiveLaunch {
  std::string_view name;
  std::size_t communicator = 0;  // by index
  CollectiveCost cost;
};
struct EventRecord {
  EventNumber event = 0;
};
struct EventWait {
  EventNumber event = 0;
};
struct PhaseBegin {
  std::string phase;
};

// A discrete-event simulation of queues.
//
// [Note: Order of what happens]
// Happenings are taken by their times.  Of those at one time the ends of what
// runs come first, in order of issue, then what the host issues, in order of
// issue.  So the result does not depend on how far the simulation had come when
// something was issued: a call made later is issued later, and comes last.
//
// Copyable, to look ahead.
class Streams {
 public:
  using Call = std::variant<KernelLaunch, TransferCall, CollectiveLaunch,
                            EventRecord, EventWait, PhaseBegin>;

  explicit Streams(const Accelerator& accelerator);

  std::size_t index_of(TimedStream stream);
  std::size_t size() const { return streams_.size(); }
  void set_priority(std::size_t stream, int priority);  // of calls from now on
  std::size_t index_of_communicator(CommunicatorId communicator);

  // `issued` is no earlier than that of the calls before and than what was
  // simulated.
  Ticket push(std::size_t stream, Call call, Moment issued);
  EventNumber push_record(std::size_t stream, Moment issued);
  // Null where it has begun.
  KernelLaunch* waiting_kernel(Ticket ticket);

  // No event has a higher number.
  EventNumber last_event() const;
  bool has_happened(EventNumber event) const;
  Moment time_of(EventNumber event) const;  // that has happened

  // Everything that happens until then, inclusive.
  void run_to(Moment limit, History* history);
  // Until it has happened, and not further.
  void run_to_event(EventNumber event, History* history);

 private:
  struct Queued {
    std::int64_t number = 0;  // in the order of issue, over all streams
    Moment issued = 0;
    int priority = 0;  // its stream's, then
    Call call;
  };
  enum class Head : std::uint8_t { untouched, waits, runs };
  struct Stream {
    TimedStream name = 0;
    int priority = 0;
    std::deque<Queued> queue;
    std::size_t num_done = 0;     // popped from the queue
    std::size_t num_arrived = 0;  // of the queue: issued by now
    Head head = Head::untouched;
    Moment reached = 0;  // when the stream came to its head
    Moment begun = 0;    // when that began
  };
  // Streams; the first one runs or may.
  using Line = std::deque<std::size_t>;

  bool step(Moment limit, History* history);
  void proceed(std::size_t stream, History* history);
  // Whether the head is over at once.
  bool begin(std::size_t index, KernelLaunch& call, History* history);
  bool begin(std::size_t index, TransferCall& call, History* history);
  bool begin(std::size_t index, CollectiveLaunch& call, History* history);
  bool begin(std::size_t index, EventRecord& call, History* history);
  bool begin(std::size_t index, EventWait& call, History* history);
  bool begin(std::size_t index, PhaseBegin& call, History* history);
  void end(std::size_t index, History* history);
  static void pop(Stream& stream);
  // A transfer or a collective whose turn it is.
  void ask_to_run(std::size_t index, History* history);
  bool stands_in(std::size_t index, const Line& line) const;
  void next_in_line(Line& line, History* history);
  void note_begun(History* history);
  void note_wait(const Stream& stream, History* history);
  Owner owner_of(std::size_t index) const;

  Accelerator accelerator_;
  Multiprocessors device_;
  Moment clock_ = 0;
  std::int64_t num_calls_ = 0;
  std::vector<Stream> streams_;
  std::unordered_map<TimedStream, std::size_t> by_name_;
  std::unordered_map<CommunicatorId, std::size_t> communicators_;
  std::vector<Line> turns_;        // of collectives issued, by communicator
  std::array<Line, 2> engines_{};  // of transfers that may begin, by Direction
  // Streams whose next call arrives, in the order of issue.
  std::deque<std::pair<Moment, std::size_t>> arrivals_;
  std::vector<Moment> happened_;  // by event number - 1; negative: not yet
  std::unordered_map<EventNumber, std::vector<std::size_t>> waiters_;
  std::vector<std::size_t> awake_;  // may proceed
};

}  // namespace lowtide::phantom
