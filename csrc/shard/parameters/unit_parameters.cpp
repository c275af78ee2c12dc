#include "shard/parameters/unit_parameters.h"

#include <c10/util/Logging.h>

#include <utility>

#include "base/trace.h"

namespace lowtide::shard {

UnitParameters::UnitParameters(
    const UnitName& unit, const ParameterInfos& infos,
    const comm::Collectives& ranks,
    const std::shared_ptr<memory::DeviceMemory>& memory,
    const std::shared_ptr<memory::HostMemory>& host)
    : unit_(unit),
      infos_(infos),
      buffers_(unit, infos, ranks.size(), ranks.rank(), memory, host),
      leaves_(infos),
      state_(unit),
      runtime_(memory->runtime()) {}

UnitParameters::~UnitParameters() {
  try {
    if (pending_) {
      pending_->abandon();
    }
  } catch (const std::exception& error) {
    LOG(ERROR) << "lowtide: unit '" << *unit_
               << "': giving its bytes back failed: " << error.what();
  }
}

// [Note: Graphs of older values]
// What a graph has saved of a full parameter shows whatever is gathered next:
// of one that is gone through after an optimizer has stepped, other values than
// its forward had, and its gradients would be those of neither.  So a write to
// a shard counts as one to the full parameter, and torch raises, as it does
// without sharding.
void UnitParameters::count_writes() {
  for (std::size_t i = 0; i < leaves_.full().size(); ++i) {
    auto* const full = leaves_.full()[i].unsafeGetTensorImpl();
    if (seen_shards_.written(i) && full->version_counter().enabled()) {
      full->bump_version();
    }
  }
}

// Outside of backward a kept part may be older than the shards.
void UnitParameters::gather(comm::Collectives& shards,
                            comm::Collectives* from_kept,
                            std::int64_t optimizer_steps, bool timed) {
  const base::TraceRange trace("lowtide::gather", *unit_);
  count_writes();
  seen_shards_.see(optimizer_steps);
  from_parts_ = from_kept != nullptr && buffers_.keeps_part();
  if (from_parts_) {
    pending_ = buffers_.gather_parts(*from_kept);
  } else {
    buffers_.drop_part();
    pending_ = buffers_.gather(shards, timed ? &gather_time_ : nullptr);
  }
  state_.on(UnitEvent::gather);
}

bool UnitParameters::arrive() {
  if (state() != UnitState::gathering) {
    return false;
  }
  const base::TraceRange trace("lowtide::wait_for_gather", *unit_);
  if (pending_) {
    pending_->wait();
    if (!from_parts_) {
      buffers_.unpack();
    }
    pending_.reset();
  }
  const auto made = buffers_.make_extended(from_parts_);
  std::size_t next = 0;
  for (std::size_t i = 0; next < made.size(); ++i) {
    if (infos_[i].extended) {
      leaves_.replace_full(i, made[next++]);
    }
  }
  from_parts_ = false;
  buffers_.drop_part();
  buffers_.arrived();
  state_.on(UnitEvent::arrive);
  return !made.empty();
}

void UnitParameters::reshard(bool keep) {
  buffers_.drop_part();
  if (!keep && buffers_.bound()) {
    buffers_.release();
  }
  if (state() == UnitState::unsharded) {
    state_.on(UnitEvent::reshard);
  }
  leaves_.show_shards();
  ahead_ = false;
}

void UnitParameters::reshard_but_part(const comm::Collectives& group,
                                      bool keep) {
  buffers_.keep_part(group.rank(), group.size(), keep);
  state_.on(UnitEvent::reshard);
  leaves_.show_shards();
  ahead_ = false;
}

void UnitParameters::seal(bool keep) {
  if (state() == UnitState::unsharded) {
    if (!keep) {
      buffers_.release();
    }
    leaves_.show_shards();
    state_.on(UnitEvent::seal);
  }
}

void UnitParameters::drain() {
  if (state() == UnitState::reducing) {
    state_.on(UnitEvent::drain);
  }
}

void UnitParameters::abort() {
  if (pending_) {
    try {
      pending_->wait();
    } catch (const std::exception& error) {
      LOG(WARNING) << error.what();
    }
    pending_.reset();
  }
  from_parts_ = ahead_ = false;
  buffers_.drop_part();
  buffers_.arrived();
  leaves_.show_shards();
  buffers_.drop();
  state_.on(UnitEvent::abort);
}

}  // namespace lowtide::shard
