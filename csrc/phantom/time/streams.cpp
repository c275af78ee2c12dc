#include "phantom/time/streams.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

namespace lowtide::phantom {
namespace {

constexpr Moment kNever = std::numeric_limits<Moment>::infinity();
constexpr Moment kNotYet = -1;

}  // namespace

Streams::Streams(const Accelerator& accelerator)
    : accelerator_(accelerator), device_(accelerator) {}

std::size_t Streams::index_of(TimedStream stream) {
  const auto [found, is_new] = by_name_.try_emplace(stream, streams_.size());
  if (is_new) streams_.emplace_back().name = stream;
  return found->second;
}

void Streams::set_priority(std::size_t stream, int priority) {
  streams_[stream].priority = priority;
}

std::size_t Streams::index_of_communicator(CommunicatorId communicator) {
  const auto [found, is_new] =
      communicators_.try_emplace(communicator, turns_.size());
  if (is_new) turns_.emplace_back();
  return found->second;
}

Ticket Streams::push(std::size_t stream, Call call, Moment issued) {
  if (const auto* collective = std::get_if<CollectiveLaunch>(&call)) {
    turns_[collective->communicator].push_back(stream);
  }
  Stream& to = streams_[stream];
  to.queue.push_back({num_calls_++, issued, to.priority, std::move(call)});
  arrivals_.emplace_back(issued, stream);
  return {stream, to.num_done + to.queue.size() - 1};
}

EventNumber Streams::push_record(std::size_t stream, Moment issued) {
  happened_.push_back(kNotYet);
  push(stream, EventRecord{last_event()}, issued);
  return last_event();
}

KernelLaunch* Streams::waiting_kernel(Ticket ticket) {
  Stream& stream = streams_[ticket.stream];
  const std::size_t begun =
      stream.num_done + (stream.head == Head::untouched ? 0 : 1);
  if (ticket.place < begun) return nullptr;
  return std::get_if<KernelLaunch>(
      &stream.queue[ticket.place - stream.num_done].call);
}

EventNumber Streams::last_event() const {
  return static_cast<EventNumber>(happened_.size());
}

bool Streams::has_happened(EventNumber event) const {
  return time_of(event) >= 0;
}

Moment Streams::time_of(EventNumber event) const {
  return happened_[static_cast<std::size_t>(event - 1)];
}

void Streams::run_to(Moment limit, History* history) {
  while (step(limit, history)) {
  }
}

// Whatever a call depends on was issued before it, so its event does happen.
void Streams::run_to_event(EventNumber event, History* history) {
  while (!has_happened(event)) {
    if (!step(kNever, history)) {
      throw std::domain_error(
          "lowtide: Simulation: expected figures by which all work ends, got "
          "work that takes for ever. Give the machine's peaks and bandwidths.");
    }
  }
}

bool Streams::step(Moment limit, History* history) {
  const Moment happens = device_.next();
  const Moment arrives = arrivals_.empty() ? kNever : arrivals_.front().first;
  const Moment next = std::min(happens, arrives);
  if (next > limit || next == kNever) return false;
  clock_ = next;
  if (happens <= arrives) {
    Owner ended;
    if (device_.happen(ended)) end(ended.stream, history);
    note_begun(history);
  } else {
    const std::size_t stream = arrivals_.front().second;
    arrivals_.pop_front();
    ++streams_[stream].num_arrived;
    awake_.push_back(stream);
  }
  for (std::size_t i = 0; i < awake_.size(); ++i) proceed(awake_[i], history);
  awake_.clear();
  return true;
}

void Streams::proceed(std::size_t index, History* history) {
  Stream& stream = streams_[index];
  while (stream.num_arrived > 0 && stream.head == Head::untouched) {
    stream.reached = clock_;
    stream.head = Head::waits;
    const bool is_over =
        std::visit([&](auto& call) { return begin(index, call, history); },
                   stream.queue.front().call);
    if (!is_over) return;
    pop(stream);
  }
}

void Streams::pop(Stream& stream) {
  stream.queue.pop_front();
  ++stream.num_done;
  --stream.num_arrived;
  stream.head = Head::untouched;
}

Owner Streams::owner_of(std::size_t index) const {
  const Queued& head = streams_[index].queue.front();
  return {head.number, index, head.priority};
}

bool Streams::begin(std::size_t index, KernelLaunch& call, History*) {
  Stream& stream = streams_[index];
  stream.head = Head::runs;
  stream.begun = clock_;
  device_.begin(owner_of(index), call.work, call.blocks, clock_);
  return false;
}

bool Streams::begin(std::size_t index, TransferCall& call, History* history) {
  auto& engine = engines_[static_cast<std::size_t>(call.direction)];
  engine.push_back(index);
  if (engine.size() == 1) ask_to_run(index, history);
  return false;
}

bool Streams::begin(std::size_t index, CollectiveLaunch& call,
                    History* history) {
  // The stream comes to its collectives in the order in which they were issued.
  if (turns_[call.communicator].front() == index) {
    ask_to_run(index, history);
  }
  return false;
}

bool Streams::begin(std::size_t, EventRecord& call, History* history) {
  happened_[static_cast<std::size_t>(call.event - 1)] = clock_;
  const auto found = waiters_.find(call.event);
  if (found == waiters_.end()) return true;
  for (const std::size_t waiter : found->second) {
    note_wait(streams_[waiter], history);
    pop(streams_[waiter]);
    awake_.push_back(waiter);
  }
  waiters_.erase(found);
  return true;
}

bool Streams::begin(std::size_t index, EventWait& call, History*) {
  if (has_happened(call.event)) return true;
  waiters_[call.event].push_back(index);
  return false;
}

bool Streams::begin(std::size_t, PhaseBegin& call, History* history) {
  if (history != nullptr) {
    history->marks.push_back({call.phase, clock_, history->spans.size()});
  }
  return true;
}

void Streams::ask_to_run(std::size_t index, History* history) {
  const Call& call = streams_[index].queue.front().call;
  CollectiveCost cost;
  if (const auto* transfer = std::get_if<TransferCall>(&call)) {
    cost.seconds = std::max(transfer->bytes / accelerator_.host_bandwidth,
                            accelerator_.kernel_floor);
    cost.traffic = transfer->bytes;
  } else {
    cost = std::get<CollectiveLaunch>(call).cost;
  }
  device_.ask(owner_of(index), cost, clock_);
  note_begun(history);
}

void Streams::note_begun(History* history) {
  for (const Owner& owner : device_.begun()) {
    Stream& stream = streams_[owner.stream];
    stream.head = Head::runs;
    stream.begun = clock_;
    note_wait(stream, history);
  }
}

void Streams::note_wait(const Stream& stream, History* history) {
  if (history == nullptr || clock_ <= stream.reached) return;
  Span span;
  span.kind = SpanKind::wait;
  span.stream = stream.name;
  span.begin = stream.reached;
  span.end = clock_;
  span.issued = stream.queue.front().issued;
  history->spans.push_back(span);
}

void Streams::end(std::size_t index, History* history) {
  Stream& stream = streams_[index];
  Queued& ended = stream.queue.front();
  Span span;
  span.stream = stream.name;
  span.begin = stream.begun;
  span.end = clock_;
  span.issued = ended.issued;
  Line* line = nullptr;
  if (const auto* kernel = std::get_if<KernelLaunch>(&ended.call)) {
    span.name = kernel->name;
    span.flops = kernel->work.flops;
    span.bytes = kernel->work.bytes;
  } else if (const auto* transfer = std::get_if<TransferCall>(&ended.call)) {
    span.kind = SpanKind::transfer;
    span.name = transfer->name;
    span.bytes = transfer->bytes;
    line = &engines_[static_cast<std::size_t>(transfer->direction)];
  } else {
    const auto& collective = std::get<CollectiveLaunch>(ended.call);
    span.kind = SpanKind::collective;
    span.name = collective.name;
    span.bytes = collective.cost.bytes;
    line = &turns_[collective.communicator];
  }
  if (history != nullptr) history->spans.push_back(span);
  pop(stream);
  awake_.push_back(index);
  if (line != nullptr) next_in_line(*line, history);
}

bool Streams::stands_in(std::size_t index, const Line& line) const {
  const Stream& stream = streams_[index];
  if (stream.head != Head::waits) return false;
  const Call& call = stream.queue.front().call;
  if (const auto* transfer = std::get_if<TransferCall>(&call)) {
    return &engines_[static_cast<std::size_t>(transfer->direction)] == &line;
  }
  const auto* collective = std::get_if<CollectiveLaunch>(&call);
  return collective != nullptr && &turns_[collective->communicator] == &line;
}

void Streams::next_in_line(Line& line, History* history) {
  line.pop_front();
  if (!line.empty() && stands_in(line.front(), line)) {
    ask_to_run(line.front(), history);
  }
}

}  // namespace lowtide::phantom
