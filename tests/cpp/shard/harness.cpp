#include "harness.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <map>

#include "base/check.h"

namespace lowtide::shard {
namespace {

using device::Access;
using device::Stream;

std::vector<ParameterInfo> infos_of(const UnitSpec& unit) {
  std::vector<ParameterInfo> infos;
  for (const ParameterSpec& parameter : unit.parameters) {
    infos.push_back({base::concat(unit.name, ".p", infos.size()),
                     parameter.sizes, parameter.storage, parameter.compute,
                     parameter.reduce});
  }
  return infos;
}

}  // namespace

class Rank::View final : public ModuleView {
 public:
  View(Rank& rank, std::string unit) : rank_(rank), unit_(std::move(unit)) {}
  void show_full() override { shown = true; }
  void show_shards() override { shown = false; }
  std::vector<at::Tensor> wrap_gradients(
      const std::vector<std::int32_t>& /*parameters*/,
      const std::vector<at::Tensor>& locals) override {
    if (rank_.on_wrap) rank_.on_wrap(unit_);
    return locals;
  }
  at::Tensor local_gradient(std::int32_t /*parameter*/,
                            const at::Tensor& gradient) override {
    return gradient;
  }
  bool shown = false;

 private:
  Rank& rank_;
  std::string unit_;
};

Rank::Rank(Exchange& exchange, std::int64_t rank,
           const std::vector<UnitSpec>& units, bool offloaded, bool compared)
    : runtime(std::make_shared<device::ScriptedRuntime>()),
      waits(std::make_shared<SkippingRuntime>(runtime)),
      ledger(std::make_shared<memory::Ledger>()),
      memory(std::make_shared<memory::DeviceMemory>(waits, ledger)),
      pool(std::make_shared<memory::PinnedPool>(
          waits, std::make_shared<memory::Ledger>(),
          std::numeric_limits<std::int64_t>::max())),
      collectives(std::make_shared<RankCollectives>(exchange, rank, runtime)),
      root(std::make_shared<Root>("model", memory)),
      specs_(units) {
  const Parameters initial = initial_parameters(units);
  const auto host =
      offloaded ? std::make_shared<memory::HostMemory>(waits, pool, true)
                : nullptr;
  const auto everyone = compared ? exchange.hosts().rank(rank) : nullptr;
  const UnitGroups groups{collectives, collectives, everyone};
  std::map<std::int64_t, std::shared_ptr<comm::HostChannel>> some_hosts;
  for (std::size_t u = 0; u < units.size(); ++u) {
    auto settings = std::make_shared<UnitSettings>();
    settings->host = host;
    auto of_unit = groups;
    if (units[u].ranks > 0) {
      of_unit.gather = of_unit.reduce =
          std::make_shared<comm::RecordingCollectives>(rank, units[u].ranks,
                                                       runtime);
    }
    if (const auto size = units[u].hosts; compared && size > 0) {
      auto& hosts = some_hosts[size];
      if (!hosts) {
        hosts = exchange.hosts(rank / size * size, size).rank(rank % size);
      }
      of_unit.host = hosts;
    }
    auto unit =
        std::make_shared<Unit>(units[u].name, infos_of(units[u]),
                               std::move(of_unit), memory, std::move(settings));
    unit->settings().encloses_units = units[u].encloses_units;
    unit->settings().leaf_module = units[u].leaf_module;
    std::vector<at::Tensor> shards;
    std::vector<at::Tensor> leaves;
    for (std::size_t p = 0; p < units[u].parameters.size(); ++p) {
      const bool trainable = units[u].parameters[p].trainable;
      unit->parameters().buffers().load_full(p, initial[u][p]);
      shards.push_back(
          unit->parameters().buffers().local_shard(p).set_requires_grad(
              trainable));
      leaves.push_back(
          unit->parameters().buffers().full(p).detach().set_requires_grad(
              trainable));
      if (!trainable) continue;
      leaves.back().register_hook([this](const at::Tensor& gradient) {
        if (gradient.defined() && gradient.is_contiguous()) {
          runtime->touches(Stream::compute, gradient.const_data_ptr(),
                           gradient.nbytes(), Access::write);
        }
        return gradient;
      });
    }
    auto view = std::make_unique<View>(*this, units[u].name);
    views_.push_back(view.get());
    unit->attach(shards, leaves, std::move(view));
    units_.push_back(std::move(unit));
    shards_.push_back(std::move(shards));
    leaves_.push_back(std::move(leaves));
  }
  root->adopt(units_, everyone);
  watch_ = runtime->watch_torch_allocations();
}

Rank::~Rank() = default;

void Rank::kernel(const std::string& what, std::size_t u) {
  const std::string name = base::concat(what, " ", specs_[u].name);
  if (on_kernel) on_kernel(name);
  runtime->mark(Stream::compute, name);
  const device::ScriptedRuntime::Label label(name);
  for (std::size_t p = 0; p < leaves_[u].size(); ++p) {
    const at::Tensor& full = units_[u]->parameters().buffers().full(p);
    // Of a leaf module backward may need nothing.
    if (specs_[u].leaf_module && data_or_null(full.storage()) == nullptr)
      continue;
    runtime->touches(Stream::compute, full.const_data_ptr(), full.nbytes(),
                     Access::read);
  }
}

at::Tensor Rank::call(std::size_t u, const at::Tensor& x, const Body& body) {
  Unit& unit = *units_[u];
  unit.pre_forward();
  at::Tensor input = x;
  if (at::GradMode::is_enabled() && x.requires_grad()) {
    input = unit.watch_forward_inputs({x})[0];
    input.register_hook([this, u](const at::Tensor& gradient) {
      kernel("backward end", u);
      return gradient;
    });
  }
  kernel("forward", u);
  const at::Tensor y = body(leaves_[u], input);
  if (!y.requires_grad()) {
    unit.post_forward({});
    return y;
  }
  unit.post_forward({y});
  y.register_hook([this, u](const at::Tensor& gradient) {
    kernel("backward", u);
    return gradient;
  });
  return y;
}

void Rank::load(const Parameters& parameters) {
  for (std::size_t u = 0; u < units_.size(); ++u) {
    for (std::size_t p = 0; p < shards_[u].size(); ++p) {
      units_[u]->parameters().buffers().load_full(p, parameters[u][p]);
    }
  }
}

void Rank::optimize() {
  const device::ScriptedRuntime::Label label("optimizer");
  for (const auto& shards : shards_) {
    for (const at::Tensor& shard : shards) {
      const at::Tensor& gradient = shard.grad();
      if (!gradient.defined()) continue;
      runtime->touches(Stream::compute, gradient.const_data_ptr(),
                       gradient.nbytes(), Access::read);
      runtime->touches(Stream::compute, shard.const_data_ptr(), shard.nbytes(),
                       Access::write);
      shard::optimize(shard, gradient);
    }
  }
}

void Rank::zero_grad() {
  for (const auto& shards : shards_) {
    for (const at::Tensor& shard : shards) shard.mutable_grad().reset();
  }
}

void stand_in_pairs(Rank& rank) {
  for (std::size_t first = 1; first + 1 < rank.size(); first += 2) {
    rank.unit(first).settings().beside = {
        rank.unit(first + 1).weak_from_this()};
    rank.unit(first + 1).settings().beside = {
        rank.unit(first).weak_from_this()};
  }
}

Scenario with_bystander(Scenario scenario) {
  scenario.units.push_back(
      {.name = "bystander",
       .parameters = {{.sizes = {kWidth}, .trainable = false}},
       .ranks = 128});
  return scenario;
}

void Rank::set_sync(bool sync) {
  for (const auto& unit : units_) unit->settings().gradient_sync = sync;
}

void Rank::drop(std::size_t u) {
  units_.erase(units_.begin() + static_cast<std::ptrdiff_t>(u));
  views_.erase(views_.begin() + static_cast<std::ptrdiff_t>(u));
  shards_.erase(shards_.begin() + static_cast<std::ptrdiff_t>(u));
  leaves_.erase(leaves_.begin() + static_cast<std::ptrdiff_t>(u));
  specs_.erase(specs_.begin() + static_cast<std::ptrdiff_t>(u));
}

at::Tensor Rank::rows_of(std::size_t u, std::size_t p,
                         const at::Tensor& full) const {
  const auto& slice = units_[u]->parameters().buffers().slice(p);
  const std::int64_t first = std::min(rank() * slice.padded_rows, slice.rows);
  return full.narrow(0, first, slice.local_rows(rank()));
}

bool Rank::shown(std::size_t u) const { return views_[u]->shown; }

template <typename Pick>
std::string Rank::difference(const Parameters& full, Pick pick) const {
  for (std::size_t u = 0; u < units_.size(); ++u) {
    for (std::size_t p = 0; p < shards_[u].size(); ++p) {
      const at::Tensor& found = pick(shards_[u][p]);
      const at::Tensor& expected = full[u][p];
      const std::string where =
          base::concat(specs_[u].name, ".p", p, " of rank ", rank());
      if (found.defined() != expected.defined()) {
        return base::concat(where, found.defined()
                                       ? ": expected none"
                                       : ": expected one, got none");
      }
      if (!found.defined()) continue;
      const at::Tensor rows = rows_of(u, p, expected);
      if (!same_bits(found, rows)) {
        return base::concat(where, ": expected\n", rows, "\ngot\n", found);
      }
    }
  }
  return "";
}

std::string Rank::gradient_difference(const Parameters& full) const {
  return difference(full, [](const at::Tensor& shard) -> const at::Tensor& {
    return shard.grad();
  });
}

std::string Rank::parameter_difference(const Parameters& full) const {
  return difference(
      full, [](const at::Tensor& shard) -> const at::Tensor& { return shard; });
}

std::string Rank::unrest() const {
  for (std::size_t u = 0; u < units_.size(); ++u) {
    if (units_[u]->parameters().state() != UnitState::sharded) {
      return base::concat(specs_[u].name, " is ",
                          state_name(units_[u]->parameters().state()));
    }
    if (views_[u]->shown) return specs_[u].name + " shows full parameters";
  }
  using memory::Category;
  for (const Category category : {Category::gathered, Category::gather_input,
                                  Category::gradient_stream}) {
    if (live(category) != 0) {
      return base::concat(live(category), " bytes of ",
                          memory::category_name(category), " are live");
    }
  }
  return "";
}

std::int64_t Rank::live(memory::Category category) const {
  return ledger->live()[static_cast<std::size_t>(category)];
}

std::int64_t Rank::peak(memory::Category category) const {
  return ledger->peak()[static_cast<std::size_t>(category)];
}

std::vector<at::Tensor> run_step(Rank& rank, const Scenario& scenario,
                                 int step) {
  std::vector<at::Tensor> losses;
  for (std::size_t m = 0; m < scenario.sync.size(); ++m) {
    rank.set_sync(scenario.sync[m]);
    const at::Tensor loss = loss_of(
        scenario.program(rank, input_of(scenario, rank.rank(), step, m)));
    loss.backward();
    losses.push_back(loss.detach());
  }
  return losses;
}

void expect_naive_bits(const Scenario& scenario, std::int64_t world_size,
                       const std::function<void(Rank& rank)>& prepare) {
  const std::vector<NaiveStep> expected = train_naively(scenario, world_size);
  run_ranks(world_size, [&](Exchange& exchange, std::int64_t r) {
    Rank rank(exchange, r, scenario.units, scenario.offloaded,
              scenario.compared);
    if (prepare) prepare(rank);
    for (int step = 0; step < scenario.num_steps; ++step) {
      const auto losses = run_step(rank, scenario, step);
      for (std::size_t m = 0; m < losses.size(); ++m) {
        EXPECT_TRUE(same_bits(losses[m], expected[step].losses[r][m]))
            << "loss of rank " << r << ", step " << step << ": " << losses[m]
            << " instead of " << expected[step].losses[r][m];
      }
      EXPECT_EQ(rank.gradient_difference(expected[step].gradients), "")
          << "step " << step;
      rank.optimize();
      rank.zero_grad();
      EXPECT_EQ(rank.parameter_difference(expected[step].parameters), "");
      EXPECT_EQ(rank.unrest(), "");
    }
    EXPECT_THAT(rank.runtime->violations(), testing::IsEmpty());
  });
}

}  // namespace lowtide::shard
