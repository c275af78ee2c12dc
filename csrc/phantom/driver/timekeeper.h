// The time of the device, while a program asks for it: whatever the device is
// told to do is told to csrc/phantom/time, too.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "phantom/time/simulation.h"

namespace lowtide::dry {

// Where an event lies on a timeline, or in the graph that is being captured.
struct Moment {
  std::uint64_t timeline = 0;  // 0: on none, which is over and never waited for
  std::int64_t number = 0;
  bool in_graph = false;
  bool is_of_collective = false;  // nothing lies between the two
};

// While no time is kept, each call is one read of a flag.  Thread-safe.
//
// [Note: Time of operators]
// What an operator's kernels do is known when it ends: the observer tells the
// calling thread of its beginning and, at its end, of its work, which is spread
// over the kernels that it launched itself.  FLOPs go to calls of libraries
// where there are some, bytes by the number of blocks.
class Timekeeper {
 public:
  bool runs() const { return runs_.load(std::memory_order_relaxed); }

  // From time 0 on.  False while one runs already.
  bool start(const phantom::Machine& machine);
  // Ends it.  The simulation is kept until the next start; null without one.
  phantom::Simulation* stop();
  phantom::Simulation* kept() { return simulation_.get(); }

  // As CUDA has it: a lower number is more urgent.  At any time.
  void prioritize(cudaStream_t stream, int priority);

  // The calling thread's operators; `name` is copied.
  void enter(std::string_view name);
  void leave(const phantom::Work& work);

  // -- work of streams, in the order of the calls
  // -------------------------------
  void kernel(cudaStream_t stream, std::string_view name, std::int64_t blocks);
  // A library's computation, which fills the device.
  void product(cudaStream_t stream, std::string_view name);
  // A kernel that does nothing but read and write `bytes`.
  void move(cudaStream_t stream, std::string_view name, double bytes);
  void transfer(cudaStream_t stream, phantom::Direction direction,
                double bytes);
  void collective(cudaStream_t stream, std::int64_t communicator,
                  std::string_view name, const phantom::CollectiveCost& cost);
  // Figures that collectives' costs are computed from; while time is kept.
  const phantom::Network& network() const;

  // -- events and waits
  // ---------------------------------------------------------
  Moment record(cudaStream_t stream);
  void wait(cudaStream_t stream, const Moment& moment);
  // Asking costs the host what an event does.
  bool has_reached(const Moment& moment);
  void synchronize(const Moment& moment);
  void synchronize(cudaStream_t stream);
  void synchronize_all();
  // None where one of them lies on no timeline that is kept.
  std::optional<double> seconds_between(const Moment& from, const Moment& to);
  // A moment on the default stream that costs the host nothing.
  std::int64_t probe();
  void mark(std::string phase);

  // -- graphs
  // ------------------------------------------------------------------- What
  // captured streams are told goes into the graph and takes time whenever the
  // graph is launched.
  void begin_graph(cudaStream_t origin);
  void end_graph(cudaGraph_t graph);
  void instantiate(cudaGraphExec_t exec, cudaGraph_t graph);
  void play(cudaGraphExec_t exec, cudaStream_t stream);
  void forget(cudaGraphExec_t exec);

 private:
  struct Kernel {
    std::string_view name;
    std::int64_t blocks = 0;
    phantom::Work work = {};
  };
  struct Transfer {
    phantom::Direction direction;
    double bytes = 0;
  };
  struct Collective {
    std::int64_t communicator = 0;
    std::string_view name;
    phantom::CollectiveCost cost;
  };
  struct Record {
    std::int64_t number = 0;
  };
  struct Wait {
    std::int64_t number = 0;
  };
  struct Node {
    cudaStream_t stream = nullptr;
    std::variant<Kernel, Transfer, Collective, Record, Wait> what;
  };
  struct Graph {
    cudaStream_t origin = nullptr;
    std::vector<Node> nodes;
    std::int64_t num_records = 0;
  };
  // A kernel whose work is not known yet.
  struct Open {
    std::variant<phantom::Ticket, std::size_t> place;  // or a node's number
    double share = 1;                                  // of bytes
    bool is_library = false;
  };
  struct Operator {
    std::string_view name;
    std::vector<Open> kernels;
  };
  static std::vector<Operator>& operators();

  std::string_view interned(std::string_view name);
  bool is_captured(cudaStream_t stream) const;
  void launch(cudaStream_t stream, std::string_view name, std::int64_t blocks,
              bool is_library);
  // What is known as a whole; the host spends these seconds on it.
  void enqueue(const Node& node, double seconds);
  void tell(const Open& kernel, const phantom::Work& work);
  void play(const Node& node, phantom::TimedStream stream,
            std::vector<phantom::EventNumber>& events);

  std::atomic<bool> runs_ = false;
  std::mutex mutex_;
  std::uint64_t timeline_ = 0;
  std::unique_ptr<phantom::Simulation> simulation_;
  phantom::Host host_;
  std::set<std::string, std::less<>> names_;  // outlive every timeline
  std::map<cudaStream_t, int> priorities_;
  std::set<cudaStream_t> behind_collectives_;  // whose last work is one
  std::unique_ptr<Graph> capturing_;
  std::map<cudaGraph_t, std::shared_ptr<const Graph>> graphs_;
  std::map<cudaGraphExec_t, std::shared_ptr<const Graph>> launchable_;
};

Timekeeper& timekeeper();

}  // namespace lowtide::dry
