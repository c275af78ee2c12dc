#include "shard/graph/held_graphs.h"

#include <algorithm>
#include <utility>

namespace lowtide::shard {
namespace {

bool expired(const WeakNodePtr& node) { return node.expired(); }

std::int64_t any_alive(const std::vector<WeakNodePtr>& nodes) {
  return std::all_of(nodes.begin(), nodes.end(), expired) ? 0 : 1;
}

}  // namespace

void HeldGraphs::keep(const std::vector<WeakNodePtr>& calls) {
  kept_.insert(kept_.end(), calls.begin(), calls.end());
}

// Every rank records at the same place of the program.
void HeldGraphs::record(WeakNodePtr result) {
  recorded_.push_back(std::move(result));
  recorded_on_any_ = recorded_since_ = true;
}

void HeldGraphs::forget_expired() {
  std::erase_if(kept_, expired);
  std::erase_if(recorded_, expired);
}

HeldGraphs::Kinds HeldGraphs::own() {
  recorded_since_ = false;
  return {any_alive(kept_), any_alive(recorded_)};
}

void HeldGraphs::agree_on(const Kinds& greatest) {
  kept_on_any_ = greatest.kept != 0;
  recorded_on_any_ = greatest.recorded != 0 || recorded_since_;
}

void HeldGraphs::clear() { *this = {}; }

}  // namespace lowtide::shard
