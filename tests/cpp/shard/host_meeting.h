// Host channels of ranks in one process: what is posted meets when all have
// posted.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "comm/host_channel.h"

namespace lowtide::shard {

// Thread-safe.  Outlives its channels.
class HostMeeting {
 public:
  explicit HostMeeting(std::int64_t size)
      : posted_(static_cast<std::size_t>(size)),
        texts_(posted_.size()),
        said_(posted_.size()) {}

  std::shared_ptr<comm::HostChannel> rank(std::int64_t rank) {
    return std::make_shared<Channel>(*this, static_cast<std::size_t>(rank));
  }
  std::size_t num_posts(std::int64_t rank) const {
    const std::lock_guard lock(mutex_);
    return posted_[static_cast<std::size_t>(rank)].size();
  }
  // What ranks will hear of the others when they have differed.
  void say(std::vector<std::string> texts) { texts_ = std::move(texts); }
  const std::string& said(std::int64_t rank) const {
    return said_[static_cast<std::size_t>(rank)];
  }

 private:
  class Channel final : public comm::HostChannel {
   public:
    Channel(HostMeeting& meeting, std::size_t rank)
        : meeting_(meeting), rank_(rank) {}
    std::int64_t rank() const override {
      return static_cast<std::int64_t>(rank_);
    }
    std::int64_t size() const override {
      return static_cast<std::int64_t>(meeting_.posted_.size());
    }
    std::unique_ptr<Maximum> maximum(
        std::vector<std::int64_t> numbers) override {
      const std::lock_guard lock(meeting_.mutex_);
      auto& posted = meeting_.posted_[rank_];
      posted.push_back(std::move(numbers));
      meeting_.changed_.notify_all();
      return std::make_unique<Answer>(meeting_, posted.size() - 1);
    }
    std::vector<std::string> texts(const std::string& mine) override {
      const std::lock_guard lock(meeting_.mutex_);
      meeting_.said_[rank_] = mine;
      auto all = meeting_.texts_;
      all[rank_] = mine;
      return all;
    }

   private:
    HostMeeting& meeting_;
    std::size_t rank_;
  };

  struct Answer final : comm::HostChannel::Maximum {
    Answer(HostMeeting& of, std::size_t place) : meeting(of), post(place) {}
    std::vector<std::int64_t> wait() override {
      std::unique_lock lock(meeting.mutex_);
      const auto all_have = [&] {
        return std::ranges::all_of(meeting.posted_, [&](const auto& posted) {
          return posted.size() > post;
        });
      };
      if (!meeting.changed_.wait_for(lock, std::chrono::minutes(1), all_have)) {
        throw Error("a rank did not post what others wait for");
      }
      auto greatest = meeting.posted_.front()[post];
      for (const auto& posted : meeting.posted_) {
        for (std::size_t i = 0; i < greatest.size(); ++i) {
          greatest[i] = std::max(greatest[i], posted[post].at(i));
        }
      }
      return greatest;
    }
    HostMeeting& meeting;
    std::size_t post;
  };

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::vector<std::vector<std::int64_t>>> posted_;  // by rank
  std::vector<std::string> texts_;
  std::vector<std::string> said_;
};

}  // namespace lowtide::shard
