// What all forwards of one checkpointed module share: its policy, where its
// values go, and what became of its names.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "activation/names.h"
#include "activation/transfer.h"

namespace lowtide::activation {

enum class Treatment : std::uint8_t { save, offload, recompute };

// The region's tensor arguments that require grad.
inline constexpr const char* kInputName = "input";
// An obstacle that says nothing of the policy: a batch without rows.
inline constexpr const char* kEmpty = "an empty tensor";

struct Policy {
  std::map<std::string, Treatment> names;
  std::int64_t min_bytes = 0;
  Window window;

  bool lists(Treatment treatment) const;
};

class Region {
 public:
  // Gives the transfers of a device; called once.
  using TransfersOf =
      std::function<std::shared_ptr<Transfers>(const c10::Device&)>;

  // `who` names the module in messages.
  Region(std::string who, Policy policy, std::shared_ptr<NameBook> book,
         TransfersOf transfers_of);

  const std::string& who() const { return who_; }
  void rename(std::string who) { who_ = std::move(who); }
  const Policy& policy() const { return policy_; }
  NameBook& book() { return *book_; }
  RegionFigures& figures() { return figures_; }
  // Null before a forward that offloads.
  const std::shared_ptr<Transfers>& transfers() const { return transfers_; }
  Transfers& transfers_on(const c10::Device& device);

  // Why `tensor`'s bytes are not stored; nothing if they can be.
  std::optional<std::string> obstacle(const at::Tensor& tensor,
                                      const std::string& name) const;
  // Of these reasons one that is not that there are too few, which may be so on
  // one rank and not on another.
  std::optional<std::string> unfit(const at::Tensor& tensor,
                                   const std::string& name) const;

  // Whether a tensor that does not require grad shows bytes of the module's
  // parameters or buffers.
  std::function<bool(const at::Tensor&)> is_state;

  // Values produced inside the forward are looked for: until one complete
  // forward has shown that all listed names are inputs, and again when one is
  // not.
  bool watches_interior = true;
  // Forwards that returned, without those of regions around that were computed
  // again, since the last reset.
  std::int64_t num_calls = 0;

 private:
  std::string who_;
  const Policy policy_;
  const std::shared_ptr<NameBook> book_;
  const TransfersOf transfers_of_;
  std::shared_ptr<Transfers> transfers_;
  RegionFigures figures_;
};

}  // namespace lowtide::activation
