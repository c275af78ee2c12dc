// What holds after every step of any program, whatever the settings.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "phantom/allocator/caching_allocator.h"

namespace lowtide::phantom {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr int kSteps = 2000;

// Counts what the allocator holds of the driver.
class CountingSegments final : public SegmentProvider {
 public:
  explicit CountingSegments(std::size_t& held) : held_(held) {}

  Address allocate(std::size_t bytes) override {
    held_ += bytes;
    return addresses_->allocate(bytes);
  }
  void release(Address address, std::size_t bytes) override {
    held_ -= bytes;
    addresses_->release(address, bytes);
  }
  Address reserve(std::size_t bytes) override {
    return addresses_->reserve(bytes);
  }
  void unreserve(Address address, std::size_t bytes) override {
    addresses_->unreserve(address, bytes);
  }
  void map(Address, std::size_t bytes) override { held_ += bytes; }
  void unmap(Address, std::size_t bytes) override { held_ -= bytes; }

 private:
  std::size_t& held_;
  std::unique_ptr<SegmentProvider> addresses_ = numbered_segments();
};

struct Live {
  std::size_t requested;
  StreamId stream;
};

class Program {
 public:
  Program(const AllocatorSettings& settings, unsigned seed)
      : random_(seed),
        allocator_(settings, at_sync_events(),
                   std::make_unique<CountingSegments>(held_)) {}

  void step() {
    const auto draw = below(100);
    if (draw < 2) {
      allocator_.synchronize(below(2) ? std::optional<StreamId>(below(4))
                                      : std::nullopt);
    } else if (draw < 3) {
      allocator_.empty_cache();
    } else if (draw < 15 && !live_.empty()) {
      allocator_.record_stream(any_live()->first, below(4));
    } else if (below(80) < live_.size()) {
      const auto victim = any_live();
      allocator_.free(victim->first);
      live_.erase(victim);
    } else {
      allocate();
    }
  }

  void free_all() {
    for (const auto& [address, live] : live_) allocator_.free(address);
    live_.clear();
    allocator_.empty_cache();
  }

  std::map<Address, Live> live_;
  std::vector<Address> given_;  // in order, 0 for a failure
  std::size_t held_ = 0;
  std::mt19937 random_;
  CachingAllocator allocator_;

 private:
  std::size_t below(std::size_t bound) { return random_() % bound; }

  std::map<Address, Live>::iterator any_live() {
    return std::next(live_.begin(), below(live_.size()));
  }

  void allocate() {
    constexpr std::size_t kBounds[] = {4096,      kMiB,      2 * kMiB,
                                       10 * kMiB, 64 * kMiB, 200 * kMiB};
    const std::size_t bytes = 1 + below(kBounds[below(std::size(kBounds))]);
    const auto stream = static_cast<StreamId>(below(4));
    Address address = 0;
    try {
      address = allocator_.malloc(bytes, stream);
      ASSERT_TRUE(live_.emplace(address, Live{bytes, stream}).second);
    } catch (const OutOfMemory&) {
    }
    given_.push_back(address);
  }
};

void expect_consistent(Program& program) {
  const auto segments = program.allocator_.snapshot();
  const Statistics statistics = program.allocator_.statistics();
  std::size_t reserved = 0, active = 0, allocated = 0, num_allocated = 0;
  Address end_of_last = 0;
  for (const SegmentInfo& segment : segments) {
    ASSERT_GE(segment.address, end_of_last);
    Address next = segment.address;
    for (const BlockInfo& block : segment.blocks) {
      ASSERT_EQ(block.address, next);
      next += block.size;
      if (block.state != BlockState::inactive) active += block.size;
      if (block.state != BlockState::allocated) continue;
      const auto live = program.live_.find(block.address);
      ASSERT_NE(live, program.live_.end());
      ASSERT_GE(block.size, live->second.requested);
      ASSERT_EQ(segment.stream, live->second.stream);
      allocated += block.size;
      ++num_allocated;
    }
    ASSERT_EQ(next, segment.address + segment.total_size);
    end_of_last = next;
    reserved += segment.total_size;
  }
  ASSERT_EQ(num_allocated, program.live_.size());
  ASSERT_EQ(program.allocator_.reserved(), reserved);
  ASSERT_EQ(program.held_, reserved);
  ASSERT_EQ(program.allocator_.allocated(), allocated);
  ASSERT_EQ(statistics.active_bytes[kAll].current,
            static_cast<std::int64_t>(active));
  ASSERT_GE(reserved, active);
  ASSERT_GE(active, allocated);
  for (const PoolStats* stats :
       {&statistics.allocated_bytes, &statistics.reserved_bytes,
        &statistics.active, &statistics.inactive_split}) {
    ASSERT_EQ((*stats)[kAll].current,
              (*stats)[kSmallPool].current + (*stats)[kLargePool].current);
    ASSERT_GE((*stats)[kAll].peak, (*stats)[kAll].current);
    ASSERT_EQ((*stats)[kAll].allocated - (*stats)[kAll].freed,
              (*stats)[kAll].current);
  }
}

struct Variant {
  const char* name;
  AllocatorSettings settings;
};

std::vector<Variant> variants() {
  AllocatorSettings ample, expandable, tight, tight_expandable, max_split, gc;
  expandable.expandable = true;
  tight.capacity = 700 * kMiB;
  tight_expandable = tight;
  tight_expandable.expandable = true;
  max_split = tight;
  max_split.max_split = 40 * kMiB;
  max_split.roundup_power2_divisions.fill(4);
  gc = tight;
  gc.memory_fraction = 0.9;
  gc.garbage_collection_threshold = 0.6;
  return {{"ample", ample},         {"expandable", expandable},
          {"tight", tight},         {"tight_expandable", tight_expandable},
          {"max_split", max_split}, {"garbage_collection", gc}};
}

class RandomPrograms : public ::testing::TestWithParam<Variant> {};

TEST_P(RandomPrograms, NeverOverlapNorLeak) {
  for (unsigned seed = 0; seed < 5; ++seed) {
    Program program(GetParam().settings, seed);
    for (int i = 0; i < kSteps; ++i) {
      program.step();
      expect_consistent(program);
      if (HasFatalFailure()) return;
    }
    const auto capacity = GetParam().settings.capacity;
    EXPECT_LE(program.held_, capacity.value_or(std::size_t{1} << 60));
    EXPECT_EQ(program.allocator_.statistics().num_ooms > 0,
              capacity.has_value());
    program.free_all();
    expect_consistent(program);
    EXPECT_EQ(program.allocator_.reserved(), 0u);
    EXPECT_TRUE(program.allocator_.snapshot().empty());
    EXPECT_EQ(program.allocator_.statistics().active[kAll].current, 0);
    EXPECT_EQ(program.allocator_.statistics().inactive_split[kAll].current, 0);
    EXPECT_EQ(program.allocator_.statistics().requested_bytes[kAll].current, 0);
  }
}

TEST_P(RandomPrograms, AreDeterministic) {
  Program first(GetParam().settings, 7), second(GetParam().settings, 7);
  for (Program* program : {&first, &second}) {
    for (int i = 0; i < kSteps; ++i) program->step();
  }
  EXPECT_EQ(first.given_, second.given_);
  EXPECT_GT(first.given_.size(), 500u);
}

INSTANTIATE_TEST_SUITE_P(Settings, RandomPrograms,
                         ::testing::ValuesIn(variants()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace lowtide::phantom
