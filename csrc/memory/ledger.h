// Who holds how many bytes.  Every buffer of lowtide's is leased under a
// category and a name; the ledger adds on lease and subtracts when the last
// reference to the bytes dies, so its figures are exact.
//
// Thread-safe: the autograd engine leases from its own threads.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace lowtide::memory {

enum class Category : std::uint8_t {
  parameters,         // sharded masters, for the lifetime of the model
  gathered,           // full parameters of a unit while it is unsharded
  gather_input,       // this rank's shard in the compute dtype, during a gather
  gradient_stream,    // ring of chunks on their way to the reduce-scatter
  gradient_slab,      // flat unreduced gradients accumulated without sync
  sharded_gradients,  // flat reduced gradients, what `.grad` shows
  activations,        // offloaded values on the host, or copied back
};
inline constexpr std::size_t kNumCategories = 7;

std::string_view category_name(Category category);  // "gathered", ...
// The inverse; throws lowtide::InvalidArgument listing the names.
Category category_of(std::string_view name);

// Bytes per category, indexed by static_cast<size_t>(category).
using Bytes = std::array<std::int64_t, kNumCategories>;

class Ledger {
 public:
  // `bytes` > 0.  `name` is the unit's module path, or the buffer's own name;
  // `begin` only goes into the log.
  void add(Category category, std::string_view name, std::int64_t bytes,
           const void* begin = nullptr);
  void remove(Category category, std::string_view name, std::int64_t bytes);

  Bytes live() const;
  std::int64_t total_live() const;

  // Since construction or the last reset_peaks().
  Bytes peak() const;               // each category at its own worst moment
  std::int64_t total_peak() const;  // the worst moment of the sum
  Bytes at_total_peak() const;      // the categories at that moment
  std::int64_t num_leases(Category category) const;
  void reset_peaks();  // peaks become what is live now, lease counts zero

  struct Named {
    std::int64_t live = 0;
    std::int64_t peak = 0;
  };
  std::map<std::string, Named> by_name(Category category) const;

  // Which lease got which address, in order: how `lowtide plan` knows what an
  // allocation is.  From the first call on every lease is kept until the next.
  struct Logged {
    const void* begin;
    Category category;
    std::string name;
  };
  std::vector<Logged> take_log();

  // Called after every change, under the ledger's lock, with the bytes live
  // by category; must not call back into the ledger.  One observer at a time:
  // a second one throws lowtide::Error, an empty function removes the first.
  void observe(std::function<void(const Bytes& live)> observer);

 private:
  mutable std::mutex mutex_;
  Bytes live_{};
  Bytes peak_{};
  Bytes leases_{};
  Bytes at_total_peak_{};
  std::int64_t total_live_ = 0;
  std::int64_t total_peak_ = 0;
  std::array<std::map<std::string, Named, std::less<>>, kNumCategories> names_;
  std::function<void(const Bytes&)> observer_;
  bool logs_ = false;
  std::vector<Logged> log_;
};

}  // namespace lowtide::memory
