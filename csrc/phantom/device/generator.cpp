#include "phantom/device/generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <memory>

#include "base/check.h"
#include "phantom/device/phantom_device.h"

namespace lowtide::phantom {
namespace {

constexpr std::int64_t kStateBytes = 16;

// splitmix64's finalizer: neighbouring offsets give unrelated seeds.
std::uint64_t mix(std::uint64_t seed, std::uint64_t offset) {
  std::uint64_t value = seed + 0x9E3779B97F4A7C15ULL * (offset + 1);
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ULL;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBULL;
  return value ^ (value >> 31);
}

}  // namespace

PhantomGenerator::PhantomGenerator(std::uint64_t seed)
    : GeneratorImpl(kPhantomDevice,
                    c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      host_(at::detail::createCPUGenerator(seed)),
      seed_(seed) {}

void PhantomGenerator::set_current_seed(std::uint64_t seed) {
  seed_ = seed;
  offset_ = 0;
  host_.set_current_seed(seed);
}

void PhantomGenerator::set_offset(std::uint64_t offset) {
  restore({seed_, offset});
}

std::uint64_t PhantomGenerator::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return seed_;
}

void PhantomGenerator::restore(Key key) {
  std::tie(seed_, offset_) = key;
  const auto known = remembered_->find(key);
  if (known != remembered_->end()) {
    host_.set_state(known->second);
  } else {
    host_.set_current_seed(offset_ == 0 ? seed_ : mix(seed_, offset_));
  }
}

void PhantomGenerator::set_state(const c10::TensorImpl& state) {
  if (state.numel() != kStateBytes || state.dtype() != at::kByte ||
      state.device_type() != c10::DeviceType::CPU) {
    throw InvalidArgument(base::error_text(
        "phantom generator", "a state of 16 bytes on the CPU",
        base::concat(state.numel(), " elements of ", state.dtype().name(),
                     " on ", state.device()),
        "Pass what get_state() returned on this device."));
  }
  Key key;
  const auto* bytes = static_cast<const char*>(state.data());
  std::memcpy(&key.first, bytes, sizeof key.first);
  std::memcpy(&key.second, bytes + sizeof key.first, sizeof key.second);
  restore(key);
}

c10::intrusive_ptr<c10::TensorImpl> PhantomGenerator::get_state() const {
  while (remembered_->size() >= kRemembered) {
    remembered_->erase(remembered_->begin());
  }
  (*remembered_)[{seed_, offset_}] = host_.get_state();
  const auto state = at::empty({kStateBytes}, at::kByte);
  auto* const bytes = static_cast<char*>(state.mutable_data_ptr());
  std::memcpy(bytes, &seed_, sizeof seed_);
  std::memcpy(bytes + sizeof seed_, &offset_, sizeof offset_);
  return state.getIntrusivePtr();
}

PhantomGenerator* PhantomGenerator::clone_impl() const {
  auto copy = std::make_unique<PhantomGenerator>(seed_);
  copy->host_ = host_.clone();
  copy->offset_ = offset_;
  copy->remembered_ = remembered_;
  return copy.release();
}

const at::Generator& default_generator() {
  static const auto* generator =
      std::make_unique<at::Generator>(at::make_generator<PhantomGenerator>())
          .release();
  return *generator;
}

PhantomGenerator& phantom_generator(const at::Generator& generator) {
  auto* const impl =
      dynamic_cast<PhantomGenerator*>(generator.unsafeGetGeneratorImpl());
  LOWTIDE_INVARIANT(impl != nullptr, "generators of this device are ours");
  return *impl;
}

}  // namespace lowtide::phantom
