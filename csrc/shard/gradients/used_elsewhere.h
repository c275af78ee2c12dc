// Which parameters that this rank left without a gradient others did not.
//
// Behind a reduction flags on the device say so (gradient_plan.h).  They are
// copied to the host as they come, which nobody waits for, and read at the end
// of the backward: there the host waits, once for each unit of which this rank
// left something out.  Where all ranks know of a unit that some leave
// parameters out, their hosts tell each other ([Note: Who has gradients])
// and nobody waits for a device.
//
// [Note: Questions in a graph]
// A graph captures no host that reads.  It repeats the step that warmed it up,
// so what that one was told of the same parameters is taken for the answer.
// Each replay copies its flags, too; when an optimizer has stepped those that
// have come are compared with it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "memory/device_memory.h"
#include "shard/unit_name.h"

namespace lowtide::shard {

class UsedElsewhere {
 public:
  UsedElsewhere(UnitName unit, std::shared_ptr<memory::DeviceMemory> memory)
      : unit_(std::move(unit)), memory_(std::move(memory)) {}

  // A new backward: nothing has been asked.
  void begin() {
    num_asked_ = 0;
    expected_.clear();
    known_used_.clear();
  }
  // flags[columns[k]], after the sum over ranks, is parameters[k]'s: copied on
  // the current stream.  Throws lowtide::Error inside a graph capture if no
  // backward in front of it has asked for the same parameters.
  void ask(std::vector<std::int32_t> parameters,
           std::vector<std::int32_t> columns, const at::Tensor& flags);
  // The hosts will tell of them: `told`, before `parameters`.  In a graph
  // capture as `ask`.
  void expect(std::vector<std::int32_t> parameters,
              std::vector<std::int32_t> columns, const at::Tensor& flags);
  void told(const std::function<bool(std::int32_t)>& used);
  // Asked for in any backward until now.
  bool ever_asked() const { return ever_asked_; }
  // Of those asked for since `begin`.  Blocks the host until they have come, if
  // any have been asked for.
  std::set<std::int32_t> parameters();
  // A parameter of which a graph that was replayed says another answer than
  // the one it was captured with.  Does not wait for replays.
  std::optional<std::int32_t> changed() const;

 private:
  using Used = std::set<std::int32_t>;
  struct Asked {
    std::vector<std::int32_t> parameters;
    std::vector<std::int32_t> columns;
    at::Tensor flags;  // on the host, over `bytes`, which stay
    c10::DataPtr bytes;
    std::size_t capacity = 0;

    void hold(const at::Tensor& like);
    Used used() const;
  };
  struct Captured {
    Asked asked;
    Used used;
  };
  void copy(const at::Tensor& flags, const Asked& asked);
  void capture(std::vector<std::int32_t> parameters,
               std::vector<std::int32_t> columns, const at::Tensor& flags);

  UnitName unit_;
  std::shared_ptr<memory::DeviceMemory> memory_;
  std::vector<Asked> asked_;  // the first num_asked_ in this backward
  std::size_t num_asked_ = 0;
  // What was last said of parameters that were asked for together.
  std::map<std::vector<std::int32_t>, Used> answers_;
  std::vector<Captured> captured_;  // whose bytes replays write
  // In this backward: of whom the hosts will tell, and who is known to be used
  // without a flag of the device.
  std::vector<std::vector<std::int32_t>> expected_;
  Used known_used_;
  bool ever_asked_ = false;
};

}  // namespace lowtide::shard
