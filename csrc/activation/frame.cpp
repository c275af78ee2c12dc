#include "activation/frame.h"

#include <ATen/SavedTensorHooks.h>

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace lowtide::activation {
namespace {

thread_local Frame::Scope* innermost = nullptr;

bool inside_recomputation() {
  for (const auto* scope = Frame::Scope::current(); scope != nullptr;
       scope = scope->outer()) {
    if (scope->recomputing()) return true;
  }
  return false;
}

c10::Device device_of(const std::vector<at::Tensor>& inputs,
                      const Replay& replay) {
  for (const auto& input : inputs) {
    if (!input.is_cpu()) return input.device();
  }
  return replay.device();
}

// The reason for a value whose producer the recomputation never reaches.
constexpr const char* kNotNeeded =
    "nothing that is computed again comes after it, so storing it would save "
    "nothing; name a value before it";
constexpr const char* kNameLater =
    "Name the value after its last change, or write out of place.";
// Operators are not watched where earlier forwards named only arguments.
constexpr const char* kUnwatched =
    "named inside the forward for the first time; the next forward stores it";

}  // namespace

Frame::Scope::Scope(Frame& frame, bool recomputing)
    : frame_(frame),
      recomputing_(recomputing),
      outer_(std::exchange(innermost, this)) {}

Frame::Scope::~Scope() { innermost = outer_; }

const Frame::Scope* Frame::Scope::current() { return innermost; }

void name_value(NameBook& book, const at::Tensor& tensor,
                const std::string& name) {
  book.add(tensor, name);
  for (const auto* scope = Frame::Scope::current(); scope != nullptr;
       scope = scope->outer()) {
    Frame& frame = scope->frame();
    if (!frame.region()->policy().names.contains(name)) continue;
    if (!scope->recomputing()) frame.name_value(tensor, name);
    return;
  }
}

Frame::Frame(std::shared_ptr<Region> region,
             const std::vector<at::Tensor>& inputs,
             std::unique_ptr<Replay> replay)
    : region_(std::move(region)),
      replay_(std::move(replay)),
      nested_recomputation_(inside_recomputation()),
      hooked_(!at::SavedTensorDefaultHooks::get_tls_state().stack.empty()),
      state_(device_of(inputs, *replay_)) {
  inputs_.reserve(inputs.size());
  for (const auto& input : inputs) hold_input(input);
}

std::vector<std::string> Frame::listed_names_of(const at::Tensor& input) const {
  const auto& listed = region_->policy().names;
  if (listed.empty()) return {};
  std::vector<std::string> names = region_->book().of(input);
  names.emplace_back(kInputName);
  std::erase_if(names,
                [&](const auto& name) { return !listed.contains(name); });
  return names;
}

// Inside another region every input is packed, also one that is then held in
// another way: how much that region sees saved must not depend on names, nor on
// whether the input is a leaf, as it may be when that region is computed again.
// Other hooks are spared what they would only copy.
void Frame::hold_input(const at::Tensor& input) {
  const auto names = listed_names_of(input);
  const auto treated = [&](const auto& name) {
    return region_->policy().names.at(name) != Treatment::recompute &&
           !region_->obstacle(input, name);
  };
  HeldValue& held = inputs_.emplace_back(input);
  const bool packed = hooked_ && !input.is_inference() &&
                      (Scope::current() != nullptr ||
                       std::none_of(names.begin(), names.end(), treated));
  packed ? held.pack(input) : held.keep(input);
  for (const auto& name : names) treat(held, input, name, nullptr);
}

void Frame::treat(HeldValue& held, const at::Tensor& tensor,
                  const std::string& name, const device::Event* ready) {
  matched_ = true;
  if (nested_recomputation_ || !held.add_name(name)) return;
  require_same_treatment(held.names().front(), name);
  auto& figures = region_->figures();
  figures.change(name, [](NameFigures& f) { ++f.matched; });
  const Treatment treatment = region_->policy().names.at(name);
  if (treatment == Treatment::recompute) {
    figures.change(name, [](NameFigures& f) { ++f.recomputed; });
    return;
  }
  if (const auto reason = region_->obstacle(tensor, name)) {
    refuse(name, *reason);
    return;
  }
  if (treatment == Treatment::offload) {
    move(held, tensor, name, ready);
    return;
  }
  held.keep(tensor);
  count_kept(tensor, name);
}

void Frame::count_kept(const at::Tensor& tensor, const std::string& name) {
  const auto bytes = static_cast<std::int64_t>(tensor.storage().nbytes());
  region_->figures().change(name, [&](NameFigures& f) {
    ++f.kept;
    f.kept_bytes += bytes;
  });
}

void Frame::move(HeldValue& held, const at::Tensor& tensor,
                 const std::string& name, const device::Event* ready) {
  Transfers& transfers = region_->transfers_on(tensor.device());
  auto stash = transfers.stash(tensor, name);
  const bool shared = stash.use_count() > 1;
  if (!batch_)
    batch_ = transfers.open(region_->policy().window, region_->who());
  auto outcome = [region = region_, name, shared,
                  bytes = stash->num_bytes()](bool sent) {
    region->figures().change(name, [&](NameFigures& f) {
      if (!sent) {
        ++f.skipped["one of the last regions (keep_last)"];
      } else if (shared) {
        ++f.shared;
      } else {
        ++f.moved;
        f.moved_bytes += bytes;
      }
    });
  };
  transfers.add(*batch_, stash,
                ready ? *ready
                      : transfers.memories().device->runtime().record(
                            device::Stream::compute),
                std::move(outcome));
  held.stash(std::move(stash), tensor);
}

at::DimVector Frame::sizes_of(const at::Tensor& tensor) {
  return tensor.is_nested() ? at::DimVector() : at::DimVector(tensor.sizes());
}

std::size_t Frame::pack(const at::Tensor& tensor) {
  if (num_stored_ < stored_.size()) store_waiting();
  // Before the lock: a subclass may ask Python.
  Saved saved{
      tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr,
      sizes_of(tensor), tensor.scalar_type(), SeenVersion(tensor)};
  const std::lock_guard lock(mutex_);
  saved_.push_back(std::move(saved));
  return saved_.size() - 1;
}

std::size_t Frame::num_saved() const {
  const std::lock_guard lock(mutex_);
  return saved_.size();
}

bool Frame::is_saved(const at::Tensor& tensor) const {
  const std::lock_guard lock(mutex_);
  return std::any_of(saved_.begin(), saved_.end(), [&](const Saved& saved) {
    return saved.storage == tensor.storage().unsafeGetStorageImpl();
  });
}

void Frame::name_value(const at::Tensor& tensor, const std::string& name) {
  for (HeldValue& held : inputs_) {
    if (held.shares_storage_with(tensor)) {
      treat(held, tensor, name, nullptr);
      return;
    }
  }
  if (nested_recomputation_) return;
  matched_ = true;
  region_->figures().change(name, [](NameFigures& f) { ++f.matched; });
  if (region_->policy().names.at(name) == Treatment::recompute) {
    region_->figures().change(name, [](NameFigures& f) { ++f.recomputed; });
    return;
  }
  const auto reason = region_->obstacle(tensor, name);
  if (watcher_ && (!reason || !region_->unfit(tensor, name))) {
    watcher_(tensor, name, reason.value_or(""));
  } else if (reason) {
    refuse(name, *reason);
  } else {
    unwatched_.emplace_back(name, saved_.size());
  }
}

void Frame::share(const std::string& name, std::int64_t number) {
  require_same_treatment(stored_.at(number).name, name);
  region_->figures().change(name, [](NameFigures& f) { ++f.shared; });
}

void Frame::require_same_treatment(const std::string& first,
                                   const std::string& second) const {
  const auto& names = region_->policy().names;
  if (names.at(first) == names.at(second)) return;
  throw Error(base::error_text(
      region_->who(), "one treatment for a value",
      base::concat("'", first, "' and '", second,
                   "' for the same bytes, in different lists"),
      "Put both into one list of the ActivationPolicy, or remove one."));
}

void Frame::refuse(const std::string& name, const std::string& reason) {
  region_->figures().change(name, [&](NameFigures& f) { ++f.skipped[reason]; });
}

std::int64_t Frame::store(const std::string& name,
                          const std::vector<at::Tensor>& outputs) {
  Stored& stored = stored_.emplace_back();
  stored.name = name;
  stored.tensors = outputs;
  for (const auto& output : outputs) stored.versions.emplace_back(output);
  if (region_->policy().names.at(name) == Treatment::offload) {
    stored.ready = region_->transfers_on(outputs[0].device())
                       .memories()
                       .device->runtime()
                       .record(device::Stream::compute);
  }
  const auto number = static_cast<std::int64_t>(stored_.size()) - 1;
  // What produced it saved its own result.
  if (std::any_of(outputs.begin(), outputs.end(),
                  [&](const auto& output) { return is_saved(output); })) {
    store_waiting();
  }
  return number;
}

bool Frame::is_stored(std::int64_t number) const {
  return !stored_.at(number).values.empty();
}

// Something behind them is saved, so the recomputation would run what produced
// them.
void Frame::store_waiting() {
  for (; num_stored_ < stored_.size(); ++num_stored_) {
    Stored& stored = stored_[num_stored_];
    interior_ = true;
    const bool offloads =
        region_->policy().names.at(stored.name) == Treatment::offload;
    for (const auto& tensor : std::exchange(stored.tensors, {})) {
      HeldValue& held = stored.values.emplace_back(tensor);
      held.keep(tensor);
      if (offloads && !region_->obstacle(tensor, stored.name)) {
        move(held, tensor, stored.name, &stored.ready);
      } else {
        count_kept(tensor, stored.name);
      }
    }
  }
}

void Frame::end_forward() {
  watcher_ = nullptr;
  if (!nested_recomputation_) ++region_->num_calls;
  for (; num_stored_ < stored_.size(); ++num_stored_) {
    stored_[num_stored_].tensors.clear();
    refuse(stored_[num_stored_].name, kNotNeeded);
  }
  for (const auto& [name, place] : unwatched_) {
    const bool needed = place < saved_.size();
    interior_ |= needed;
    refuse(name, needed ? kUnwatched : kNotNeeded);
  }
  if (matched_ && !nested_recomputation_) {
    region_->watches_interior = interior_;
  }
  state_.end_forward();
  check_unmodified();
}

void Frame::check_unmodified() const {
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    const SeenVersion& version = inputs_[i].version();
    if (version.changed()) {
      version.throw_modified(
          region_->who(), base::concat("tensor argument ", i),
          ", as the forward received it",
          "Give the region a copy, or write out of place: it is computed again "
          "from its arguments.");
    }
  }
  for (const Stored& stored : stored_) {
    for (const SeenVersion& version : stored.versions) {
      if (version.changed()) {
        version.throw_modified(region_->who(),
                               base::concat("'", stored.name, "'"),
                               ", as it was named", kNameLater);
      }
    }
  }
}

void Frame::forbid_write(std::int64_t number, const std::string& writer) const {
  throw Error(base::error_text(
      region_->who(),
      base::concat("'", stored_.at(number).name, "' to stay as it was named"),
      base::concat(writer, ", which writes to it in place"), kNameLater));
}

}  // namespace lowtide::activation
