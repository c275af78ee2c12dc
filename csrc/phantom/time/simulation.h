// When everything on a device begins and ends, worked out only when somebody
// needs to know.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "phantom/time/costs.h"
#include "phantom/time/machine.h"
#include "phantom/time/span.h"
#include "phantom/time/streams.h"

namespace lowtide::phantom {

// [Note: Lazy simulation]
// Calls queue work at the end of a stream, issued at the host's present time.
// Nothing is simulated until the host waits or somebody asks for a time.  That
// is exact, because the device is simulated no further than to what the host
// waits for, and whatever the host issues afterwards is issued later than
// that.  So work may be told what it does after it was queued, as long as
// nobody has waited in between.
//
// Seconds since the simulation began, bytes.  Not thread-safe.  Whoever waits
// or asks for a time gets std::domain_error where a figure of the machine is 0
// by which work would have to be divided.
class Simulation {
 public:
  explicit Simulation(Machine machine);

  const Machine& machine() const { return machine_; }

  // -- the host ---------------------------------------------------------------

  void spend(double seconds) { host_ += seconds; }  // its time goes on
  double host() const { return host_; }

  // -- work at the end of a stream --------------------------------------------

  // `name` outlives the simulation.  The caller spends the host's time first.

  // Of what the stream is given from now on, as CUDA has it: a lower number is
  // more urgent.  0 at first.
  void set_priority(TimedStream stream, int priority);
  // `blocks`: of its grid; 0: unknown, and it fills the device.
  Ticket kernel(TimedStream stream, std::string_view name, std::int64_t blocks);
  // What it does; without it a kernel takes the floor.  False when it comes too
  // late: the kernel has begun in simulated time already.
  bool tell(Ticket kernel, const Work& work);
  // A copy engine for each direction, one copy after another.
  void transfer(TimedStream stream, std::string_view name, double bytes,
                Direction direction);
  // Those of one communicator run in the order of issue, whatever their
  // streams.
  void collective(TimedStream stream, CommunicatorId communicator,
                  std::string_view name, const CollectiveCost& cost);
  EventNumber record(TimedStream stream);
  // The stream goes on when the event has happened; never recorded: at once.
  void wait(TimedStream stream, EventNumber event);
  // A phase begins when the stream gets there.
  void mark(std::string phase, TimedStream stream);

  // -- the host waits ---------------------------------------------------------

  void synchronize_event(EventNumber event);
  void synchronize_stream(TimedStream stream);
  void synchronize_all();

  // -- what happened ----------------------------------------------------------

  // When the event happens.  Where that is after host() it is what is known so
  // far: work that is issued until then can still delay it.  The host does not
  // wait.  Throws std::out_of_range for an event that nobody recorded.
  Moment time_of(EventNumber event);
  // The host waits for everything.
  void finish() { synchronize_all(); }
  // Of what was simulated so far, in the order in which they end.
  const std::vector<Span>& spans() const { return history_.spans; }
  const std::vector<PhaseMark>& marks() const { return history_.marks; }

 private:
  void expect_recorded(EventNumber event, EventNumber least) const;

  const Machine machine_;
  Moment host_ = 0;
  History history_;
  Streams streams_;
};

}  // namespace lowtide::phantom
