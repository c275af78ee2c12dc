// Forwards to a ScriptedRuntime, but can forget one wait, as a missing line in
// the engine would, or fail to wait, as a broken device does.
#pragma once

#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "testing/scripted_runtime.h"

namespace lowtide::shard {

class SkippingRuntime final : public device::Runtime {
 public:
  explicit SkippingRuntime(std::shared_ptr<device::ScriptedRuntime> scripted)
      : scripted_(std::move(scripted)) {}

  // Ignores the wait that comes after `k` others, counted from now.
  void skip(std::int64_t k) {
    waits_.clear();
    skipped_ = k;
  }
  // "reduce after compute", ..., in order, since construction or `skip`.
  const std::vector<std::string>& waits() const { return waits_; }

  // The same for the host's.
  void skip_synchronize(std::int64_t k) {
    num_synchronizes_ = 0;
    skipped_synchronize_ = k;
  }
  std::int64_t num_synchronizes() const { return num_synchronizes_; }

  // The wait that comes after `k` others and all that follow throw.
  void fail(std::size_t k) { failing_ = waits_.size() + k; }

  void wait(device::Stream stream, const device::Event& event) override {
    if (event.empty()) return;
    if (waits_.size() >= failing_) {
      throw std::runtime_error("unspecified launch failure");
    }
    const bool skipped = static_cast<std::int64_t>(waits_.size()) == skipped_;
    waits_.push_back(base::concat(device::stream_name(stream), " after ",
                                  recorded_on_[event.get()]));
    if (!skipped) scripted_->wait(stream, event);
  }

  c10::Device device() const override { return scripted_->device(); }
  std::uint64_t capture() const override { return scripted_->capture(); }
  c10::DataPtr allocate(std::size_t bytes) override {
    return scripted_->allocate(bytes);
  }
  c10::DataPtr allocate_pinned(std::size_t bytes) override {
    return scripted_->allocate_pinned(bytes);
  }
  void copy(device::Stream stream, void* to, const void* from,
            std::size_t bytes, device::Copy direction) override {
    scripted_->copy(stream, to, from, bytes, direction);
  }
  device::Event record(device::Stream stream) override {
    device::Event event = scripted_->record(stream);
    recorded_on_[event.get()] = device::stream_name(stream);
    return event;
  }
  void synchronize(device::Stream stream) override {
    if (on_synchronize) on_synchronize();
    if (num_synchronizes_++ != skipped_synchronize_) {
      scripted_->synchronize(stream);
    }
  }
  std::int64_t enter(device::Stream stream) override {
    return scripted_->enter(stream);
  }
  void leave(std::int64_t previous) override { scripted_->leave(previous); }
  device::Stream current() const override { return scripted_->current(); }
  void touches(device::Stream stream, const void* begin, std::size_t bytes,
               device::Access access) override {
    scripted_->touches(stream, begin, bytes, access);
  }
  void describe(const void* begin, std::string_view kind,
                std::string_view name) override {
    scripted_->describe(begin, kind, name);
  }

  // Called before the host waits for the device.
  std::function<void()> on_synchronize;

 private:
  std::shared_ptr<device::ScriptedRuntime> scripted_;
  std::map<const void*, std::string_view> recorded_on_;
  std::vector<std::string> waits_;
  std::int64_t skipped_ = -1;
  std::int64_t num_synchronizes_ = 0;
  std::int64_t skipped_synchronize_ = -1;
  std::size_t failing_ = std::numeric_limits<std::size_t>::max();
};

}  // namespace lowtide::shard
