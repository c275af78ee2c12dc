// What a simulated step runs on: figures, no rules.  lowtide.phantom.machines
// has those of real devices with their sources.
//
// Seconds, bytes per second, floating point operations per second.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <vector>

namespace lowtide::phantom {

// What arithmetic a product runs in; each has a peak of its own.
enum class Rate : std::uint8_t { fp64, fp32, tf32, half, eight_bit };
inline constexpr std::size_t kNumRates = 5;

struct Accelerator {
  std::array<double, kNumRates> peak_flops{};  // dense, by Rate
  double memory_bandwidth = 0;                 // peak
  // The share of those peaks that a kernel reaches.
  double product_efficiency = 1;
  double attention_efficiency = 1;
  double memory_efficiency = 1;
  double kernel_floor = 0;    // no kernel is shorter
  double host_bandwidth = 0;  // of copies from and to the host, each way
  std::int64_t multiprocessors = 1;
  std::int64_t resident_blocks = 2;  // of a kernel, on one multiprocessor
  // How long a block of a kernel runs whose blocks nobody counted.
  double block_seconds = 0;
};

// How collectives are sent, in the terms of NCCL's tuning model: seconds, and
// shares of the links' bandwidth.
struct Protocol {
  double base_latency = 0;         // of a collective
  double hop_in_node = 0;          // of one step to a neighbour
  double hop_beside_network = 0;   // the same where others leave the node
  double hop_between_nodes = 0;    // of a step that does
  double hop_of_lone_ranks = 0;    // where each node has one rank, if longer
  double share_in_node = 1;        // of the bandwidth that is payload
  double share_between_nodes = 1;  // the same where the network takes part
  // Most bandwidth: in one node, of two nodes, of more.
  std::array<double, 3> most{};
  // NCCL takes one more channel for each so many bytes of the buffer; the
  // second of them times the ranks.
  double channel_bytes = 0;
  double channel_bytes_by_ranks = 0;
};

struct Network {
  double bandwidth_in_node = 0;        // of one rank, one direction
  double bandwidth_between_nodes = 0;  // the same: of its network card
  std::int64_t ranks_per_node = 8;
  // The fastest is taken; trees are for all-reduce.
  std::vector<Protocol> rings;
  std::vector<Protocol> trees;
  // Channels of a communicator; one holds a multiprocessor while it runs.
  std::int64_t channels_in_node = 1;
  std::int64_t channels_between_nodes = 1;
  // The same between one rank and another.
  std::int64_t channels_of_pair_in_node = 1;
  std::int64_t channels_of_pair_between_nodes = 1;
  // Most that one channel carries.
  double channel_bandwidth = std::numeric_limits<double>::infinity();
};

// What calls cost the host, in seconds; the caller spends it.
struct Host {
  double launch = 0;        // of a kernel, a copy
  double library_call = 0;  // that launches kernels: a product, a convolution
  double collective = 0;    // NCCL's part of one
  double event = 0;         // its record, a stream's wait
  double graph = 0;         // a launch of it
};

struct Machine {
  Accelerator accelerator;
  Network network;
  Host host;
};

}  // namespace lowtide::phantom
