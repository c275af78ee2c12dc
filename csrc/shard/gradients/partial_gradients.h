// One unit's gradients between the sum over its shards and what follows it: the
// sum over replicas, and the user's hook.  Both act on the whole unit at once,
// as FSDP2's do: one all-reduce a unit and dtype instead of one a chunk.
//
// Without sums over replicas (`set_requires_all_reduce(False)`) results stay
// here until a backward with them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "memory/device_memory.h"
#include "shard/gradients/gradient_plan.h"
#include "shard/unit_name.h"

namespace lowtide::shard {

class PartialGradients {
 public:
  // Parameters of one lease, in one flat tensor: their shards, each at a
  // multiple of kPieceColumnMultiple, then a flag for each in the same order,
  // non-zero where any rank of the shards used it.
  struct Flat {
    at::Tensor row;
    std::vector<Piece> pieces;  // whole shards
    std::int64_t flags_column = 0;
  };
  struct Parameter {
    std::int64_t shard_numel = 0;
    at::ScalarType dtype = at::kFloat;
  };

  PartialGradients(UnitName unit, std::vector<Parameter> parameters,
                   std::shared_ptr<memory::DeviceMemory> memory);

  // Leases what those parameters lack, on the compute stream, a flat tensor for
  // each dtype.  Whether there was any.  Elements are -0.0, so that keeping is
  // adding from the first time on.
  bool prepare(const std::vector<std::int32_t>& parameters);
  bool holds(std::int32_t i) const;
  // What `prepare` of all those parameters leases.
  std::int64_t bytes_of(const std::vector<std::int32_t>& parameters) const;

  // Adds a reduced row, on the current stream.
  void add(const std::vector<Piece>& pieces, const at::Tensor& row);
  // flags[parameter i]: of the same sum.
  void add_flags(const std::vector<std::int32_t>& parameters,
                 const at::Tensor& flags);

  // What i, which is held, has: [shard_numel + 1], its flag last; a copy on the
  // current stream.  Added where nothing is, it is there again.
  at::Tensor read(std::int32_t i) const;
  void add(std::int32_t i, const at::Tensor& read);
  // Forgets what was added for i, on the current stream.
  void clear(std::int32_t i);

  // All of it.
  const std::vector<Flat>& flats() const { return flats_; }
  // Nothing is held afterwards; the tensors are the caller's.
  std::vector<Flat> take();
  void drop() { take(); }

 private:
  struct Place {
    std::size_t flat;
    std::size_t piece;
  };
  void add(const at::Tensor& to, const at::Tensor& from);
  const Place& place_of(std::int32_t i) const;
  // Views: the sum and the flag.
  std::pair<at::Tensor, at::Tensor> views_of(std::int32_t i) const;

  UnitName unit_;
  std::vector<Parameter> parameters_;
  std::shared_ptr<memory::DeviceMemory> memory_;
  std::vector<Flat> flats_;
  std::vector<std::optional<Place>> places_;  // by parameter
};

}  // namespace lowtide::shard
