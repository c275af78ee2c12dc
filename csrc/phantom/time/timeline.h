// When everything on a simulated device begins and ends.
//
// A state machine: the host issues one thing after another and each takes its
// place at the end of a stream.  Streams run beside each other at full speed;
// a stream begins its next work when the work before has ended, what it was
// told to wait for has happened, and the host has issued it.
//
// Times are seconds since the timeline began.  Not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "phantom/time/costs.h"
#include "phantom/time/span.h"

namespace lowtide::phantom {

class Timeline {
 public:
  explicit Timeline(Machine machine);

  const Machine& machine() const { return machine_; }

  // The host spends what one operator costs it.
  void issue() { host_ += machine_.issue_cost; }
  // At the end of what the stream has; issue() comes first.
  void run(TimedStream stream, std::string_view name, const Work& work);

  // The same for a copy between host and device.
  void transfer(TimedStream stream, std::string_view name, double bytes);

  // [Note: Collectives and streams]
  // As in ProcessGroupNCCL: an asynchronous collective runs on a stream of its
  // group, which first waits for `caller`; a synchronous one on `caller`
  // itself.  Those of one group run one after another in the order of issue,
  // whatever their streams, as kernels of one NCCL communicator do.  Returns
  // when it is over; who needs the result waits for that.
  Moment collective(std::int64_t group, const Placement& placement,
                    TimedStream caller, bool async, CollectiveKind kind,
                    double bytes);

  Moment record(TimedStream stream) const;
  void wait(TimedStream stream, Moment moment);

  void synchronize(Moment moment);  // the host waits
  void synchronize(TimedStream stream) { synchronize(record(stream)); }
  void synchronize_all();

  // A phase begins on `stream`.
  void mark(std::string phase, TimedStream stream);

  double host() const { return host_; }
  const std::vector<Span>& spans() const { return spans_; }
  const std::vector<PhaseMark>& marks() const { return marks_; }

 private:
  Span& append(SpanKind kind, TimedStream stream, double seconds);

  const Machine machine_;
  double host_ = 0;
  std::map<TimedStream, Moment> ready_;           // what was issued is done
  std::map<std::int64_t, Moment> communicators_;  // by group
  std::vector<Span> spans_;
  std::vector<PhaseMark> marks_;
};

// The stream on which the asynchronous collectives of a group run.
constexpr TimedStream stream_of_group(std::int64_t group) {
  return 1000 + group;
}

}  // namespace lowtide::phantom
