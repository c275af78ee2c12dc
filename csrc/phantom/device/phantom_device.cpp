#include "phantom/device/phantom_device.h"

#include <atomic>
#include <utility>

#include "base/check.h"

namespace lowtide::phantom {
namespace {

std::atomic<PhantomDevice*>& slot() {
  static std::atomic<PhantomDevice*> device = nullptr;
  return device;
}

std::unique_ptr<EventSource> events_of(StreamTable& streams,
                                       Progress progress) {
  return progress == Progress::immediate ? immediate_events()
                                         : stream_events(streams);
}

std::unique_ptr<SegmentProvider> segments_of(Mode mode) {
  return mode == Mode::exact ? host_segments() : faulting_segments();
}

}  // namespace

PhantomDevice::PhantomDevice(Options options)
    : options_(std::move(options)),
      streams_(options_.progress),
      memory_(options_.allocator, events_of(streams_, options_.progress),
              segments_of(options_.mode)) {}

PhantomDevice& phantom_device() {
  PhantomDevice* const device = slot().load(std::memory_order_acquire);
  if (device == nullptr) {
    throw Error(base::error_text("phantom", "an installed device", "none",
                                 "Call lowtide.phantom.install() first."));
  }
  return *device;
}

void install_device(Options options) {
  if (is_installed()) {
    throw Error(base::error_text(
        "phantom", "one device per process", "a second install",
        "Choose its settings in the first call, or start another process."));
  }
  slot().store(std::make_unique<PhantomDevice>(std::move(options)).release(),
               std::memory_order_release);
}

bool is_installed() {
  return slot().load(std::memory_order_acquire) != nullptr;
}

void require_device(c10::Device device) {
  if (device.type() == kPhantom && device.index() <= 0) return;
  throw InvalidArgument(base::error_text(
      "phantom", "device phantom:0, the only one of a process",
      base::concat("index ", static_cast<int>(device.index())),
      "A process simulates one rank; use torch.device('phantom')."));
}

}  // namespace lowtide::phantom
