#include "layers.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>

#include "base/check.h"

namespace lowtide::shard {
namespace {

// Different for every element, so that a mixed-up order shows.
at::Tensor weights_like(const at::Tensor& parameter, at::ScalarType dtype) {
  return at::arange(parameter.numel(), at::kFloat)
      .remainder(7)
      .sub(2.5)
      .mul(0.125)
      .to(dtype)
      .view(parameter.sizes());
}

at::Tensor random(at::IntArrayRef sizes, std::uint64_t seed) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed), at::kFloat);
}

}  // namespace

Layers::Body layer(const std::vector<std::size_t>& skip) {
  return
      [skip](const std::vector<at::Tensor>& parameters, const at::Tensor& x) {
        const auto used = [&](std::size_t p) {
          return p < parameters.size() &&
                 std::find(skip.begin(), skip.end(), p) == skip.end();
        };
        const auto dtype = x.scalar_type();
        at::Tensor y = used(0) ? x.mm(parameters[0].to(dtype).t()) : x * 0.5;
        if (used(1)) y = y + parameters[1].to(dtype);
        for (std::size_t p = 2; p < parameters.size(); ++p) {
          if (!used(p)) continue;
          const at::Tensor parameter = parameters[p].to(dtype);
          y = y + (parameter * weights_like(parameter, dtype)).sum();
        }
        return y.tanh();
      };
}

Program chain(std::size_t num_layers) {
  return [num_layers](Layers& layers, const at::Tensor& x) {
    return layers.call(0, x, [&](const auto& parameters, const auto& input) {
      at::Tensor y = input;
      for (std::size_t unit = 1; unit <= num_layers; ++unit) {
        y = layers.call(unit, y, layer());
      }
      return layer()(parameters, y);
    });
  };
}

at::Tensor call_pair(Layers& layers, std::size_t unit, const at::Tensor& x,
                     const Layers::Body& body) {
  const std::size_t first = unit - (unit + 1) % 2;
  return layers.call(first, x, [&](const auto& outer, const auto& h) {
    return layers.call(first + 1, h, [&](const auto& inner, const auto& y) {
      return body(outer, body(inner, y));
    });
  });
}

at::Tensor call_around(Layers& layers, std::size_t unit, const at::Tensor& x,
                       const Layers::Body& body) {
  return layers.call(unit, x, [&](const auto& outer, const auto& h) {
    return body(outer, layers.call(unit + 1, body(outer, h), body));
  });
}

std::vector<ParameterSpec> dense() { return {{{kWidth, kWidth}}, {{kWidth}}}; }

std::vector<ParameterSpec> odd_shapes() {
  return {{{kWidth, kWidth}}, {{kWidth}},  {{1}},  {{5, 3}},
          {{0, 4}},           {{2, 3, 2}}, {{300}}};
}

std::vector<UnitSpec> model_of(std::size_t num_layers,
                               const std::vector<ParameterSpec>& parameters) {
  std::vector<UnitSpec> units = {{"model", dense(), /*encloses_units=*/true}};
  for (std::size_t i = 0; i < num_layers; ++i) {
    units.push_back({base::concat("layers.", i), parameters});
  }
  return units;
}

std::vector<UnitSpec> blocks_around_experts(
    std::size_t num_blocks, const std::vector<ParameterSpec>& of_block,
    const std::vector<ParameterSpec>& of_experts) {
  std::vector<UnitSpec> units = {{"model", dense(), /*encloses_units=*/true}};
  for (std::size_t i = 0; i < num_blocks; ++i) {
    const auto name = base::concat("blocks.", i);
    units.push_back({name, of_block, /*encloses_units=*/true});
    units.push_back({name + ".experts", of_experts});
  }
  return units;
}

Program chain_of_blocks(std::size_t num_blocks) {
  return [num_blocks](Layers& layers, const at::Tensor& x) {
    return layers.call(0, x, [&](const auto& parameters, const auto& input) {
      at::Tensor y = input;
      for (std::size_t i = 0; i < num_blocks; ++i) {
        y = call_around(layers, 1 + 2 * i, y, layer());
      }
      return layer()(parameters, y);
    });
  };
}

std::vector<UnitSpec> with_dtypes(std::vector<UnitSpec> units,
                                  at::ScalarType storage,
                                  at::ScalarType compute,
                                  at::ScalarType reduce) {
  for (UnitSpec& unit : units) {
    for (ParameterSpec& parameter : unit.parameters) {
      parameter.storage = storage;
      parameter.compute = compute;
      parameter.reduce = reduce;
    }
  }
  return units;
}

Parameters initial_parameters(const std::vector<UnitSpec>& units,
                              std::uint64_t seed) {
  Parameters all;
  for (const UnitSpec& unit : units) {
    std::vector<at::Tensor> parameters;
    for (const ParameterSpec& parameter : unit.parameters) {
      seed += 1;
      parameters.push_back(
          random(parameter.sizes, seed).mul_(0.5).to(parameter.storage));
    }
    all.push_back(std::move(parameters));
  }
  return all;
}

at::Tensor input_for(const std::vector<UnitSpec>& units, std::int64_t rank,
                     std::uint64_t seed) {
  return random({3, kWidth}, 1000 * seed + static_cast<std::uint64_t>(rank))
      .to(units.at(0).parameters.at(0).compute);
}

at::Tensor loss_of(const at::Tensor& y) { return (y * y).sum(); }

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) {
    return false;
  }
  const auto bytes = [](const at::Tensor& tensor) {
    return tensor.detach().contiguous().view({-1}).view(at::kByte);
  };
  return bytes(a).equal(bytes(b));
}

}  // namespace lowtide::shard
