// One forward of a checkpointed region, and its recomputation in backward.
//
// The bindings run the forward between begin_forward and end_forward, and hand
// every tensor autograd saves meanwhile to `pack`.  Nothing of it is stored:
// the first `unpack` in a backward runs the forward again from the stored
// inputs, up to the last tensor still needed.
//
// [Note: One recomputation per backward] Values computed again belong to the
// graph task that asked for them: concurrent and repeated backwards do not see
// each other's.  A value leaves when it is unpacked or when the node that saved
// it is gone; what is left, when the graph task ends, whether it succeeded or
// not.
//
// Thread-safe.  `unpack` runs the forward without holding a lock.
#pragma once

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "activation/forward_state.h"
#include "activation/held_value.h"
#include "activation/region.h"

namespace lowtide::activation {

class Frame;

// The values one recomputation gives.
class Recomputation : public std::enable_shared_from_this<Recomputation> {
 public:
  Recomputation(const Frame& frame, std::vector<bool> needed);

  // Called for every tensor autograd saves, without its history; true: nothing
  // behind this one is needed, stop here.
  bool pack(const at::Tensor& bare);
  std::size_t num_packed() const { return next_; }

 private:
  friend class Frame;
  struct Value {
    at::Tensor tensor;
    std::optional<SeenVersion> version;
  };

  const Frame& frame_;
  const std::vector<bool> needed_;
  std::size_t end_ = 0;  // behind the last needed one
  std::size_t next_ = 0;
  std::vector<Value> values_;
};

// Runs a forward again; what the bindings know.
class Replay {
 public:
  virtual ~Replay() = default;
  // Where the forward runs if all of its arguments are on the host: its hooks
  // may move them.
  virtual c10::Device device() const { return c10::Device(c10::kCPU); }
  // With grad mode on and autocast and generators restored: runs the forward on
  // `inputs`, giving `recomputation` every tensor autograd saves, and stops
  // quietly where it says so.
  virtual void run(const std::vector<at::Tensor>& inputs,
                   Recomputation& recomputation) = 0;
};

class Frame : public std::enable_shared_from_this<Frame> {
 public:
  // Before the forward, with its tensor arguments: takes hold of them.
  Frame(std::shared_ptr<Region> region, const std::vector<at::Tensor>& inputs,
        std::unique_ptr<Replay> replay);

  const std::shared_ptr<Region>& region() const { return region_; }
  // Made while an enclosing region is computed again: stores and counts
  // nothing.
  bool nested_recomputation() const { return nested_recomputation_; }

  // --- forward -------------------------------------------------------------
  // Returns the place of a saved tensor.
  std::size_t pack(const at::Tensor& tensor);
  std::size_t num_saved() const;

  // Told of a named value that is none of the inputs, and why it is too small
  // to be stored, if it is; answers with `store` or `refuse`.  Lives during the
  // forward.
  using Watcher = std::function<void(const at::Tensor&, const std::string&,
                                     const std::string& too_small)>;
  void watch_interior(Watcher watcher) { watcher_ = std::move(watcher); }
  void name_value(const at::Tensor& tensor, const std::string& name);
  // Stores what one operator returned, of which `name` is one; the number is
  // `stored`'s, or -1 when the policy leaves it alone.
  std::int64_t store(const std::string& name,
                     const std::vector<at::Tensor>& outputs);
  void refuse(const std::string& name, const std::string& reason);
  // `name` is another one for what `store` was given under `number`.  Throws
  // lowtide::Error if the policy treats the two differently.
  void share(const std::string& name, std::int64_t number);

  // An operator wrote to what `store` was given under `number`, though its
  // version may not say so.  Throws lowtide::Error.
  [[noreturn]] void forbid_write(std::int64_t number,
                                 const std::string& writer) const;

  // After a forward that returned.  Throws lowtide::Error if an input or a
  // stored value was written to.
  void end_forward();

  // --- backward ------------------------------------------------------------
  // The tensor packed at `place`.  Throws lowtide::Error when it was written to
  // since, when the backward under way is to be differentiated itself
  // (`creates_graph`), or when the recomputation differs.
  at::Tensor unpack(std::size_t place, bool creates_graph = false);
  // Whether a recomputation needs what `store` was given under `number`.
  bool is_stored(std::int64_t number) const;
  // What it was given, inside a recomputation.
  std::vector<at::Tensor> stored(std::int64_t number) const;
  // The node that saved `place` is gone.
  void drop(std::size_t place);

  // Makes a frame current on this thread.
  class Scope {
   public:
    Scope(Frame& frame, bool recomputing);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

    // The innermost one on this thread, or null.
    static const Scope* current();
    const Scope* outer() const { return outer_; }
    Frame& frame() const { return frame_; }
    bool recomputing() const { return recomputing_; }

   private:
    Frame& frame_;
    const bool recomputing_;
    Scope* const outer_;
  };

 private:
  friend class Recomputation;
  struct Saved {
    const c10::StorageImpl* storage;  // to compare, while its tensor lives
    at::DimVector sizes;
    at::ScalarType dtype;
    SeenVersion version;
    bool alive = true;
  };
  struct Stored {
    std::string name;
    std::vector<at::Tensor> tensors;  // until it is known whether it is needed
    std::vector<SeenVersion> versions;
    std::vector<HeldValue> values;
    device::Event ready;
  };

  // Empty for nested tensors, which have none.
  static at::DimVector sizes_of(const at::Tensor& tensor);
  void hold_input(const at::Tensor& input);
  std::vector<std::string> listed_names_of(const at::Tensor& input) const;
  bool is_saved(const at::Tensor& tensor) const;
  // Counts and, if the policy says so, moves `held`.
  void treat(HeldValue& held, const at::Tensor& tensor, const std::string& name,
             const device::Event* ready);
  void move(HeldValue& held, const at::Tensor& tensor, const std::string& name,
            const device::Event* ready);
  void count_kept(const at::Tensor& tensor, const std::string& name);
  void require_same_treatment(const std::string& first,
                              const std::string& second) const;
  void store_waiting();
  void check_unmodified() const;

  std::shared_ptr<Recomputation> recompute();
  static at::Tensor take(Recomputation& recomputation, std::size_t place);
  void check_same(std::size_t place, const at::Tensor& tensor) const;
  void forget_at_end_of(std::int64_t graph_task);
  [[noreturn]] void differs(const std::string& expected,
                            const std::string& got) const;

  const std::shared_ptr<Region> region_;
  const std::unique_ptr<Replay> replay_;
  const bool nested_recomputation_;
  const bool hooked_;  // saved-tensor hooks were active around it
  ForwardState state_;
  std::vector<HeldValue> inputs_;
  std::vector<Stored> stored_;
  std::size_t num_stored_ = 0;  // the others wait
  // Names that no watcher was told of, and how much was saved before them.
  std::vector<std::pair<std::string, std::size_t>> unwatched_;
  bool matched_ = false;
  bool interior_ = false;
  Watcher watcher_;
  std::shared_ptr<Batch> batch_;

  mutable std::mutex mutex_;
  std::vector<Saved> saved_;
  // By graph task.
  std::map<std::int64_t, std::shared_ptr<Recomputation>> recomputations_;
};

// `tensor` is called `name` from here on: in the book, and in the innermost
// region whose policy lists the name.
void name_value(NameBook& book, const at::Tensor& tensor,
                const std::string& name);

}  // namespace lowtide::activation
