#include "phantom/driver/timekeeper.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "phantom/driver/capture.h"

namespace lowtide::dry {
namespace {

using Lock = std::lock_guard<std::mutex>;
using phantom::EventNumber;
using phantom::TimedStream;
using phantom::Work;

// A library picks a grid that fills the device.
constexpr std::int64_t kFillsTheDevice = 0;

TimedStream number_of(cudaStream_t stream) {
  return static_cast<TimedStream>(reinterpret_cast<std::intptr_t>(stream));
}

// What a captured stream is called when its graph runs.
TimedStream replayed(cudaStream_t stream) { return -number_of(stream) - 1; }

}  // namespace

std::vector<Timekeeper::Operator>& Timekeeper::operators() {
  static thread_local std::vector<Operator> operators;
  return operators;
}

bool Timekeeper::start(const phantom::Machine& machine) {
  const Lock lock(mutex_);
  if (runs()) return false;
  simulation_ = std::make_unique<phantom::Simulation>(machine);
  host_ = machine.host;
  for (const auto& [stream, priority] : priorities_) {
    simulation_->set_priority(number_of(stream), priority);
    simulation_->set_priority(replayed(stream), priority);
  }
  behind_collectives_.clear();
  ++timeline_;
  runs_ = true;
  return true;
}

phantom::Simulation* Timekeeper::stop() {
  const Lock lock(mutex_);
  if (runs()) simulation_->finish();
  runs_ = false;
  return simulation_.get();
}

void Timekeeper::prioritize(cudaStream_t stream, int priority) {
  const Lock lock(mutex_);
  priorities_[stream] = priority;
  if (!runs()) return;
  simulation_->set_priority(number_of(stream), priority);
  simulation_->set_priority(replayed(stream), priority);
}

std::string_view Timekeeper::interned(std::string_view name) {
  const auto found = names_.find(name);
  return found != names_.end() ? *found : *names_.emplace(name).first;
}

bool Timekeeper::is_captured(cudaStream_t stream) const {
  return capturing_ != nullptr && capture().id(stream) != 0;
}

void Timekeeper::enter(std::string_view name) {
  if (!runs()) return;
  const Lock lock(mutex_);
  operators().push_back({interned(name), {}});
}

// An operator that began before the timeline is unknown and has told nothing.
void Timekeeper::leave(const Work& work) {
  if (operators().empty()) return;
  const auto ended = std::move(operators().back());
  operators().pop_back();
  if (!runs()) return;
  const Lock lock(mutex_);
  double shares = 0;
  std::int64_t libraries = 0;
  for (const auto& kernel : ended.kernels) {
    shares += kernel.share;
    libraries += kernel.is_library ? 1 : 0;
  }
  for (const auto& kernel : ended.kernels) {
    Work part = work;
    part.bytes *= kernel.share / shares;
    if (libraries > 0) {
      part.flops =
          kernel.is_library ? work.flops / static_cast<double>(libraries) : 0;
    } else {
      part.flops *= kernel.share / shares;
    }
    tell(kernel, part);
  }
}

void Timekeeper::tell(const Open& kernel, const Work& work) {
  if (const auto* ticket = std::get_if<phantom::Ticket>(&kernel.place)) {
    simulation_->tell(*ticket, work);
    return;
  }
  const auto node = std::get<std::size_t>(kernel.place);
  if (capturing_ == nullptr || node >= capturing_->nodes.size()) return;
  std::get<Kernel>(capturing_->nodes[node].what).work = work;
}

void Timekeeper::launch(cudaStream_t stream, std::string_view name,
                        std::int64_t blocks, bool is_library) {
  simulation_->spend(is_library ? host_.library_call : host_.launch);
  behind_collectives_.erase(stream);
  auto& running = operators();
  const auto shown = running.empty() ? interned(name) : running.back().name;
  Open open{.place = {},
            .share = static_cast<double>(std::max<std::int64_t>(blocks, 1)),
            .is_library = is_library};
  if (is_captured(stream)) {
    open.place = capturing_->nodes.size();
    capturing_->nodes.push_back({stream, Kernel{shown, blocks}});
  } else {
    open.place = simulation_->kernel(number_of(stream), shown, blocks);
  }
  if (!running.empty()) running.back().kernels.push_back(open);
}

void Timekeeper::kernel(cudaStream_t stream, std::string_view name,
                        std::int64_t blocks) {
  if (!runs()) return;
  const Lock lock(mutex_);
  launch(stream, name, blocks, /*is_library=*/false);
}

void Timekeeper::product(cudaStream_t stream, std::string_view name) {
  if (!runs()) return;
  const Lock lock(mutex_);
  launch(stream, name, kFillsTheDevice, /*is_library=*/true);
}

void Timekeeper::move(cudaStream_t stream, std::string_view name,
                      double bytes) {
  if (!runs()) return;
  const Lock lock(mutex_);
  enqueue({stream, Kernel{interned(name), 0, {.bytes = bytes}}}, host_.launch);
}

void Timekeeper::transfer(cudaStream_t stream, phantom::Direction direction,
                          double bytes) {
  if (!runs()) return;
  const Lock lock(mutex_);
  enqueue({stream, Transfer{direction, bytes}}, host_.launch);
}

void Timekeeper::collective(cudaStream_t stream, std::int64_t communicator,
                            std::string_view name,
                            const phantom::CollectiveCost& cost) {
  if (!runs()) return;
  const Lock lock(mutex_);
  enqueue({stream, Collective{communicator, interned(name), cost}},
          host_.collective);
  behind_collectives_.insert(stream);
}

void Timekeeper::enqueue(const Node& node, double seconds) {
  simulation_->spend(seconds);
  behind_collectives_.erase(node.stream);
  if (is_captured(node.stream)) {
    capturing_->nodes.push_back(node);
    return;
  }
  std::vector<EventNumber> none;
  play(node, number_of(node.stream), none);
}

const phantom::Network& Timekeeper::network() const {
  return simulation_->machine().network;
}

Moment Timekeeper::record(cudaStream_t stream) {
  if (!runs()) return {};
  const Lock lock(mutex_);
  simulation_->spend(host_.event);
  if (is_captured(stream)) {
    const auto number = capturing_->num_records++;
    capturing_->nodes.push_back({stream, Record{number}});
    return {timeline_, number, /*in_graph=*/true};
  }
  return {timeline_, simulation_->record(number_of(stream)), /*in_graph=*/false,
          behind_collectives_.count(stream) > 0};
}

bool Timekeeper::has_reached(const Moment& moment) {
  if (!runs() || moment.timeline != timeline_ || moment.in_graph) return true;
  const Lock lock(mutex_);
  simulation_->spend(host_.event);
  return simulation_->time_of(moment.number) <= simulation_->host();
}

void Timekeeper::wait(cudaStream_t stream, const Moment& moment) {
  if (!runs() || moment.timeline != timeline_) return;
  const Lock lock(mutex_);
  simulation_->spend(host_.event);
  if (moment.in_graph) {
    if (is_captured(stream)) {
      capturing_->nodes.push_back({stream, Wait{moment.number}});
    }
    return;
  }
  simulation_->wait(number_of(stream), moment.number);
}

void Timekeeper::synchronize(const Moment& moment) {
  if (!runs() || moment.timeline != timeline_ || moment.in_graph) return;
  const Lock lock(mutex_);
  simulation_->synchronize_event(moment.number);
}

void Timekeeper::synchronize(cudaStream_t stream) {
  if (!runs()) return;
  const Lock lock(mutex_);
  simulation_->synchronize_stream(number_of(stream));
}

void Timekeeper::synchronize_all() {
  if (!runs()) return;
  const Lock lock(mutex_);
  simulation_->synchronize_all();
}

std::optional<double> Timekeeper::seconds_between(const Moment& from,
                                                  const Moment& to) {
  if (!runs() || from.timeline != timeline_ || to.timeline != timeline_ ||
      from.in_graph || to.in_graph) {
    return std::nullopt;
  }
  const Lock lock(mutex_);
  return simulation_->time_of(to.number) - simulation_->time_of(from.number);
}

std::int64_t Timekeeper::probe() {
  if (!runs()) return 0;
  const Lock lock(mutex_);
  return simulation_->record(0);
}

void Timekeeper::mark(std::string phase) {
  if (!runs()) return;
  const Lock lock(mutex_);
  simulation_->mark(std::move(phase), 0);
}

void Timekeeper::begin_graph(cudaStream_t origin) {
  if (!runs()) return;
  const Lock lock(mutex_);
  capturing_ = std::make_unique<Graph>();
  capturing_->origin = origin;
}

void Timekeeper::end_graph(cudaGraph_t graph) {
  const Lock lock(mutex_);
  if (capturing_ == nullptr) return;
  graphs_[graph] = std::shared_ptr<const Graph>(std::move(capturing_));
}

void Timekeeper::instantiate(cudaGraphExec_t exec, cudaGraph_t graph) {
  const Lock lock(mutex_);
  const auto found = graphs_.find(graph);
  if (found != graphs_.end()) launchable_[exec] = found->second;
}

void Timekeeper::forget(cudaGraphExec_t exec) {
  const Lock lock(mutex_);
  launchable_.erase(exec);
}

void Timekeeper::play(cudaGraphExec_t exec, cudaStream_t stream) {
  if (!runs()) return;
  const Lock lock(mutex_);
  simulation_->spend(host_.graph);
  const auto found = launchable_.find(exec);
  if (found == launchable_.end()) return;
  const Graph& graph = *found->second;
  std::vector<EventNumber> events(static_cast<std::size_t>(graph.num_records));
  for (const Node& node : graph.nodes) {
    const bool is_origin = node.stream == graph.origin;
    play(node, is_origin ? number_of(stream) : replayed(node.stream), events);
  }
}

void Timekeeper::play(const Node& node, TimedStream stream,
                      std::vector<EventNumber>& events) {
  std::visit(
      [&](const auto& what) {
        using What = std::decay_t<decltype(what)>;
        if constexpr (std::is_same_v<What, Kernel>) {
          simulation_->tell(simulation_->kernel(stream, what.name, what.blocks),
                            what.work);
        } else if constexpr (std::is_same_v<What, Transfer>) {
          simulation_->transfer(stream, "transfer", what.bytes, what.direction);
        } else if constexpr (std::is_same_v<What, Collective>) {
          simulation_->collective(stream, what.communicator, what.name,
                                  what.cost);
        } else if constexpr (std::is_same_v<What, Record>) {
          events[static_cast<std::size_t>(what.number)] =
              simulation_->record(stream);
        } else {
          simulation_->wait(stream,
                            events[static_cast<std::size_t>(what.number)]);
        }
      },
      node.what);
}

Timekeeper& timekeeper() {
  // Streams and events are used until the process ends.
  static auto* keeper = std::make_unique<Timekeeper>().release();
  return *keeper;
}

}  // namespace lowtide::dry
