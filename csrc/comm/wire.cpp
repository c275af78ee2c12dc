#include "comm/wire.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <exception>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/watch.h"
#include "device/current_stream.h"
#include "device/stream_capture.h"

namespace lowtide::comm {
namespace {

constexpr int kHighPriority = -1;

c10::Stream new_stream(c10::Device device) {
  const auto* guard = c10::impl::getDeviceGuardImpl(device.type());
  return guard->getNewStream(device.has_index() ? device : guard->getDevice(),
                             kHighPriority);
}

// Empty for a backend that knows no error, or that can not tell.
std::string error_of(c10d::Backend& backend) {
  try {
    switch (backend.getError()) {
      case c10d::ErrorType::TIMEOUT:
        return "a timeout";
      case c10d::ErrorType::COMM_ERROR:
        return "an error of the communicator";
      case c10d::ErrorType::REMOTE_ERROR:
        return "an error of another rank";
      default:
        return {};
    }
  } catch (const std::exception&) {
    return {};
  }
}

std::chrono::milliseconds timeout_of(c10d::Backend& backend) {
  try {
    return backend.getBackendOptions()->timeout;
  } catch (const std::exception&) {
    return kBackendDefaultTimeout;
  }
}

}  // namespace

class Wire::Watch final : public Watched {
 public:
  Watch(std::shared_ptr<BorrowedGroup> group, c10::Device device)
      : calls(device.type()),
        group_(std::move(group)),
        backend_(group_->get()->getBackend(device.type()).get()),
        device_(device) {}

  std::optional<Sight> look(IssuedCalls::Time now) override {
    const auto oldest = calls.oldest();
    if (!oldest) return std::nullopt;
    try {
      const auto held = group_->get();
      Sight sight{this,
                  group_->rank(),
                  group_->size(),
                  timeout_of(*backend_),
                  error_of(*backend_),
                  std::nullopt};
      if (sight.error.empty() && now - *oldest < patience(sight.timeout)) {
        return std::nullopt;
      }
      const device::AsksForEvents asks(device_);
      sight.call = calls.first_unfinished(
          [](const c10::Event& point) { return point.query(); });
      const bool says_nothing =
          sight.error.empty() &&
          (!sight.call || now - sight.call->issued < patience(sight.timeout));
      return says_nothing ? std::nullopt : std::optional(std::move(sight));
    } catch (const std::exception&) {
      // The group was given back, or the device answers nobody any more.
      return std::nullopt;
    }
  }

  IssuedCalls calls;

 private:
  const std::shared_ptr<BorrowedGroup> group_;
  c10d::Backend* const backend_;  // lives while the group is held
  const c10::Device device_;
};

Wire::Wire(std::shared_ptr<BorrowedGroup> group, c10::Device device)
    : stream_(new_stream(device)),
      before_(stream_.device_type()),
      watch_(std::make_shared<Watch>(std::move(group), stream_.device())) {
  comm::watch(watch_);
}

Wire::~Wire() = default;

Wire::Point Wire::point_behind(Kind kind, const std::string& label,
                               std::int64_t bytes) {
  // Nobody may ask for an event of a capture, and its graph runs when it is
  // told to.
  if (device::is_capturing(stream_)) {
    auto point = std::make_shared<c10::Event>(stream_.device_type());
    point->record(stream_);
    return point;
  }
  return watch_->calls.add(kind, label, bytes, std::chrono::steady_clock::now(),
                           [&](c10::Event& point) { point.record(stream_); });
}

void Wire::follow_current() {
  before_.record(device::current_stream(stream_.device()));
  before_.block(stream_);
}

void Wire::wait(const Point& point) {
  point->block(device::current_stream(stream_.device()));
}

}  // namespace lowtide::comm
