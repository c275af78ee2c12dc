// Regions on paper: values on a ScriptedRuntime, sent to the host and back.
#pragma once

#include <ATen/ATen.h>

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "activation/transfer.h"
#include "shard/skipping_runtime.h"
#include "testing/scripted_runtime.h"

namespace lowtide::activation {

inline constexpr std::int64_t kNumel = 64;
inline constexpr std::int64_t kBytes = kNumel * 4;

struct Device {
  explicit Device(
      std::int64_t cap_bytes = std::numeric_limits<std::int64_t>::max())
      : memories{std::make_shared<memory::DeviceMemory>(waits, ledger),
                 std::make_shared<memory::PinnedPool>(waits, host_ledger,
                                                      cap_bytes)} {}

  // What a kernel on compute produced: `value` everywhere.
  at::Tensor produce(float value) {
    auto data =
        memories.device->lease(memory::Category::gathered, "produced", kBytes);
    c10::Storage storage(c10::Storage::use_byte_size_t(), kBytes,
                         std::move(data), nullptr, false);
    auto tensor = at::empty({0}).set_(storage, 0, {kNumel}, {1});
    tensor.fill_(value);
    scripted->touches(device::Stream::compute, tensor.data_ptr(), kBytes,
                      device::Access::write);
    return tensor;
  }

  // A kernel on compute that reads it; returns its value.
  float consume(const c10::Storage& storage) {
    scripted->touches(device::Stream::compute, storage.data(), kBytes,
                      device::Access::read);
    return *static_cast<const float*>(storage.data());
  }

  device::Event now() { return waits->record(device::Stream::compute); }

  std::int64_t device_bytes() const { return ledger->total_live(); }
  std::int64_t host_bytes() const { return host_ledger->total_live(); }

  std::shared_ptr<device::ScriptedRuntime> scripted =
      std::make_shared<device::ScriptedRuntime>();
  std::shared_ptr<shard::SkippingRuntime> waits =
      std::make_shared<shard::SkippingRuntime>(scripted);
  std::shared_ptr<memory::Ledger> ledger = std::make_shared<memory::Ledger>();
  std::shared_ptr<memory::Ledger> host_ledger =
      std::make_shared<memory::Ledger>();
  Memories memories;
};

// A stack of regions, each of which sends its one argument to the host.
class Stack {
 public:
  Stack(Device& device, Window window)
      : device_(device),
        window_(window),
        transfers_(std::make_shared<Transfers>(device.memories)) {}

  Transfers& transfers() { return *transfers_; }

  struct Region {
    std::shared_ptr<Stash> stash;
    std::shared_ptr<Batch> batch;
    float value;
  };
  std::vector<Region> regions;

  // The argument lives until the next region has begun, as in a model.
  void forward(float value) {
    at::Tensor argument = device_.produce(value);
    Region region{transfers_->stash(argument, "residual"),
                  transfers_->open(window_, base::concat("layers.", value)),
                  value};
    transfers_->add(*region.batch, region.stash, device_.now(),
                    [this](bool sent) { ++(sent ? num_sent : num_kept); });
    device_.scripted->mark(device::Stream::compute,
                           base::concat("forward ", value));
    argument_ = std::move(argument);
    device_peak = std::max(device_peak, device_.device_bytes());
    regions.push_back(std::move(region));
  }

  // Computes the last region again; what it gave is gone afterwards.
  void backward() {
    Region region = std::move(regions.back());
    regions.pop_back();
    argument_.reset();
    recompute(region);
  }

  // As `backward`, but with retain_graph.
  void recompute(Region& region) {
    {
      const device::ScriptedRuntime::Label label(
          base::concat("copies for ", region.value));
      transfers_->begin_use(*region.batch);
    }
    const c10::Storage storage = region.stash->on_device();
    transfers_->end_use(*region.batch);
    device_.scripted->mark(device::Stream::compute,
                           base::concat("backward ", region.value));
    if (device_.consume(storage) != region.value) ++num_wrong;
    device_peak = std::max(device_peak, device_.device_bytes());
  }

  void step(int num_regions) {
    for (int i = 0; i < num_regions; ++i) forward(static_cast<float>(i + 1));
    argument_.reset();
    while (!regions.empty()) backward();
    transfers_->end_backward();
  }

  int num_sent = 0;
  int num_kept = 0;
  int num_wrong = 0;
  std::int64_t device_peak = 0;

 private:
  Device& device_;
  const Window window_;
  std::shared_ptr<Transfers> transfers_;
  at::Tensor argument_;
};

}  // namespace lowtide::activation
