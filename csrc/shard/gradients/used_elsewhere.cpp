#include "shard/gradients/used_elsewhere.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/check.h"
#include "shard/storage.h"

namespace lowtide::shard {

UsedElsewhere::Used UsedElsewhere::Asked::used() const {
  Used used;
  const auto numbers = flags.to(at::kFloat);
  const auto* const values = numbers.const_data_ptr<float>();
  for (std::size_t k = 0; k < parameters.size(); ++k) {
    if (values[columns[k]] != 0.0F) used.insert(parameters[k]);
  }
  return used;
}

void UsedElsewhere::Asked::hold(const at::Tensor& like) {
  flags =
      at::from_blob(bytes.get(), {like.numel()}, at::dtype(like.scalar_type()));
}

void UsedElsewhere::ask(std::vector<std::int32_t> parameters,
                        std::vector<std::int32_t> columns,
                        const at::Tensor& flags) {
  ever_asked_ = true;
  auto& runtime = memory_->runtime();
  if (runtime.capturing()) {
    capture(std::move(parameters), std::move(columns), flags);
    return;
  }
  if (num_asked_ == asked_.size()) asked_.emplace_back();
  auto& asked = asked_[num_asked_++];
  const auto bytes = flags.nbytes();
  if (asked.capacity < bytes) {
    asked.bytes = runtime.allocate_pinned(bytes);
    if (!asked.bytes) {
      asked.bytes = at::getCPUAllocator()->allocate(bytes);
    }
    asked.capacity = bytes;
  }
  asked.parameters = std::move(parameters);
  asked.columns = std::move(columns);
  asked.hold(flags);
  copy(flags, asked);
}

void UsedElsewhere::expect(std::vector<std::int32_t> parameters,
                           std::vector<std::int32_t> columns,
                           const at::Tensor& flags) {
  if (memory_->runtime().capturing()) {
    capture(std::move(parameters), std::move(columns), flags);
    return;
  }
  expected_.push_back(std::move(parameters));
}

void UsedElsewhere::told(const std::function<bool(std::int32_t)>& used) {
  for (auto& parameters : expected_) {
    Used of_these;
    std::ranges::copy_if(parameters, std::inserter(of_these, of_these.end()),
                         used);
    known_used_.insert(of_these.begin(), of_these.end());
    answers_[std::move(parameters)] = std::move(of_these);
  }
  expected_.clear();
}

void UsedElsewhere::copy(const at::Tensor& flags, const Asked& asked) {
  auto& runtime = memory_->runtime();
  runtime.copy(runtime.current(), asked.bytes.get(), flags.const_data_ptr(),
               flags.nbytes(), device::Copy::to_host);
}

void UsedElsewhere::capture(std::vector<std::int32_t> parameters,
                            std::vector<std::int32_t> columns,
                            const at::Tensor& flags) {
  auto& runtime = memory_->runtime();
  const auto answer = answers_.find(parameters);
  auto bytes = answer != answers_.end()
                   ? runtime.allocate_pinned(flags.nbytes())
                   : c10::DataPtr();
  if (!bytes) {
    throw Error(base::error_text(
        base::concat("unit '", *unit_, "'"),
        "a gradient of every parameter in a step that a graph captures",
        "none of some: whether other ranks have one is read by the host",
        "Run the same step once before it is captured, or call "
        "set_reduce_scatter_unused_params(True) on the module: they get zeros "
        "then."));
  }
  Captured captured{{std::move(parameters),
                     std::move(columns),
                     {},
                     std::move(bytes),
                     flags.nbytes()},
                    answer->second};
  auto& asked = captured.asked;
  asked.hold(flags);
  // Until the first replay.
  asked.flags.zero_();
  for (std::size_t k = 0; k < asked.parameters.size(); ++k) {
    if (captured.used.contains(asked.parameters[k])) {
      asked.flags[asked.columns[k]].fill_(1);
    }
  }
  copy(flags, asked);
  known_used_.insert(captured.used.begin(), captured.used.end());
  captured_.push_back(std::move(captured));
}

std::set<std::int32_t> UsedElsewhere::parameters() {
  LOWTIDE_INVARIANT(expected_.empty(), "hosts have told what they were to");
  auto used = known_used_;
  if (num_asked_ == 0) return used;
  memory_->runtime().synchronize(device::Stream::reduce);
  for (std::size_t a = 0; a < num_asked_; ++a) {
    const auto of_these = asked_[a].used();
    used.insert(of_these.begin(), of_these.end());
    answers_[asked_[a].parameters] = of_these;
  }
  return used;
}

std::optional<std::int32_t> UsedElsewhere::changed() const {
  for (const auto& [asked, expected] : captured_) {
    const auto used = asked.used();
    for (const auto i : asked.parameters) {
      if (used.contains(i) != expected.contains(i)) return i;
    }
  }
  return {};
}

}  // namespace lowtide::shard
