// Random numbers of the simulated device: those of torch's CPU generator, so
// that exact mode draws what a CPU run draws.
#pragma once

#include <ATen/core/Generator.h>

#include <map>
#include <memory>
#include <utility>

namespace lowtide::phantom {

// [Note: Generator state]
// torch treats a device generator's state as 16 bytes, a seed and an offset
// that counts what was drawn: DTensor moves the offset to give every rank its
// own numbers, checkpointing saves and restores it.  The CPU generator's state
// is 5 kB and cannot be reached by an offset.  So a state that this generator
// has handed out is remembered and restored in full, and any other pair of seed
// and offset starts a sequence of its own, the same in every process.
class PhantomGenerator final : public c10::GeneratorImpl {
 public:
  explicit PhantomGenerator(std::uint64_t seed = c10::default_rng_seed_val);

  // For kernels; the caller holds `mutex_` and calls `drawn` afterwards.
  at::Generator& host() { return host_; }
  void drawn() { offset_ += kStep; }

  void set_current_seed(std::uint64_t seed) override;
  void set_offset(std::uint64_t offset) override;
  std::uint64_t get_offset() const override { return offset_; }
  std::uint64_t current_seed() const override { return seed_; }
  std::uint64_t seed() override;
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

 private:
  using Key = std::pair<std::uint64_t, std::uint64_t>;

  // CUDA's offsets are multiples of 4, which DTensor relies on.
  static constexpr std::uint64_t kStep = 4;
  static constexpr std::size_t kRemembered = 4096;

  PhantomGenerator* clone_impl() const override;
  void restore(Key key);

  at::Generator host_;
  std::uint64_t seed_;
  std::uint64_t offset_ = 0;
  // Shared with clones: a state that one of them has handed out is restored by
  // another.
  std::shared_ptr<std::map<Key, at::Tensor>> remembered_ =
      std::make_shared<std::map<Key, at::Tensor>>();
};

// Of the device; owned by the library.
const at::Generator& default_generator();

PhantomGenerator& phantom_generator(const at::Generator& generator);

}  // namespace lowtide::phantom
