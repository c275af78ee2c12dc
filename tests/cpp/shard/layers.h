// Small models as programs that run the same way on lowtide's units (Rank) and
// on plain tensors (naive.h).
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace lowtide::shard {

struct ParameterSpec {
  std::vector<std::int64_t> sizes;
  at::ScalarType storage = at::kFloat;
  at::ScalarType compute = at::kFloat;
  at::ScalarType reduce = at::kFloat;
  bool trainable = true;
};

struct UnitSpec {
  std::string name;
  std::vector<ParameterSpec> parameters;
  bool encloses_units = false;
  bool leaf_module = false;
  // Sharded over so many ranks instead, who send what each rank sends.
  std::int64_t ranks = 0;
  // Its hosts are a mesh of so many ranks, 0 and 1, 2 and 3, say, of those that
  // share it; 0: all.
  std::int64_t hosts = 0;
};

// What a program runs on.
class Layers {
 public:
  using Body = std::function<at::Tensor(
      const std::vector<at::Tensor>& parameters, const at::Tensor& x)>;

  virtual ~Layers() = default;
  // The forward of that unit's module.
  virtual at::Tensor call(std::size_t unit, const at::Tensor& x,
                          const Body& body) = 0;
  virtual std::int64_t rank() const = 0;
};

using Program = std::function<at::Tensor(Layers& layers, const at::Tensor& x)>;

// tanh(x W^T + b) with the unit's first two parameters; every further one
// enters as a weighted sum.  Parameters in `skip` are left out.
Layers::Body layer(const std::vector<std::size_t>& skip = {});

// A model whose module is unit 0: it feeds its input through units 1 to
// `num_layers` and then through its own parameters.
Program chain(std::size_t num_layers);

// The forward of a module that has both units of a pair, 1 and 2, 3 and 4, ...:
// `body` with either's parameters, one behind the other.
at::Tensor call_pair(Layers& layers, std::size_t unit, const at::Tensor& x,
                     const Layers::Body& body);

// The forward of a module that has parameters of its own ahead of and behind
// the module inside it, the next unit.
at::Tensor call_around(Layers& layers, std::size_t unit, const at::Tensor& x,
                       const Layers::Body& body);

// Width of all layers; [kWidth, kWidth] and [kWidth].
inline constexpr std::int64_t kWidth = 6;
std::vector<ParameterSpec> dense();
// The same and: [1], uneven [5, 3], [0, 4], [2, 3, 2] and a long [300].
std::vector<ParameterSpec> odd_shapes();
// "model", dense and enclosing the others, "layers.0", "layers.1", ...
std::vector<UnitSpec> model_of(std::size_t num_layers,
                               const std::vector<ParameterSpec>& parameters);
// "model", blocks around experts, "blocks.0", "blocks.0.experts", "blocks.1",
// ..., which `chain_of_blocks` calls.
std::vector<UnitSpec> blocks_around_experts(
    std::size_t num_blocks, const std::vector<ParameterSpec>& of_block,
    const std::vector<ParameterSpec>& of_experts);
Program chain_of_blocks(std::size_t num_blocks);
// Other dtypes for all parameters.
std::vector<UnitSpec> with_dtypes(std::vector<UnitSpec> units,
                                  at::ScalarType storage,
                                  at::ScalarType compute,
                                  at::ScalarType reduce);

// Parameters of all units, by unit and index.
using Parameters = std::vector<std::vector<at::Tensor>>;

// Full parameters in the storage dtype, the same for equal seeds.
Parameters initial_parameters(const std::vector<UnitSpec>& units,
                              std::uint64_t seed = 1);
// A batch for that rank, in the compute dtype of the first parameter.
at::Tensor input_for(const std::vector<UnitSpec>& units, std::int64_t rank,
                     std::uint64_t seed);

at::Tensor loss_of(const at::Tensor& y);

// Same shape, dtype and bits; NaN equals NaN.
bool same_bits(const at::Tensor& a, const at::Tensor& b);

}  // namespace lowtide::shard
