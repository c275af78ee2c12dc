#include "comm/wire.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "device/current_stream.h"

namespace lowtide::comm {
namespace {

constexpr int kHighPriority = -1;

c10::Stream new_stream(c10::Device device) {
  const auto* guard = c10::impl::getDeviceGuardImpl(device.type());
  return guard->getNewStream(device.has_index() ? device : guard->getDevice(),
                             kHighPriority);
}

}  // namespace

Wire::Wire(c10::Device device) : stream_(new_stream(device)) {}

c10::Event Wire::point_on(const c10::Stream& stream) {
  if (spare_.empty()) spare_.emplace_back(stream_.device_type());
  c10::Event point = std::move(spare_.back());
  spare_.pop_back();
  point.record(stream);
  return point;
}

void Wire::follow_current() {
  auto point = point_on(device::current_stream(stream_.device()));
  point.block(stream_);
  spare_.push_back(std::move(point));
}

void Wire::wait(c10::Event point) {
  point.block(device::current_stream(stream_.device()));
  spare_.push_back(std::move(point));
}

}  // namespace lowtide::comm
