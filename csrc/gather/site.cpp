#include "gather/site.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/digest.h"
#include "base/graph_task.h"

namespace lowtide::gather {
Site::Site(Private, std::shared_ptr<Axis> axis, std::string name,
           const at::Tensor& shard, std::int64_t prefetch_bytes)
    : axis_(std::move(axis)),
      name_(std::move(name)),
      shard_(base::without_history(shard)),
      shard_version_(shard),
      shard_digest_(axis_->compares_bits() ? std::optional(base::digest(shard_))
                                           : std::nullopt),
      prefetch_bytes_(prefetch_bytes) {}

std::shared_ptr<Site> Site::make(std::shared_ptr<Axis> axis, std::string name,
                                 const at::Tensor& shard,
                                 std::int64_t prefetch_bytes) {
  auto site = std::make_shared<Site>(Private(), std::move(axis),
                                     std::move(name), shard, prefetch_bytes);
  site->number_ = site->axis_->enter(site);
  return site;
}

Site::~Site() { axis_->leave(number_); }

std::int64_t Site::gathered_bytes() const {
  return static_cast<std::int64_t>(shard_.nbytes()) * axis_->size();
}

void Site::set_node(base::WeakNodePtr node) { node_ = std::move(node); }

std::size_t Site::add_consumer() {
  const std::lock_guard lock(mutex_);
  alive_.push_back(true);
  return alive_.size() - 1;
}

void Site::drop_consumer(std::size_t consumer) {
  std::vector<at::Tensor> released;  // destroyed after the lock is
  const std::lock_guard lock(mutex_);
  alive_[consumer] = false;
  for (auto& [task, value] : values_) {
    if (value->used && all_taken(*value)) release(*value, released);
  }
}

bool Site::all_taken(const Value& value) const {
  for (std::size_t i = 0; i < alive_.size(); ++i) {
    if (alive_[i] && !(i < value.taken.size() && value.taken[i])) return false;
  }
  return true;
}

void Site::release(Value& value, std::vector<at::Tensor>& released) {
  value.released = true;
  released.push_back(std::exchange(value.tensor, at::Tensor()));
}

bool Site::needed_in_this_backward() const {
  {
    const std::lock_guard lock(mutex_);
    if (std::find(alive_.begin(), alive_.end(), true) == alive_.end()) {
      return false;
    }
  }
  const auto node = node_.lock();
  return node && base::in_graph_task(node.get()) &&
         base::use_in_graph_task(node.get()) != base::NodeUse::unwanted;
}

void Site::modified(const char* what, const base::SeenVersion& seen,
                    const char* next_step) const {
  throw Error(base::error_text(
      base::concat("sequence-parallel gather '", name_, "'"),
      base::concat("the ", what, " at version ", seen.seen(),
                   ", as it was gathered"),
      axis_->on_rank(base::concat("version ", seen.now(),
                                  ": something wrote to it in place")),
      next_step));
}

void Site::require_unmodified() const {
  if (shard_version_.changed()) {
    modified("shard", shard_version_,
             "Write out of place: backward gathers the shard again.");
  }
  if (gathered_ && gathered_->changed()) {
    modified("gathered tensor", *gathered_,
             "Write out of place: backward needs the value.");
  }
}

void Site::require_same_bits() const {
  if (shard_digest_ && *shard_digest_ != base::digest(shard_)) {
    throw Error(base::error_text(
        base::concat("sequence-parallel gather '", name_, "'"),
        "the shard's bits as they were gathered",
        axis_->on_rank("others, which no version counter told: a write through "
                       ".data, or by a kernel that torch does not know"),
        "Write to a clone(): backward gathers the shard again."));
  }
}

std::shared_ptr<Site::Value> Site::issue(bool ahead) {
  require_unmodified();
  require_same_bits();
  axis_->agree();
  auto value = std::make_shared<Value>();
  value->prefetched = ahead;
  value->arriving.emplace(axis_->all_gather(shard_, name_, /*ours=*/true));
  axis_->count(name_, [&](Figures& figures) {
    ++figures.regathers;
    if (ahead) ++figures.prefetched;
  });
  const std::int64_t task = base::current_graph_task();
  forget_at_end_of(task);
  const std::lock_guard lock(mutex_);
  values_[task] = value;
  return value;
}

void Site::start() {
  {
    const std::lock_guard lock(mutex_);
    if (values_.count(base::current_graph_task()) > 0) return;
  }
  issue(/*ahead=*/false);
}

at::Tensor Site::take(std::size_t consumer) {
  const std::int64_t task = base::current_graph_task();
  if (task == -1) {
    throw Error(base::error_text(
        base::concat("sequence-parallel gather '", name_, "'"),
        "its saved value to be read inside backward, which gathers it again",
        axis_->on_rank("a read outside of it"),
        "Read a tensor of your own, or keep this one with regather=False."));
  }
  std::shared_ptr<Value> value;
  {
    const std::lock_guard lock(mutex_);
    const auto found = values_.find(task);
    if (found != values_.end()) value = found->second;
  }
  // A consumer that comes again after the last one: two nodes of which one
  // unpacks twice.
  if (!value || value->released) value = issue(/*ahead=*/false);
  require_unmodified();
  if (!value->used) prefetch_earlier();
  if (value->arriving) {
    at::Tensor arrived = value->arriving->take();
    value->arriving.reset();
    value->tensor = std::move(arrived);
  }
  std::vector<at::Tensor> released;
  const std::lock_guard lock(mutex_);
  at::Tensor tensor = value->tensor;
  value->used = true;
  if (value->taken.size() <= consumer) value->taken.resize(alive_.size());
  value->taken[consumer] = true;
  if (all_taken(*value)) release(*value, released);
  return tensor;
}

void Site::prefetch_earlier() { axis_->prefetch_before(number_); }

Site::Ahead Site::prefetch() {
  {
    const std::lock_guard lock(mutex_);
    const auto found = values_.find(base::current_graph_task());
    if (found != values_.end()) {
      return found->second->released ? Ahead::not_needed : Ahead::done;
    }
  }
  if (!needed_in_this_backward()) return Ahead::not_needed;
  if (gathered_bytes() > prefetch_bytes_) return Ahead::too_large;
  issue(/*ahead=*/true);
  return Ahead::done;
}

// [Note: One re-gather per backward]
// What was gathered again for one backward is dropped with it, also when it
// raised.
void Site::forget_at_end_of(std::int64_t graph_task) {
  base::when_graph_task_is_gone([site = weak_from_this(), graph_task] {
    const auto alive = site.lock();
    if (!alive) return;
    decltype(alive->values_)::node_type dropped;
    {
      const std::lock_guard lock(alive->mutex_);
      dropped = alive->values_.extract(graph_task);
    }
    if (dropped && dropped.mapped()->prefetched && !dropped.mapped()->used) {
      alive->axis_->count(alive->name_,
                          [](Figures& figures) { ++figures.unused; });
    }
  });
}

}  // namespace lowtide::gather
