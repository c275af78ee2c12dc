// The regions whose forwards run or whose graphs live; listens while there are
// any, and hands each call to its region.  Thread-safe.
#pragma once

#include <mutex>
#include <optional>
#include <vector>

#include "comm/call_observer.h"
#include "spmd/region_record.h"

namespace lowtide::spmd {

class LiveRegions final : public comm::CallListener {
 public:
  void add(RegionRecord& record);
  void remove(RegionRecord& record);

  void collective(const comm::ObservedCall& call) override;
  void node(std::uint64_t thread, std::uint64_t sequence) override;

  // Guards the records, too.
  std::mutex& mutex() { return mutex_; }

 private:
  RegionRecord* open_in_this_thread() const;
  RegionRecord* owner(std::uint64_t thread, std::uint64_t sequence) const;

  std::mutex mutex_;
  std::vector<RegionRecord*> records_;  // outer ones first
  std::optional<comm::Observation> observation_;
};

// The process's, as RecordFunction's callbacks are.
LiveRegions& live_regions();

}  // namespace lowtide::spmd
