#include "shard/parameters/turned_parameters.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <utility>

namespace lowtide::shard {

TurnedParameters::TurnedParameters(UnitName unit,
                                   std::shared_ptr<memory::DeviceMemory> memory)
    : unit_(std::move(unit)), memory_(std::move(memory)) {}

at::Tensor TurnedParameters::add(std::size_t index, const ParameterInfo& info,
                                 std::int64_t ranks) {
  const auto dtype = info.compute_dtype;
  const auto [outer, parts, width] = info.split(ranks);
  const auto bytes = outer * parts * width * itemsize(dtype);
  const auto device = memory_->runtime().device();
  RepointedStorage arriving(device);
  RepointedStorage place(device);
  const std::int64_t sizes[] = {outer, parts, width};
  const std::int64_t as_they_arrive[] = {width, outer * width, 1};
  const std::int64_t in_place[] = {parts * width, width, 1};
  auto from = arriving.view(dtype, sizes, as_they_arrive);
  auto to = place.view(dtype, sizes, in_place);
  auto written = arriving.view(at::kByte, {bytes}, {1});
  turned_.push_back({index, bytes, std::move(arriving), std::move(place),
                     std::move(from), std::move(to)});
  bytes_ += bytes;
  return written;
}

void TurnedParameters::lease_arriving() {
  try {
    for (auto& turned : turned_) {
      turned.arriving.own(
          memory_->lease(memory::Category::gather_input, *unit_, turned.bytes),
          turned.bytes);
    }
  } catch (...) {
    drop_arriving();
    throw;
  }
}

void TurnedParameters::put_in_place() {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto& runtime = memory_->runtime();
  for (auto& turned : turned_) {
    if (turned.arriving.data() == nullptr) continue;
    if (turned.place.data() == nullptr) {
      turned.place.own(
          memory_->lease(memory::Category::gathered, *unit_, turned.bytes),
          turned.bytes);
    }
    const auto bytes = static_cast<std::size_t>(turned.bytes);
    runtime.touches(device::Stream::compute, turned.arriving.data(), bytes,
                    device::Access::read);
    runtime.touches(device::Stream::compute, turned.place.data(), bytes,
                    device::Access::write);
    turned.to.copy_(turned.from);
    turned.arriving.unbind();
  }
}

void TurnedParameters::drop_arriving() {
  for (auto& turned : turned_) turned.arriving.unbind();
}

void TurnedParameters::lease_places() {
  std::vector<c10::DataPtr> leases;
  for (const auto& turned : turned_) {
    leases.push_back(
        turned.place.data() != nullptr
            ? c10::DataPtr()
            : memory_->lease(memory::Category::gathered, *unit_, turned.bytes));
  }
  for (std::size_t k = 0; k < turned_.size(); ++k) {
    auto& turned = turned_[k];
    if (turned.place.data() == nullptr) {
      turned.place.own(std::move(leases[k]), turned.bytes);
    }
  }
}

void TurnedParameters::drop() {
  for (auto& turned : turned_) turned.place.unbind();
}

void TurnedParameters::append_runs(std::vector<KeptPart::Run>& runs) const {
  for (const auto& turned : turned_) {
    runs.push_back({&turned.place, 0, turned.bytes});
  }
}

}  // namespace lowtide::shard
