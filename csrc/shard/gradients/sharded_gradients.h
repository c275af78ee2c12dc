// Where reduced gradients land: one flat buffer per unit and generation, in
// which they follow each other as the unit's shards do, so that an optimizer
// may step neighbours as one tensor (step_on_rows.py).
//
// `.grad` of a sharded parameter is a DTensor over a slice of that buffer, so
// zero_grad(set_to_none=True) gives the bytes back as soon as the last slice
// goes.  A later backward adds into the slices that are still some parameter's
// `.grad`, and leases a new generation for the others; bytes a user kept are
// never written again.
//
// [Note: Gradients on the host]
// Those of an offloaded unit land in a generation on the device, all of them,
// that is copied to the host when the last has and goes when it was.  What
// `.grad` has already is added to by the host: when the backward is over, where
// it waits for all units' copies at once.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "memory/device_memory.h"
#include "memory/host_memory.h"
#include "shard/gradients/gradient_plan.h"
#include "shard/unit_name.h"

namespace lowtide::shard {

class ShardedGradients {
 public:
  struct Parameter {
    at::Tensor shard;                       // the sharded nn.Parameter
    std::vector<std::int64_t> local_sizes;  // of this rank's rows
    std::int64_t local_numel;
    std::int64_t shard_numel;   // with padding
    std::int64_t shard_offset;  // bytes, among the unit's shards
    at::ScalarType dtype;
  };
  // Wraps local gradients as the DTensors that become `.grad`.
  using Wrap = std::function<std::vector<at::Tensor>(
      const std::vector<std::int32_t>& parameters,
      const std::vector<at::Tensor>& locals)>;

  // `host`: where gradients become `.grad`, if not on the device.
  ShardedGradients(UnitName unit, std::shared_ptr<memory::DeviceMemory> memory,
                   std::shared_ptr<memory::HostMemory> host = nullptr)
      : unit_(std::move(unit)),
        memory_(std::move(memory)),
        host_(std::move(host)) {}

  void set_parameters(std::vector<Parameter> parameters);

  // Decides for each of `trainable` whether results are added to its `.grad` or
  // written to a fresh slice, and leases a generation if any is fresh.  Call
  // in the compute stream's order, once per backward that reduces.
  void prepare(const std::vector<std::int32_t>& trainable);
  bool prepared() const { return prepared_; }
  // The bytes of fresh slices that are not published; null where there are
  // none.
  const c10::Storage& results() const { return generation_; }
  // Of a generation in which all of `trainable` are fresh.
  std::int64_t generation_bytes(
      const std::vector<std::int32_t>& trainable) const;

  // `pieces` of a chunk have been reduced to the row `result`: copies or adds
  // them, on the current stream, in one launch each.
  void land(const std::vector<Piece>& pieces, const at::Tensor& result);

  // Everything has landed: of an offloaded unit, starts its copy to the host,
  // behind the current stream.  Returns what it is copied from, not to be given
  // back before the event.
  struct Leaving {
    c10::Storage storage;
    device::Event copied;
  };
  std::optional<Leaving> leave_device();

  // Makes the fresh slices of the parameters in `used` visible as `.grad` and
  // runs their post-accumulate hooks; the slices of others stay invisible.  Of
  // an offloaded unit, waits for copies to the host first.
  void publish(const std::vector<std::int32_t>& used, const Wrap& wrap);

  // Forgets this backward's targets and drops every `.grad`.
  void abort();

 private:
  enum class Target : std::uint8_t { none, fresh, add, foreign };
  struct Slot {
    Target target = Target::none;
    at::Tensor flat;  // [local_numel] where results land
    // What `.grad` was when this class last set it.
    c10::weak_intrusive_ptr<c10::TensorImpl> wrapped{
        c10::intrusive_ptr<c10::TensorImpl>()};
    c10::weak_intrusive_ptr<c10::TensorImpl> local{
        c10::intrusive_ptr<c10::TensorImpl>()};
  };

  Target choose(std::size_t i);
  // Results are written to a slice of this generation.
  bool fresh(std::size_t i) const;
  at::Tensor target_of(const Piece& piece) const;
  at::Tensor fresh_local(std::size_t i) const;
  at::Tensor on_host(std::size_t i) const;
  void arrive_on_host(const std::vector<std::int32_t>& used);

  UnitName unit_;
  std::shared_ptr<memory::DeviceMemory> memory_;
  std::shared_ptr<memory::HostMemory> host_;
  std::vector<Parameter> parameters_;
  std::vector<Slot> slots_;
  std::vector<std::int64_t> offsets_;  // bytes, in a generation
  c10::Storage generation_;
  c10::Storage on_host_;  // the same there, on its way
  bool prepared_ = false;
};

}  // namespace lowtide::shard
