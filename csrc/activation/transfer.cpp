#include "activation/transfer.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

#include "base/check.h"

namespace lowtide::activation {
namespace {

// Adds the time it lives to a counter.
class Stopwatch {
 public:
  explicit Stopwatch(std::int64_t& total) : total_(total) {}
  ~Stopwatch() {
    total_ += std::chrono::nanoseconds(Clock::now() - start_).count();
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  std::int64_t& total_;
  const Clock::time_point start_ = Clock::now();
};

}  // namespace

Batch::~Batch() {
  if (const auto transfers = transfers_.lock()) transfers->forget(*this);
}

Transfers::Transfers(Memories memories) : memories_(std::move(memories)) {}

std::shared_ptr<Stash> Transfers::stash(const at::Tensor& tensor,
                                        std::string_view name) {
  const std::lock_guard lock(mutex_);
  if (const auto* const known = stashes_.find(tensor)) {
    if (auto found = known->lock(); found && found->is_of(tensor)) return found;
  }
  auto made = std::make_shared<Stash>(memories_, std::string(name), tensor);
  stashes_.put(tensor, made);
  return made;
}

std::shared_ptr<Batch> Transfers::open(Window window, std::string who) {
  const std::lock_guard lock(mutex_);
  const Stopwatch watch(figures_.host_ns_copying);
  // How many batches come after each, the new one included.
  auto distance = static_cast<std::int64_t>(present_.size());
  std::erase_if(present_, [&](Batch* batch) {
    const Window& its = batch->window_;
    const auto age = distance--;
    if (age >= its.keep_last) send(*batch);
    if (age <= its.keep_last + its.prefetch) return false;
    for (const auto& value : batch->values_) value.stash->let_go();
    return true;
  });
  auto opened = std::make_shared<Batch>(weak_from_this(), next_number_++,
                                        window, std::move(who));
  opened->sent_ = window.keep_last == 0;
  batches_.emplace(opened->number_, opened.get());
  present_.push_back(opened.get());
  return opened;
}

void Transfers::add(Batch& batch, std::shared_ptr<Stash> stash,
                    device::Event ready, Outcome outcome) {
  const std::lock_guard lock(mutex_);
  const Stopwatch watch(figures_.host_ns_copying);
  auto& values = batch.values_;
  auto value =
      std::find_if(values.begin(), values.end(),
                   [&](const auto& known) { return known.stash == stash; });
  if (value == values.end()) {
    values.push_back({std::move(stash), std::move(ready), {}});
    value = std::prev(values.end());
  }
  value->outcomes.push_back(std::move(outcome));
  if (batch.sent_) send(*value);
  count("forward", batch);
}

void Transfers::send(Batch& batch) {
  if (std::exchange(batch.sent_, true)) return;
  for (auto& value : batch.values_) send(value);
}

void Transfers::send(Batch::Value& value) {
  value.stash->copy_out(value.ready);
  for (const auto& outcome : std::exchange(value.outcomes, {})) outcome(true);
}

void Transfers::count(const char* phase, const Batch& batch) {
  std::int64_t leaving = 0;
  std::int64_t on_device = 0;
  const auto add = [&](const Batch* each) {
    for (const auto& value : each->values_) {
      const Place place = value.stash->place();
      const auto bytes = value.stash->num_bytes();
      leaving += place == Place::leaving ? bytes : 0;
      on_device += place == Place::host ? 0 : bytes;
    }
  };
  std::for_each(present_.begin(), present_.end(), add);
  std::for_each(fetched_.begin(), fetched_.end(), add);
  figures_.leaving_peak = std::max(figures_.leaving_peak, leaving);
  if (on_device > figures_.device_peak) {
    figures_.device_peak = on_device;
    figures_.peak_moment = base::concat(phase, " of ", batch.who_);
  }
}

void Transfers::begin_use(Batch& batch) {
  const std::lock_guard lock(mutex_);
  const Stopwatch watch(figures_.host_ns_copying);
  std::vector<Batch*> wanted{&batch};
  auto place = batches_.find(batch.number_);
  LOWTIDE_INVARIANT(place != batches_.end(), "a batch in use is known");
  for (auto left = batch.window_.prefetch;
       left > 0 && place != batches_.begin(); --left) {
    wanted.push_back((--place)->second);
  }
  // Backward went another way than forward came: make room first.
  std::erase_if(fetched_, [&](Batch* other) {
    if (std::find(wanted.begin(), wanted.end(), other) != wanted.end()) {
      return false;
    }
    for (const auto& value : other->values_) value.stash->drop_fetched();
    return true;
  });
  for (Batch* each : wanted) {
    fetch(*each,
          each == &batch ? figures_.fetched_inline : figures_.fetched_ahead);
  }
  count("backward", batch);
}

void Transfers::fetch(Batch& batch, std::int64_t& counter) {
  bool any = false;
  for (const auto& value : batch.values_) {
    if (value.stash->place() != Place::host) continue;
    value.stash->fetch();
    ++counter;
    any = true;
  }
  const bool listed =
      std::find(fetched_.begin(), fetched_.end(), &batch) != fetched_.end();
  if (any && !listed) fetched_.push_back(&batch);
}

void Transfers::end_use(Batch& batch) {
  const std::lock_guard lock(mutex_);
  for (const auto& value : batch.values_) value.stash->drop_fetched();
  std::erase(fetched_, &batch);
}

void Transfers::end_backward() {
  const std::lock_guard lock(mutex_);
  for (Batch* batch : std::exchange(fetched_, {})) {
    for (const auto& value : batch->values_) value.stash->drop_fetched();
  }
}

void Transfers::forget(Batch& batch) {
  const std::lock_guard lock(mutex_);
  if (!batch.sent_) {
    for (const auto& value : batch.values_) {
      for (const auto& outcome : value.outcomes) outcome(false);
    }
  }
  batches_.erase(batch.number_);
  std::erase(present_, &batch);
  std::erase(fetched_, &batch);
}

Transfers::Figures Transfers::figures() const {
  const std::lock_guard lock(mutex_);
  Figures figures = figures_;
  figures.exposed_ns = memories_.waits->total_ns(memories_.device->runtime());
  return figures;
}

void Transfers::reset_figures() {
  const std::lock_guard lock(mutex_);
  figures_ = {};
  memories_.waits->reset();
}

}  // namespace lowtide::activation
