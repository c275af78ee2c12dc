// What a root's units asked of the ranks, in order: the same on all of them, or
// they mix different weights.
//
// Every call and every setting that decides about calls is noted.  A running
// hash of the notes is compared over the ranks once behind a forward and once
// behind a backward, on the host and beside the device's communicators: a
// forward's before its backward begins, a backward's before its gradients
// become `.grad`.  Where hashes differ the notes since the last comparison are
// exchanged and every rank throws, naming the first that differs.
//
// With the hashes travel numbers that the ranks may differ in and decisions are
// made from: what all ranks know is the greatest.
//
// The first channel is over all ranks that the root's units have.  Further ones
// are over some of those, and only asked where that is said.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/host_channel.h"

namespace lowtide::shard {

struct StepNote {
  enum class What : std::uint8_t {
    forward,  // that autograd records
    gather,
    rows,       // a gather of some rows
    reduce,     // value: which chunk
    sum,        // over replicas
    backward,   // of a call begins
    trainable,  // value: a hash of which parameters are
    settings,   // value: a hash of them
  };
  // By kind, for logs.
  static constexpr std::array<const char*, 8> kKinds = {
      "forward", "gather",   "rows",      "reduce",
      "sum",     "backward", "trainable", "settings"};
  What what = What::gather;
  std::int32_t unit = -1;  // -1: the root
  std::int64_t value = 0;
  friend bool operator==(const StepNote&, const StepNote&) = default;
};

class StepLog {
 public:
  using NameOf = std::function<std::string(std::int32_t unit)>;
  // `root` and `name_of` are for error texts.
  StepLog(std::string root, NameOf name_of);

  // Compares over that channel's ranks from now on; `units` are those whose
  // numbers travel on it.  Channels are numbered in the order of these calls.
  void compare_over(std::shared_ptr<comm::HostChannel> channel,
                    std::vector<std::int32_t> units);
  bool compares() const { return !channels_.empty(); }

  // `in_words`: what its value stands for on this rank now, for error texts.
  void note(StepNote note, std::string in_words = {});
  // How often each kind was noted of a unit (-1: the root) until now, compared
  // or not.
  using Counts = std::array<std::int64_t, StepNote::kKinds.size()>;
  Counts counts(std::int32_t unit) const;
  // Asks all ranks if anything has been noted since the last time; `numbers_of`
  // gives each unit's numbers for a channel, as many on every rank of it and
  // whenever it is asked.  Does not block.
  using Numbers = std::vector<std::int64_t>;
  using NumbersOf =
      std::function<Numbers(std::size_t channel, std::int32_t unit)>;
  void post(const NumbersOf& numbers_of);
  // Asks in any case, but only over channels that `asks` is true of a unit of,
  // which all ranks of the channel must agree in.
  void post_again(
      const NumbersOf& numbers_of,
      const std::function<bool(std::size_t channel, std::int32_t unit)>& asks);
  // Waits for what was posted.  `agreed` is told the greatest numbers over the
  // channel's ranks of each unit.  Throws lowtide::Error where notes differ.
  void require(const std::function<void(std::size_t channel, std::int32_t unit,
                                        const Numbers& greatest)>& agreed);
  // The step failed: nothing that was noted counts.
  void forget();

 private:
  struct Channel {
    std::shared_ptr<comm::HostChannel> ranks;
    std::vector<std::int32_t> units;
  };
  struct Posted {
    std::size_t channel;
    std::size_t num_notes;                 // of notes_, that it covers
    std::vector<std::size_t> num_numbers;  // of each of the channel's units
    std::unique_ptr<comm::HostChannel::Maximum> maximum;
  };
  void post_over(std::size_t channel, const NumbersOf& numbers_of);
  [[noreturn]] void throw_difference(const Channel& channel,
                                     std::size_t num_notes);
  std::string text_of(std::size_t place) const;

  std::string root_;
  NameOf name_of_;
  std::vector<Channel> channels_;
  std::vector<Counts> counts_;   // by unit, the root first
  std::vector<StepNote> notes_;  // since the last that was required
  std::map<std::size_t, std::string> words_;  // by place in notes_
  std::size_t num_posted_ = 0;
  std::uint64_t hash_ = 0;
  std::deque<Posted> posted_;
};

// Another number for every sequence of numbers, for almost all purposes
// (splitmix64, Steele et al. 2014).
std::uint64_t mix(std::uint64_t hash, std::uint64_t value);

}  // namespace lowtide::shard
