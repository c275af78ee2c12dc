#include "phantom/driver/completion.h"

#include <algorithm>

namespace lowtide::dry {
namespace {

using Lock = std::lock_guard<std::mutex>;

}  // namespace

Completion::Ticket Completion::record(cudaStream_t stream) {
  const Lock lock(mutex_);
  return {stream, ++last_};
}

bool Completion::done(const Ticket& ticket) const {
  return immediate_ || waited_for(ticket);
}

bool Completion::waited_for(const Ticket& ticket) const {
  const Lock lock(mutex_);
  if (ticket.number <= device_done_) return true;
  const auto found = stream_done_.find(ticket.stream);
  return found != stream_done_.end() && ticket.number <= found->second;
}

void Completion::wait(const Ticket& ticket) {
  const Lock lock(mutex_);
  auto& done = stream_done_[ticket.stream];
  done = std::max(done, ticket.number);
}

void Completion::wait_for_stream(cudaStream_t stream) {
  const Lock lock(mutex_);
  stream_done_[stream] = last_;
}

void Completion::wait_for_device() {
  const Lock lock(mutex_);
  device_done_ = last_;
}

}  // namespace lowtide::dry
