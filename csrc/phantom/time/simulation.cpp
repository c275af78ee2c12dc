#include "phantom/time/simulation.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace lowtide::phantom {

Simulation::Simulation(Machine machine)
    : machine_(std::move(machine)), streams_(machine_.accelerator) {}

void Simulation::set_priority(TimedStream stream, int priority) {
  streams_.set_priority(streams_.index_of(stream), priority);
}

Ticket Simulation::kernel(TimedStream stream, std::string_view name,
                          std::int64_t blocks) {
  return streams_.push(streams_.index_of(stream), KernelLaunch{name, blocks},
                       host_);
}

bool Simulation::tell(Ticket kernel, const Work& work) {
  KernelLaunch* launch = streams_.waiting_kernel(kernel);
  if (launch == nullptr) return false;
  launch->work = work;
  return true;
}

void Simulation::transfer(TimedStream stream, std::string_view name,
                          double bytes, Direction direction) {
  streams_.push(streams_.index_of(stream), TransferCall{name, bytes, direction},
                host_);
}

void Simulation::collective(TimedStream stream, CommunicatorId communicator,
                            std::string_view name, const CollectiveCost& cost) {
  const auto index = streams_.index_of_communicator(communicator);
  streams_.push(streams_.index_of(stream), CollectiveLaunch{name, index, cost},
                host_);
}

EventNumber Simulation::record(TimedStream stream) {
  return streams_.push_record(streams_.index_of(stream), host_);
}

void Simulation::wait(TimedStream stream, EventNumber event) {
  expect_recorded(event, /*least=*/0);
  if (event == 0) return;
  streams_.push(streams_.index_of(stream), EventWait{event}, host_);
}

void Simulation::mark(std::string phase, TimedStream stream) {
  streams_.push(streams_.index_of(stream), PhaseBegin{std::move(phase)}, host_);
}

void Simulation::synchronize_event(EventNumber event) {
  expect_recorded(event, /*least=*/0);
  if (event == 0) return;
  streams_.run_to_event(event, &history_);
  host_ = std::max(host_, streams_.time_of(event));
}

void Simulation::synchronize_stream(TimedStream stream) {
  synchronize_event(record(stream));
}

void Simulation::synchronize_all() {
  std::vector<EventNumber> ends;
  for (std::size_t stream = 0; stream < streams_.size(); ++stream) {
    ends.push_back(streams_.push_record(stream, host_));
  }
  for (const EventNumber end : ends) synchronize_event(end);
}

Moment Simulation::time_of(EventNumber event) {
  expect_recorded(event, /*least=*/1);
  streams_.run_to(host_, &history_);
  if (streams_.has_happened(event)) return streams_.time_of(event);
  Streams ahead = streams_;
  ahead.run_to_event(event, nullptr);
  return ahead.time_of(event);
}

void Simulation::expect_recorded(EventNumber event, EventNumber least) const {
  const EventNumber most = streams_.last_event();
  if (event >= least && event <= most) return;
  throw std::out_of_range("lowtide: Simulation: expected an event from " +
                          std::to_string(least) + " to " +
                          std::to_string(most) + ", got " +
                          std::to_string(event) + ". Record it first.");
}

}  // namespace lowtide::phantom
