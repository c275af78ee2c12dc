// The GPUs that the dry driver can stand for, by name.
#pragma once

#include <cstddef>
#include <string_view>

namespace lowtide::dry {

// What a program can ask a GPU for.  Bytes, kHz, bits.
struct Gpu {
  std::string_view key;
  std::string_view name;
  int major;
  int minor;
  double gibibytes;  // as torch reports it
  int multiprocessors;
  int threads;  // of a multiprocessor
  int blocks;   // of a multiprocessor
  int shared_memory;
  int shared_memory_of_block;  // the most that a kernel can ask for
  int l2_cache;
  int clock;
  int memory_clock;
  int bus_width;
  bool peers;  // reads other GPUs of its machine

  // Whole allocation steps of the driver.
  std::size_t memory() const;
};

// Null for a name that is not listed.
const Gpu* gpu_named(std::string_view key);

// "a100-40, a100-80, ..."
std::string_view gpu_names();

// An attribute of cudaDeviceGetAttribute, whose numbers are the driver's; 0 for
// what is not listed, as for a feature that is not there.
int attribute(const Gpu& gpu, int which);

}  // namespace lowtide::dry
