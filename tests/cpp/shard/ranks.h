// Several ranks in one process: a thread each, and the meeting point that
// their collectives exchange inputs through.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "host_meeting.h"
#include "testing/recording_collectives.h"

namespace lowtide::shard {

// Thread-safe.  The n-th input a rank brings meets the n-th of every other
// rank; they must be of the same collective.  Throws lowtide::Error when ranks
// bring different collectives, when another rank left, and after a minute.
class Exchange {
 public:
  explicit Exchange(std::int64_t world_size);

  std::int64_t world_size() const {
    return static_cast<std::int64_t>(brought_.size());
  }

  // For that rank's RecordingCollectives.
  comm::RecordingCollectives::Peer peer(std::int64_t rank);

  // Rank 0's values.
  std::vector<std::int64_t> broadcast(std::int64_t rank,
                                      const std::vector<std::int64_t>& values,
                                      const std::string& label);

  // Where ranks compare what they did.
  HostMeeting& hosts() { return hosts_; }
  // Where `size` of them do, from that rank on.
  HostMeeting& hosts(std::int64_t first, std::int64_t size);

  // That rank will not come any more.
  void leave(std::int64_t rank);

 private:
  struct Input {
    std::string collective;
    at::Tensor values;
  };

  void bring(std::size_t rank, Input input);
  // What `other` brought where `rank` brought its latest.
  at::Tensor meet(std::size_t rank, std::size_t other);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::vector<Input>> brought_;  // by rank
  std::vector<bool> left_;
  HostMeeting hosts_;
  std::map<std::pair<std::int64_t, std::int64_t>, HostMeeting> some_hosts_;
};

// Runs `rank_main(exchange, rank)` for all ranks at once and waits for them;
// throws what a rank threw that did not fail only because another one did.
void run_ranks(std::int64_t world_size,
               const std::function<void(Exchange& exchange, std::int64_t rank)>&
                   rank_main);

}  // namespace lowtide::shard
