// NCCL's communicators: which ranks of the world each is of.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace lowtide::dry {

// What the program knows of a group of ranks and NCCL does not.
struct Group {
  std::string name;                 // the same on each of its ranks
  std::vector<std::int64_t> ranks;  // of the world, by rank in the group
};

struct Communicator {
  std::int64_t number = 0;  // from 1 on, in the order they were made
  int rank = 0;
  int size = 0;
  Group group;  // ranks 0 to size - 1 without a name where nobody named it
  // Differs from 0 where all ranks are devices of this process, who share it.
  std::int64_t clique = 0;
};

// Thread-safe.
class Communicators {
 public:
  // Of the communicators made from `id`, or of the next one that the calling
  // thread splits off.
  void name(const ncclUniqueId& id, Group group);
  static void name_split(Group group);

  Communicator add(const ncclUniqueId& id, int rank, int size);
  // Between devices of this process.
  std::int64_t new_clique();
  Communicator add_local(std::int64_t clique, int rank, int size);
  // Of an unnamed part as many ranks as the whole has: NCCL learns the size
  // from ranks that are not there.
  Communicator split(const Communicator& whole);

  // Throws std::out_of_range for what is no communicator.
  Communicator of(ncclComm_t handle) const;
  static ncclComm_t handle_of(const Communicator& communicator);

  // A line each: number, rank, size, ranks of the world, name.
  std::string lines() const;

 private:
  Communicator keep(Communicator communicator);

  mutable std::mutex mutex_;
  std::vector<Communicator> communicators_;  // by number - 1
  std::map<std::string, Group> groups_;      // by unique id
  std::int64_t last_clique_ = 0;
};

Communicators& communicators();

// Differs from those of every process of this machine.
ncclUniqueId new_unique_id();

}  // namespace lowtide::dry
