// The backward half of Frame; see frame.h.
#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Logging.h>

#include <exception>
#include <optional>
#include <utility>

#include "activation/frame.h"
#include "base/check.h"
#include "base/graph_task.h"
#include "base/trace.h"
#include "device/current_stream.h"

namespace lowtide::activation {
namespace {

// For destructors: a device that has failed fails here again.
template <typename Action>
void logging_errors(const Region& region, Action&& action) noexcept {
  try {
    action();
  } catch (const std::exception& error) {
    LOG(ERROR) << "lowtide: " << region.who()
               << ": giving back what came from the host failed: "
               << error.what();
  }
}

}  // namespace

Recomputation::Recomputation(const Frame& frame, std::vector<bool> needed)
    : frame_(frame), needed_(std::move(needed)), values_(needed_.size()) {
  for (std::size_t i = 0; i < needed_.size(); ++i) {
    if (needed_[i]) end_ = i + 1;
  }
}

bool Recomputation::pack(const at::Tensor& bare) {
  const std::size_t place = next_++;
  if (place < end_ && needed_[place]) {
    frame_.check_same(place, bare);
    values_[place] = {bare, SeenVersion(bare)};
  }
  return next_ >= end_;
}

void Frame::check_same(std::size_t place, const at::Tensor& tensor) const {
  const at::DimVector sizes = sizes_of(tensor);
  const std::lock_guard lock(mutex_);
  const Saved& saved = saved_[place];
  if (tensor.scalar_type() != saved.dtype || sizes != saved.sizes) {
    differs(
        base::concat("saved tensor ", place, " to be ",
                     c10::toString(saved.dtype), at::IntArrayRef(saved.sizes)),
        base::concat(c10::toString(tensor.scalar_type()),
                     at::IntArrayRef(sizes)));
  }
}

void Frame::differs(const std::string& expected, const std::string& got) const {
  throw Error(base::error_text(
      region_->who(),
      base::concat("the second forward to do what the first did, ", expected),
      got,
      "Make the forward a function of its arguments: no counters, caches or "
      "other state that changes between forward and backward."));
}

at::Tensor Frame::unpack(std::size_t place, bool creates_graph) {
  const auto graph_task = base::current_graph_task();
  if (graph_task != -1 && creates_graph) {
    throw Error(base::error_text(
        region_->who(), "create_graph=False through a checkpointed region",
        "create_graph=True",
        "Take higher derivatives of a model without lowtide.checkpoint."));
  }
  {
    const std::lock_guard lock(mutex_);
    const SeenVersion& version = saved_[place].version;
    if (version.changed()) {
      version.throw_modified(
          region_->who(), base::concat("the tensor saved as number ", place),
          "", "Write out of place: backward needs the value.");
    }
    const auto found = recomputations_.find(graph_task);
    if (found != recomputations_.end() &&
        found->second->values_[place].tensor.defined()) {
      return take(*found->second, place);
    }
  }
  const auto recomputation = recompute();
  if (graph_task == -1) return take(*recomputation, place);
  forget_at_end_of(graph_task);
  const std::lock_guard lock(mutex_);
  recomputations_[graph_task] = recomputation;
  return take(*recomputation, place);
}

at::Tensor Frame::take(Recomputation& recomputation, std::size_t place) {
  auto& value = recomputation.values_[place];
  LOWTIDE_INVARIANT(value.tensor.defined(), "a needed value is computed");
  if (value.version->changed()) {
    throw Error(base::error_text(
        recomputation.frame_.region_->who(),
        base::concat("the tensor saved as number ", place, " to stay as it is"),
        base::concat("a write in place (version ", value.version->seen(),
                     " to ", value.version->now(), ")"),
        "Write out of place: backward needs the value."));
  }
  return std::exchange(value.tensor, at::Tensor());
}

std::shared_ptr<Recomputation> Frame::recompute() {
  const base::TraceRange trace("lowtide::recompute", region_->who());
  check_unmodified();
  std::vector<bool> needed;
  {
    const std::lock_guard lock(mutex_);
    needed.reserve(saved_.size());
    for (const Saved& saved : saved_) needed.push_back(saved.alive);
  }
  auto recomputation =
      std::make_shared<Recomputation>(*this, std::move(needed));
  struct Use {
    explicit Use(const Frame& frame) : frame(frame) {
      if (frame.batch_) frame.region_->transfers()->begin_use(*frame.batch_);
    }
    ~Use() {
      if (!frame.batch_) return;
      logging_errors(*frame.region_, [this] {
        frame.region_->transfers()->end_use(*frame.batch_);
      });
    }
    const Frame& frame;
  };
  const Use use(*this);
  std::vector<at::Tensor> inputs;
  inputs.reserve(inputs_.size());
  for (const HeldValue& held : inputs_) inputs.push_back(held.get());
  {
    const ForwardState::Scope state(state_);
    const at::AutoGradMode grad_mode(true);
    const Scope scope(*this, /*recomputing=*/true);
    replay_->run(inputs, *recomputation);
  }
  if (recomputation->next_ < recomputation->end_) {
    differs(base::concat("at least ", recomputation->end_, " saved tensors"),
            base::concat(recomputation->next_));
  }
  return recomputation;
}

std::vector<at::Tensor> Frame::stored(std::int64_t number) const {
  std::vector<at::Tensor> tensors;
  for (const HeldValue& held : stored_.at(number).values) {
    tensors.push_back(without_history(held.get()));
  }
  return tensors;
}

void Frame::drop(std::size_t place) {
  std::vector<at::Tensor> dropped;  // destroyed after the lock is
  const std::lock_guard lock(mutex_);
  saved_[place].alive = false;
  for (auto& [task, recomputation] : recomputations_) {
    if (place < recomputation->values_.size()) {
      dropped.push_back(
          std::exchange(recomputation->values_[place].tensor, {}));
    }
  }
}

// [Note: One recomputation per backward]
// What was computed again for one backward is dropped with it, also when it
// raised.
void Frame::forget_at_end_of(std::int64_t graph_task) {
  // Where values came from the host.
  std::optional<c10::Stream> stream;
  if (batch_) {
    stream = device::current_stream(
        region_->transfers()->memories().device->runtime().device());
  }
  base::when_graph_task_is_gone([frame = weak_from_this(), graph_task, stream] {
    const auto alive = frame.lock();
    if (!alive) return;
    if (stream) {
      logging_errors(*alive->region_, [&] {
        const c10::StreamGuard of_backward(*stream);
        alive->region_->transfers()->end_backward();
      });
    }
    decltype(alive->recomputations_)::node_type dropped;  // behind the lock
    const std::lock_guard lock(alive->mutex_);
    dropped = alive->recomputations_.extract(graph_task);
  });
}

}  // namespace lowtide::activation
