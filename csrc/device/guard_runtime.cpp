#include "device/guard_runtime.h"

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <c10/core/StreamGuard.h>

#include <cmath>
#include <vector>

#include "base/check.h"

namespace lowtide::device {
namespace {

using c10::impl::DeviceGuardImplInterface;

constexpr int kHighPriority = -1;
constexpr int kNormalPriority = 0;

// The scopes this thread is in, outermost first; of all runtimes, because two
// roots on one device share the user's stream.
struct Scope {
  Stream entered;
  c10::Stream previous;
};
thread_local std::vector<Scope> scopes;

// What an Event points to.
class Point {
 public:
  Point(const DeviceGuardImplInterface& guard, c10::Stream stream,
        c10::EventFlag flag)
      : guard_(guard), device_index_(stream.device_index()) {
    guard_.record(&event_, stream, device_index_, flag);
  }
  ~Point() { guard_.destroyEvent(event_, device_index_); }
  Point(const Point&) = delete;
  Point& operator=(const Point&) = delete;

  void block(c10::Stream stream) const { guard_.block(event_, stream); }
  bool reached() const { return guard_.queryEvent(event_); }
  double ms_until(const Point& later) const {
    return guard_.elapsedTime(event_, later.event_, device_index_);
  }

 private:
  const DeviceGuardImplInterface& guard_;
  c10::DeviceIndex device_index_;
  void* event_ = nullptr;
};

c10::Device with_index(const DeviceGuardImplInterface& guard,
                       c10::Device device) {
  return device.has_index() ? device : guard.getDevice();
}

}  // namespace

GuardRuntime::GuardRuntime(c10::Device device)
    : guard_(*c10::impl::getDeviceGuardImpl(device.type())),
      gather_(guard_.getNewStream(with_index(guard_, device), kHighPriority)),
      reduce_(guard_.getNewStream(gather_.device(), kHighPriority)),
      offload_(guard_.getNewStream(gather_.device(), kNormalPriority)),
      reload_(guard_.getNewStream(gather_.device(), kNormalPriority)) {
  const c10::Stream compute = guard_.getDefaultStream(gather_.device());
  if (gather_ == reduce_ || gather_ == compute || reduce_ == compute) {
    throw Error(base::error_text(
        "device", "two new streams beside the default one",
        base::concat("streams ", gather_.id(), " and ", reduce_.id(), " of ",
                     gather_.device()),
        "Communication needs streams of its own: the backend of this device "
        "has to hand out different ones."));
  }
}

c10::Stream GuardRuntime::stream_of(Stream stream) const {
  if (stream == Stream::gather) return gather_;
  if (stream == Stream::reduce) return reduce_;
  if (stream == Stream::offload) return offload_;
  if (stream == Stream::reload) return reload_;
  LOWTIDE_INVARIANT(stream == Stream::compute,
                    "only a process group runs on the wire stream");
  // What was current before this thread's outermost scope on this device.
  for (const Scope& scope : scopes) {
    if (scope.previous.device() == gather_.device()) return scope.previous;
  }
  return guard_.getStream(gather_.device());
}

c10::DataPtr GuardRuntime::allocate(std::size_t bytes) {
  const c10::StreamGuard guard(stream_of(Stream::compute));
  return c10::GetAllocator(guard_.type())->allocate(bytes);
}

c10::DataPtr GuardRuntime::allocate_pinned(std::size_t bytes) {
  return at::globalContext()
      .getPinnedMemoryAllocator(guard_.type())
      ->allocate(bytes);
}

void GuardRuntime::copy(Stream stream, void* to, const void* from,
                        std::size_t bytes, Copy direction) {
  const auto over = [&](void* data, c10::Device where) {
    return at::for_blob(data, {static_cast<std::int64_t>(bytes)})
        .options(at::TensorOptions().dtype(at::kByte).device(where))
        .target_device(where)
        .make_tensor();
  };
  const c10::Device host(c10::DeviceType::CPU);
  const bool out = direction == Copy::to_host;
  const c10::StreamGuard guard(stream_of(stream));
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  over(to, out ? host : device())
      .copy_(over(const_cast<void*>(from), out ? device() : host),
             /*non_blocking=*/true);
}

Event GuardRuntime::record(Stream stream) {
  return Event(std::make_shared<Point>(guard_, stream_of(stream),
                                       c10::EventFlag::PYTORCH_DEFAULT));
}

// torch's own flag is without time.
Event GuardRuntime::record_time(Stream stream) {
  return Event(std::make_shared<Point>(guard_, stream_of(stream),
                                       c10::EventFlag::BACKEND_DEFAULT));
}

std::optional<std::int64_t> GuardRuntime::elapsed_ns(const Event& from,
                                                     const Event& to) const {
  const auto& first = *static_cast<Point*>(from.get());
  const auto& second = *static_cast<Point*>(to.get());
  if (!first.reached() || !second.reached()) return std::nullopt;
  return std::llround(first.ms_until(second) * 1e6);
}

void GuardRuntime::wait(Stream stream, const Event& event) {
  if (event.empty()) return;
  static_cast<Point*>(event.get())->block(stream_of(stream));
}

void GuardRuntime::synchronize(Stream stream) {
  guard_.synchronizeStream(stream_of(stream));
}

std::int64_t GuardRuntime::enter(Stream stream) {
  const c10::Stream target = stream_of(stream);
  const auto depth = static_cast<std::int64_t>(scopes.size());
  scopes.push_back({stream, guard_.exchangeStream(target)});
  return depth;
}

void GuardRuntime::leave(std::int64_t previous) {
  while (static_cast<std::int64_t>(scopes.size()) > previous) {
    const c10::Stream restored = scopes.back().previous;
    c10::impl::getDeviceGuardImpl(restored.device_type())
        ->exchangeStream(restored);
    scopes.pop_back();
  }
}

Stream GuardRuntime::current() const {
  for (auto scope = scopes.rbegin(); scope != scopes.rend(); ++scope) {
    if (scope->previous.device() == gather_.device()) return scope->entered;
  }
  return Stream::compute;
}

}  // namespace lowtide::device
