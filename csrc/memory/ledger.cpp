#include "memory/ledger.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace lowtide::memory {
namespace {

std::size_t index_of(Category category) {
  return static_cast<std::size_t>(category);
}

}  // namespace

std::string_view category_name(Category category) {
  switch (category) {
    case Category::parameters:
      return "parameters";
    case Category::gathered:
      return "gathered";
    case Category::gather_input:
      return "gather_input";
    case Category::gradient_stream:
      return "gradient_stream";
    case Category::gradient_slab:
      return "gradient_slab";
    case Category::sharded_gradients:
      return "sharded_gradients";
    case Category::activations:
      return "activations";
  }
  LOWTIDE_INVARIANT(false, "a category has a name");
}

Category category_of(std::string_view name) {
  std::string known;
  for (std::size_t i = 0; i < kNumCategories; ++i) {
    const auto category = static_cast<Category>(i);
    if (category_name(category) == name) return category;
    known += base::concat(i == 0 ? "" : ", ", category_name(category));
  }
  throw InvalidArgument(base::error_text(
      "memory category", base::concat("one of ", known),
      base::concat("'", name, "'"), "Use a name from that list."));
}

void Ledger::add(Category category, std::string_view name, std::int64_t bytes,
                 const void* begin) {
  LOWTIDE_INVARIANT(bytes > 0, "a lease has bytes");
  const std::size_t i = index_of(category);
  const std::lock_guard lock(mutex_);
  auto named = names_[i].find(name);
  if (named == names_[i].end()) {
    named = names_[i].emplace(std::string(name), Named{}).first;
  }
  named->second.live += bytes;
  named->second.peak = std::max(named->second.peak, named->second.live);
  live_[i] += bytes;
  peak_[i] = std::max(peak_[i], live_[i]);
  leases_[i] += 1;
  total_live_ += bytes;
  if (total_live_ > total_peak_) {
    total_peak_ = total_live_;
    at_total_peak_ = live_;
  }
  if (logs_ && begin != nullptr) {
    log_.push_back({begin, category, std::string(name)});
  }
  if (observer_) observer_(live_);
}

void Ledger::remove(Category category, std::string_view name,
                    std::int64_t bytes) {
  LOWTIDE_INVARIANT(bytes > 0, "a lease has bytes");
  const std::size_t i = index_of(category);
  const std::lock_guard lock(mutex_);
  const auto named = names_[i].find(name);
  LOWTIDE_INVARIANT(named != names_[i].end() && named->second.live >= bytes,
                    "only leased bytes are given back");
  named->second.live -= bytes;
  live_[i] -= bytes;
  total_live_ -= bytes;
  if (observer_) observer_(live_);
}

Bytes Ledger::live() const {
  const std::lock_guard lock(mutex_);
  return live_;
}

std::int64_t Ledger::total_live() const {
  const std::lock_guard lock(mutex_);
  return total_live_;
}

Bytes Ledger::peak() const {
  const std::lock_guard lock(mutex_);
  return peak_;
}

std::int64_t Ledger::total_peak() const {
  const std::lock_guard lock(mutex_);
  return total_peak_;
}

Bytes Ledger::at_total_peak() const {
  const std::lock_guard lock(mutex_);
  return at_total_peak_;
}

std::int64_t Ledger::num_leases(Category category) const {
  const std::lock_guard lock(mutex_);
  return leases_[index_of(category)];
}

void Ledger::reset_peaks() {
  const std::lock_guard lock(mutex_);
  peak_ = live_;
  leases_ = {};
  at_total_peak_ = live_;
  total_peak_ = total_live_;
  for (auto& names : names_) {
    std::erase_if(names,
                  [](const auto& entry) { return entry.second.live == 0; });
    for (auto& [name, named] : names) named.peak = named.live;
  }
}

std::map<std::string, Ledger::Named> Ledger::by_name(Category category) const {
  const std::lock_guard lock(mutex_);
  const auto& names = names_[index_of(category)];
  return {names.begin(), names.end()};
}

std::vector<Ledger::Logged> Ledger::take_log() {
  const std::lock_guard lock(mutex_);
  logs_ = true;
  return std::exchange(log_, {});
}

void Ledger::observe(std::function<void(const Bytes& live)> observer) {
  const std::lock_guard lock(mutex_);
  if (observer && observer_) {
    throw Error(base::error_text(
        "ledger", "at most one observer at a time", "a second one",
        "Stop the running AllocationTimeline before starting another."));
  }
  observer_ = std::move(observer);
}

}  // namespace lowtide::memory
