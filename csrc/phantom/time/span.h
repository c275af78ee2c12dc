// What a simulated device did, and when.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace lowtide::phantom {

// A stream, by whatever number its owner gives it; 0 is the default stream.
using TimedStream = std::int64_t;

// A time at which something on the device has happened.
using Moment = double;

enum class SpanKind : std::uint8_t { kernel, transfer, collective, wait };

// `stream` is busy from begin to end; `wait`: idle, for something else on the
// device.  Seconds, operations, bytes.
struct Span {
  SpanKind kind = SpanKind::kernel;
  TimedStream stream = 0;
  double begin = 0;
  double end = 0;
  double issued = 0;      // when the host did
  std::string_view name;  // its owner keeps it as long as the spans
  double flops = 0;
  double bytes = 0;
};

// A phase lasts until the next one begins, on the compute stream.
struct PhaseMark {
  std::string phase;
  Moment begin = 0;
  std::size_t num_spans = 0;  // before it
};

}  // namespace lowtide::phantom
