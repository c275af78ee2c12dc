// What the ranks of a root must have in common, compared between their hosts:
// which calls they made (step_log.h), and numbers that decisions about calls
// are made from.
//
// [Note: Whose numbers decide]
// Units of a root may be on several meshes, experts on another than the rest.
// There is one order over the calls of all of them, so what moves a call is
// what all ranks have in common that a root's meshes connect: those of this
// rank's meshes, of the meshes of these, and so on.  One channel is over them
// all, and every number that moves a call travels on it, whichever mesh its
// unit is on.  Who has gradients is of the unit's own ranks, has a channel over
// them, and moves none.
//
// Where ranks are not compared, rank 0's first numbers stay, and nothing that
// one rank does later moves a call; a rank whose meshes are all of one rank, or
// fake, has nothing to agree on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/host_channel.h"
#include "shard/step_log.h"
#include "shard/units.h"

namespace lowtide::shard {

class RankComparison {
 public:
  // `units`: by number, null for those that died; outlives it.
  RankComparison(std::string root, const Units& units);

  // The units are known.  `everyone`: over all ranks that their meshes connect;
  // null: ranks are not compared.
  void begin(std::shared_ptr<comm::HostChannel> everyone);
  StepLog& log() { return log_; }
  const StepLog& log() const { return log_; }
  bool compares() const { return log_.compares(); }

  // Settings and frozen parameters that have changed since they were noted.
  // What a module shows says what a forward records, and what is frozen behind
  // it ignores its gradient: noted ahead of both.
  void note_settings();
  void note_frozen();
  // Sends what this rank did and what its numbers are.  Does not block.
  void ask();
  // The same at the end of a backward, where there are units that
  // [Note: Who has gradients] is about: of which parameters they are.
  void ask_who_has_gradients();
  // Waits for what was asked and tells units what is true of all ranks.  Throws
  // lowtide::Error on every rank where they differ, having forgotten it.
  void require();

 private:
  void agree_without_comparison();
  // Whether who has gradients of that unit travels on that channel.
  bool is_of(std::size_t channel, std::int32_t number) const;
  StepLog::Numbers numbers_of(std::size_t channel, std::int32_t number,
                              bool at_end);
  void agreed(std::size_t channel, std::int32_t number,
              const StepLog::Numbers& greatest);

  const Units& units_;
  StepLog log_;
  // By unit, as noted last.
  std::vector<std::uint64_t> settings_;
  std::vector<std::uint64_t> frozen_;
  std::vector<bool> of_everyone_;  // its ranks are all that there are
  std::vector<std::size_t> num_gradient_numbers_;  // that travel
  bool numbers_agreed_ = false;
};

}  // namespace lowtide::shard
