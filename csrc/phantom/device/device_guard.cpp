#include "phantom/device/device_guard.h"

#include <chrono>
#include <memory>
#include <optional>
#include <utility>

#include "phantom/device/device_allocator.h"
#include "phantom/device/device_clock.h"
#include "phantom/device/phantom_device.h"

namespace lowtide::phantom {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

// What torch's opaque event pointer points to.
struct Event {
  StreamTable::Point point;
  double host_ms = 0;
  std::optional<TimeStamp> stamp;  // while time is kept
};

double host_ms() {
  using Milliseconds = std::chrono::duration<double, std::milli>;
  return Milliseconds(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

Stream stream_of(StreamId id) {
  return Stream(Stream::UNSAFE, kPhantomDevice, id);
}

DeviceClock::Access timeline() { return device_clock().timeline(); }

const Event& event_at(void* event) { return *static_cast<Event*>(event); }

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kPhantom; }

  Device exchangeDevice(Device device) const override {
    require_device(device);
    return kPhantomDevice;
  }
  Device getDevice() const override { return kPhantomDevice; }
  void setDevice(Device device) const override { require_device(device); }
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::DeviceCapability getDeviceCapability(Device) const override {
    return {};
  }

  Stream getStream(Device) const override {
    return stream_of(current_stream());
  }
  Stream getDefaultStream(Device) const override {
    return stream_of(kDefaultStream);
  }
  Stream getNewStream(Device, int priority) const override {
    return stream_of(phantom_device().streams().next_stream(priority));
  }
  Stream getStreamFromGlobalPool(Device device, bool urgent) const override {
    return getNewStream(device, urgent ? -1 : 0);
  }
  Stream exchangeStream(Stream stream) const override {
    return stream_of(exchange_current_stream(stream.id()));
  }
  // Never dereferenced by torch.
  void* getStreamNativeHandle(const Stream stream) const override {
    return reinterpret_cast<void*>(stream.id());
  }
  bool queryStream(const Stream& stream) const override {
    return phantom_device().streams().done(stream.id());
  }
  void synchronizeStream(const Stream& stream) const override {
    phantom_device().streams().synchronize(stream.id());
    phantom_device().memory().synchronize(stream.id());
    if (auto line = timeline()) line->synchronize(stream.id());
  }
  void synchronizeDevice(const DeviceIndex) const override {
    phantom_device().memory().synchronize();
    if (auto line = timeline()) line->synchronize_all();
  }

  void record(void** event, const Stream& stream, const DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) *event = std::make_unique<Event>().release();
    std::optional<TimeStamp> stamp;
    if (auto line = timeline()) stamp = line.stamp(line->record(stream.id()));
    *static_cast<Event*>(*event) = {
        phantom_device().streams().record(stream.id()), host_ms(), stamp};
  }
  void block(void* event, const Stream& stream) const override {
    if (event == nullptr) return;
    phantom_device().streams().wait(stream.id(), event_at(event).point);
    if (!event_at(event).stamp) return;
    if (auto line = timeline()) line.wait(stream.id(), *event_at(event).stamp);
  }
  bool queryEvent(void* event) const override {
    return event == nullptr ||
           phantom_device().streams().done(event_at(event).point);
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    phantom_device().streams().synchronize(event_at(event).point);
    if (!event_at(event).stamp) return;
    if (auto line = timeline()) line.synchronize(*event_at(event).stamp);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    const std::unique_ptr<Event> owned(static_cast<Event*>(event));
  }
  double elapsedTime(void* first, void* second,
                     const DeviceIndex) const override {
    const Event &from = event_at(first), &to = event_at(second);
    // Simulated where one timeline has both; otherwise the host's.
    if (from.stamp && to.stamp && from.stamp->timeline == to.stamp->timeline) {
      return (to.stamp->moment - from.stamp->moment) * 1e3;
    }
    return to.host_ms - from.host_ms;
  }

  void recordDataPtrOnStream(const c10::DataPtr& data,
                             const Stream& stream) const override {
    record_stream(data, stream);
  }
};

}  // namespace

const c10::impl::DeviceGuardImplInterface& device_guard() {
  // Used by destructors at the end of the process, so never destroyed itself.
  static const auto* guard = std::make_unique<Guard>().release();
  return *guard;
}

}  // namespace lowtide::phantom
