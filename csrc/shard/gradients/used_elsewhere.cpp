#include "shard/gradients/used_elsewhere.h"

#include <utility>

#include "base/check.h"
#include "shard/storage.h"

namespace lowtide::shard {

void UsedElsewhere::ask(std::vector<std::int32_t> parameters,
                        std::vector<std::int32_t> columns,
                        const at::Tensor& flags) {
  auto& runtime = memory_->runtime();
  if (runtime.capturing()) {
    throw Error(base::error_text(
        base::concat("unit '", *unit_, "'"),
        "a gradient of every parameter in a step that a graph captures",
        "none of some: whether other ranks have one is read by the host",
        "Call set_reduce_scatter_unused_params(True) on the module: they get "
        "zeros then."));
  }
  if (num_asked_ == asked_.size()) asked_.emplace_back();
  auto& asked = asked_[num_asked_];
  const auto bytes = flags.nbytes();
  if (asked.capacity < bytes) {
    asked.bytes = runtime.allocate_pinned(bytes);
    if (!asked.bytes) {
      asked.bytes = at::getCPUAllocator()->allocate(bytes);
    }
    asked.capacity = bytes;
  }
  runtime.copy(runtime.current(), asked.bytes.get(), flags.const_data_ptr(),
               bytes, device::Copy::to_host);
  asked.flags = at::from_blob(asked.bytes.get(), {flags.numel()},
                              at::dtype(flags.scalar_type()));
  asked.parameters = std::move(parameters);
  asked.columns = std::move(columns);
  ++num_asked_;
}

std::set<std::int32_t> UsedElsewhere::parameters() {
  std::set<std::int32_t> used;
  if (num_asked_ == 0) return used;
  memory_->runtime().synchronize(device::Stream::reduce);
  for (std::size_t a = 0; a < num_asked_; ++a) {
    const auto& asked = asked_[a];
    const auto flags = asked.flags.to(at::kFloat);
    const auto* const values = flags.const_data_ptr<float>();
    for (std::size_t k = 0; k < asked.parameters.size(); ++k) {
      if (values[asked.columns[k]] != 0.0F) used.insert(asked.parameters[k]);
    }
  }
  return used;
}

}  // namespace lowtide::shard
