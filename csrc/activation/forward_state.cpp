#include "activation/forward_state.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <c10/util/Logging.h>

#include <cstring>
#include <exception>
#include <mutex>

#include "base/check.h"
#include "device/captured_offset.h"

namespace lowtide::activation {
namespace {

// Comparing and writing the engine's words costs a third of going through
// state tensors, and a region does it on every forward.
bool same_cpu_state(const at::Generator& a, const at::Generator& b) {
  auto* const x = at::check_generator<at::CPUGeneratorImpl>(a);
  auto* const y = at::check_generator<at::CPUGeneratorImpl>(b);
  const auto left = x->engine().data();
  const auto right = y->engine().data();
  return left.seed_ == right.seed_ && left.left_ == right.left_ &&
         left.next_ == right.next_ && left.state_ == right.state_ &&
         x->next_float_normal_sample() == y->next_float_normal_sample() &&
         x->next_double_normal_sample() == y->next_double_normal_sample();
}

void copy_cpu_state(const at::Generator& to, const at::Generator& from) {
  auto* const target = at::check_generator<at::CPUGeneratorImpl>(to);
  auto* const source = at::check_generator<at::CPUGeneratorImpl>(from);
  target->set_engine(source->engine());
  target->set_next_float_normal_sample(source->next_float_normal_sample());
  target->set_next_double_normal_sample(source->next_double_normal_sample());
}

bool same_state(const at::Generator& a, const at::Generator& b) {
  if (a.device().is_cpu()) return same_cpu_state(a, b);
  const at::Tensor x = a.get_state();
  const at::Tensor y = b.get_state();
  return x.nbytes() == y.nbytes() &&
         std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

template <typename Restore>
void log_failure(Restore&& restore) {
  try {
    restore();
  } catch (const std::exception& error) {
    LOG(ERROR) << "lowtide: leaving a recomputation failed: " << error.what();
  }
}

void apply(const AutocastState& state) {
  for (const auto& each : state.devices) {
    at::autocast::set_autocast_enabled(each.type, each.enabled);
    at::autocast::set_autocast_dtype(each.type, each.dtype);
  }
  at::autocast::set_autocast_cache_enabled(state.cache_enabled);
}

}  // namespace

RandomState RandomState::capture(c10::Device device) {
  RandomState state;
  const auto add = [&](at::Generator generator) {
    const std::lock_guard lock(generator.mutex());
    if (const auto offset = device::captured_offset(generator)) {
      state.captured_ = {generator, *offset};
    } else {
      state.saved_.push_back({generator, generator.clone()});
    }
  };
  add(at::globalContext().defaultGenerator(c10::Device(c10::kCPU)));
  if (!device.is_cpu()) {
    add(at::globalContext().defaultGenerator(device));
  }
  return state;
}

bool RandomState::consumed() const {
  if (captured_) {
    at::Generator generator = captured_->generator;
    const std::lock_guard lock(generator.mutex());
    const auto offset = device::captured_offset(generator);
    if (offset != captured_->offset) {
      throw Error(base::error_text(
          "checkpoint",
          "no random numbers in a region that a CUDA graph captures",
          "operators that drew some",
          "Computing it again takes the same numbers, and torch does not let a "
          "generator be set back during a capture: set dropout to 0 there, or "
          "capture modules that are not checkpointed."));
    }
  }
  for (const auto& saved : saved_) {
    at::Generator generator = saved.generator;
    const std::lock_guard lock(generator.mutex());
    if (!same_state(generator, saved.copy)) return true;
  }
  return false;
}

void RandomState::restore() const {
  for (const auto& saved : saved_) {
    at::Generator generator = saved.generator;
    const std::lock_guard lock(generator.mutex());
    if (generator.device().is_cpu()) {
      copy_cpu_state(generator, saved.copy);
    } else {
      generator.set_state(saved.copy.get_state());
    }
  }
}

AutocastState AutocastState::capture(c10::Device device) {
  AutocastState state;
  const auto add = [&](c10::DeviceType type) {
    state.devices.push_back({type, at::autocast::is_autocast_enabled(type),
                             at::autocast::get_autocast_dtype(type)});
  };
  add(c10::kCPU);
  if (!device.is_cpu() && device.type() != c10::kMeta) add(device.type());
  state.cache_enabled = at::autocast::is_autocast_cache_enabled();
  return state;
}

ForwardState::ForwardState(c10::Device device)
    : device_(device.type() == c10::kMeta ? c10::Device(c10::kCPU) : device),
      autocast_(AutocastState::capture(device_)),
      random_(RandomState::capture(device_)) {}

void ForwardState::end_forward() {
  if (random_ && !random_->consumed()) random_.reset();
}

ForwardState::Scope::Scope(const ForwardState& state)
    : autocast_(AutocastState::capture(state.device_)),
      random_(state.random_
                  ? std::make_optional(RandomState::capture(state.device_))
                  : std::nullopt) {
  at::autocast::increment_nesting();
  apply(state.autocast_);
  if (state.random_) state.random_->restore();
}

ForwardState::Scope::~Scope() {
  log_failure([&] {
    if (random_) random_->restore();
    apply(autocast_);
    // Casts of weights made here belong to the graph that is thrown away.
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  });
}

}  // namespace lowtide::activation
