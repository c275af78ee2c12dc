// Work on a stream of the user's that need not be the current one.
#pragma once

#include <c10/core/StreamGuard.h>

#include <optional>
#include <utility>

#include "device/current_stream.h"
#include "device/runtime.h"

namespace lowtide::device {

// Runs `action` with `stream`, of the runtime's device, as the current one:
// behind what is enqueued on the stream that is current now, which goes on
// behind it.  Just runs it where `stream` is none or the current one, and where
// only one of the two is part of a graph capture, which no event may leave.
// Inside of no StreamScope.
template <typename Action>
void run_on(Runtime& runtime, const std::optional<c10::Stream>& stream,
            Action&& action) {
  if (!stream || *stream == current_stream(runtime.device())) {
    std::forward<Action>(action)();
    return;
  }
  const auto capture = runtime.capture();
  const Event before = runtime.record(Stream::compute);
  std::optional<c10::StreamGuard> guard(*stream);
  if (runtime.capture() != capture) {
    guard.reset();
    std::forward<Action>(action)();
    return;
  }
  runtime.wait(Stream::compute, before);
  std::forward<Action>(action)();
  const Event after = runtime.record(Stream::compute);
  guard.reset();
  runtime.wait(Stream::compute, after);
}

}  // namespace lowtide::device
