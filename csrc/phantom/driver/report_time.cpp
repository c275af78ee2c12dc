// What programs ask of the dry driver's clock
// (lowtide/phantom/dry/timekeeper.py).
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "phantom/driver/timekeeper.h"
#include "phantom/time/exposure.h"

#define LOWTIDE_DRY_API __attribute__((visibility("default")))

using namespace lowtide::dry;
using lowtide::phantom::Machine;
using lowtide::phantom::Protocol;
using lowtide::phantom::Work;

namespace {

// Reads figures one after the other, in the order in which
// lowtide.phantom.machines.flat writes them.
class Figures {
 public:
  explicit Figures(const double* next) : next_(next) {}

  double number() { return *next_++; }
  std::int64_t count() { return static_cast<std::int64_t>(number()); }

 private:
  const double* next_;
};

Protocol protocol_of(Figures& figures) {
  Protocol protocol;
  for (double* figure :
       {&protocol.base_latency, &protocol.hop_in_node,
        &protocol.hop_beside_network, &protocol.hop_between_nodes,
        &protocol.share_in_node, &protocol.share_between_nodes}) {
    *figure = figures.number();
  }
  for (double& most : protocol.most) most = figures.number();
  return protocol;
}

Machine machine_of(Figures figures) {
  Machine machine;
  auto& accelerator = machine.accelerator;
  for (double& peak : accelerator.peak_flops) peak = figures.number();
  for (double* figure :
       {&accelerator.memory_bandwidth, &accelerator.product_efficiency,
        &accelerator.attention_efficiency, &accelerator.memory_efficiency,
        &accelerator.kernel_floor, &accelerator.host_bandwidth,
        &accelerator.block_seconds}) {
    *figure = figures.number();
  }
  accelerator.multiprocessors = figures.count();
  accelerator.resident_blocks = figures.count();
  auto& network = machine.network;
  for (double* figure :
       {&network.bandwidth_in_node, &network.bandwidth_between_nodes,
        &network.channel_bandwidth}) {
    *figure = figures.number();
  }
  for (std::int64_t* figure :
       {&network.ranks_per_node, &network.channels_in_node,
        &network.channels_between_nodes, &network.channels_of_pair_in_node,
        &network.channels_of_pair_between_nodes}) {
    *figure = figures.count();
  }
  for (auto* protocols : {&network.rings, &network.trees}) {
    const auto count = figures.count();
    for (std::int64_t i = 0; i < count; ++i) {
      protocols->push_back(protocol_of(figures));
    }
  }
  auto& host = machine.host;
  for (double* figure : {&host.launch, &host.library_call, &host.collective,
                         &host.event, &host.graph}) {
    *figure = figures.number();
  }
  return machine;
}

}  // namespace

extern "C" {

struct lowtide_dry_span {
  std::int64_t kind;  // phantom::SpanKind
  std::int64_t stream;
  double begin, end, issued, flops, bytes;
  const char* name;
};

LOWTIDE_DRY_API int lowtide_dry_keeps_time() { return timekeeper().runs(); }
// False while time is kept already.
LOWTIDE_DRY_API int lowtide_dry_start_time(const double* figures) {
  return timekeeper().start(machine_of(Figures(figures)));
}
LOWTIDE_DRY_API void lowtide_dry_stop_time() { timekeeper().stop(); }
LOWTIDE_DRY_API void lowtide_dry_mark_phase(const char* name) {
  timekeeper().mark(name);
}
// A moment on the default stream, whose time can be asked for at any time.
LOWTIDE_DRY_API std::int64_t lowtide_dry_record_moment() {
  return timekeeper().probe();
}
LOWTIDE_DRY_API double lowtide_dry_time_of(std::int64_t moment) {
  auto* kept = timekeeper().kept();
  return kept == nullptr ? 0 : kept->time_of(moment);
}

// The calling thread's operators: [Note: Time of operators].
LOWTIDE_DRY_API void lowtide_dry_enter_operator(const char* name) {
  timekeeper().enter(name);
}
LOWTIDE_DRY_API void lowtide_dry_leave_operator(double flops, double bytes,
                                                int rate, int is_attention) {
  timekeeper().leave({flops, bytes, static_cast<lowtide::phantom::Rate>(rate),
                      is_attention != 0});
}

// Of the timeline that ended last; valid until the next call.
LOWTIDE_DRY_API std::int64_t lowtide_dry_read_spans(
    const lowtide_dry_span** spans) {
  static std::vector<lowtide_dry_span> read;
  read.clear();
  if (const auto* kept = timekeeper().kept()) {
    for (const auto& span : kept->spans()) {
      read.push_back({static_cast<std::int64_t>(span.kind), span.stream,
                      span.begin, span.end, span.issued, span.flops, span.bytes,
                      span.name.data()});
    }
  }
  *spans = read.data();
  return static_cast<std::int64_t>(read.size());
}
// Names are in `names`, one behind the other, each with its zero.
LOWTIDE_DRY_API std::int64_t lowtide_dry_read_phases(const double** begins,
                                                     const char** names) {
  static std::vector<double> times;
  static std::string text;
  times.clear();
  text.clear();
  if (const auto* kept = timekeeper().kept()) {
    for (const auto& mark : kept->marks()) {
      times.push_back(mark.begin);
      text += mark.phase;
      text += '\0';
    }
  }
  *begins = times.data();
  *names = text.c_str();
  return static_cast<std::int64_t>(times.size());
}
// Seven figures, in the order of phantom::Usage.
LOWTIDE_DRY_API void lowtide_dry_usage(double begin, double end,
                                       std::int64_t compute, double* figures) {
  const auto* kept = timekeeper().kept();
  if (kept == nullptr) return;
  const auto found =
      lowtide::phantom::usage(kept->spans(), compute, begin, end);
  for (const double figure :
       {found.seconds, found.compute, found.other_kernels, found.communication,
        found.exposed, found.other_waits, found.idle}) {
    *figures++ = figure;
  }
}

}  // extern "C"
