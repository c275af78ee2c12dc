// Parameters whose tensor subclass says what is gathered for them and what that
// becomes: FSDP2's all-gather extensions (float8, int8, NF4, ...).
//
// Their values live in the subclass, not in the unit's master buffer.  For
// every gather the extension gives tensors to send, of any number and dtype,
// the same ones in number and size each time.  They travel in the unit's one
// coalesced call, each into a region of its own behind the plain parameters in
// the gathered buffer, on a storage that stays.  When they have arrived the
// extension makes the full parameters of them, once, and later brings what it
// made up to date.  What it allocated for that beyond the regions (`inner`)
// loses its bytes together with them.
//
// What is gathered may be over as soon as the parameters are made of it
// (`passing`).  Its regions are a buffer of their own, which goes back then.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "memory/device_memory.h"
#include "shard/storage.h"
#include "shard/unit_name.h"

namespace lowtide::shard {

// The subclasses' side, for all such parameters of a unit in its order.
// Implementations take the GIL.
class AllGatherExtension {
 public:
  struct Made {
    std::vector<at::Tensor> parameters;
    std::vector<at::Tensor> inner;
  };

  virtual ~AllGatherExtension() = default;
  // What this rank sends: contiguous tensors of no subclass.  The current
  // stream is the one that the gather runs on.
  virtual std::vector<at::Tensor> inputs() = 0;
  // Which of them nothing reads behind `arrived`; asked once, behind the first
  // inputs().
  virtual std::vector<bool> passing() {
    return {};  // none
  }
  // `gathered[k]`, flat: every rank's inputs()[k] in rank order, or, if it
  // comes `from_parts` that the last gather left, as this call left it.  The
  // current stream is compute's.  Empty unless parameters were made.
  virtual Made arrived(const std::vector<at::Tensor>& gathered,
                       bool from_parts) = 0;
};

class ExtendedParameters {
 public:
  // Bytes of the gathered buffer, from where the regions begin, or of the
  // buffer that passes.
  struct Extent {
    std::int64_t offset = 0;
    std::int64_t bytes = 0;
    bool passes = false;
  };

  ExtendedParameters(UnitName unit, std::int64_t world_size,
                     std::shared_ptr<memory::DeviceMemory> memory);

  // Another extension for the same parameters keeps what was made.
  void use(std::unique_ptr<AllGatherExtension> extension);
  bool any() const { return extension_ != nullptr; }

  // Asks for what is sent; the first time the regions are laid out by it.
  void prepare();
  // By prepare(), until drop_inputs(): bytes, one tensor a region.
  const std::vector<at::Tensor>& inputs() const { return inputs_; }
  void drop_inputs() { inputs_.clear(); }
  // Known from the first gather on; of each region, of all that stay until the
  // unit is resharded, and of all that pass.
  const std::vector<Extent>& extents() const { return extents_; }
  std::int64_t bytes() const { return bytes_; }
  std::int64_t passing_bytes() const { return passing_bytes_; }

  // Anew, when the unit's name or what was made has changed.
  void set_read_errors() const;

  // Those that do not pass show `owner`'s bytes from `offset` on, in bytes.
  void bind_within(const RepointedStorage& owner, std::int64_t offset);
  // Those that pass own their bytes until arrived() or unbind().
  void own_passing(c10::DataPtr lease);
  // Bytes of region k if it passes; what the collective writes to.
  at::Tensor passing(std::size_t k) const;
  // What was made of the regions, if that was now.
  std::vector<at::Tensor> arrived(bool from_parts);
  void unbind();

 private:
  struct Inner {
    c10::Storage storage;
    std::int64_t bytes = 0;
  };

  void lay_out(const std::vector<at::Tensor>& inputs);
  void unbind_passing();
  void keep_inner(const std::vector<at::Tensor>& inner);
  void bind_inner();

  UnitName unit_;
  std::int64_t world_size_;
  std::shared_ptr<memory::DeviceMemory> memory_;
  std::unique_ptr<AllGatherExtension> extension_;
  std::vector<at::Tensor> inputs_;
  std::vector<Extent> extents_;
  std::int64_t bytes_ = 0;
  std::int64_t passing_bytes_ = 0;
  RepointedStorage passing_;
  std::vector<RepointedStorage> regions_;
  std::vector<at::Tensor> gathered_;  // flat, on the regions
  std::vector<Inner> inner_;
  bool bound_ = false;  // inner_ has bytes
};

}  // namespace lowtide::shard
