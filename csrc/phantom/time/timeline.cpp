#include "phantom/time/timeline.h"

#include <algorithm>
#include <utility>

namespace lowtide::phantom {

Timeline::Timeline(Machine machine) : machine_(std::move(machine)) {}

Span& Timeline::append(SpanKind kind, TimedStream stream, double seconds) {
  Span span;
  span.kind = kind;
  span.stream = stream;
  span.begin = record(stream);
  span.end = span.begin + seconds;
  span.issued = host_;
  ready_[stream] = span.end;
  spans_.push_back(span);
  return spans_.back();
}

void Timeline::run(TimedStream stream, std::string_view name,
                   const Work& work) {
  Span& span = append(SpanKind::kernel, stream,
                      kernel_seconds(work, machine_.accelerator));
  span.name = name;
  span.flops = work.flops;
  span.bytes = work.bytes;
}

void Timeline::transfer(TimedStream stream, std::string_view name,
                        double bytes) {
  const Accelerator& accelerator = machine_.accelerator;
  const double seconds =
      std::max(bytes / accelerator.host_bandwidth, accelerator.kernel_floor);
  Span& span = append(SpanKind::transfer, stream, seconds);
  span.name = name;
  span.bytes = bytes;
}

Moment Timeline::collective(std::int64_t group, const Placement& placement,
                            TimedStream caller, bool async, CollectiveKind kind,
                            double bytes) {
  const TimedStream stream = async ? stream_of_group(group) : caller;
  if (async) wait(stream, record(caller));
  wait(stream, communicators_[group]);
  Span& span =
      append(SpanKind::collective, stream,
             collective_seconds(kind, bytes, placement, machine_.network));
  span.name = name_of(kind);
  span.bytes = bytes;
  communicators_[group] = span.end;
  return span.end;
}

Moment Timeline::record(TimedStream stream) const {
  const auto ready = ready_.find(stream);
  return std::max(host_, ready == ready_.end() ? 0 : ready->second);
}

void Timeline::wait(TimedStream stream, Moment moment) {
  const Moment ready = record(stream);
  if (moment > ready) append(SpanKind::wait, stream, moment - ready);
}

void Timeline::synchronize(Moment moment) { host_ = std::max(host_, moment); }

void Timeline::synchronize_all() {
  for (const auto& [stream, ready] : ready_) synchronize(ready);
}

void Timeline::mark(std::string phase, TimedStream stream) {
  marks_.push_back({std::move(phase), record(stream), spans_.size()});
}

}  // namespace lowtide::phantom
