// One unit's ParameterBuffers on a scripted device.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <optional>

#include "shard/parameters/parameter_buffers.h"
#include "testing/recording_collectives.h"
#include "testing/scripted_runtime.h"

namespace lowtide::shard {

class BuffersFixture : public testing::Test {
 protected:
  void gather_and_arrive() {
    const auto pending = buffers_->gather(*collectives_);
    pending->wait();
    buffers_->unpack();
    buffers_->arrived();
  }

  std::int64_t live(memory::Category category) const {
    return ledger_->live()[static_cast<std::size_t>(category)];
  }

  std::shared_ptr<device::ScriptedRuntime> runtime_ =
      std::make_shared<device::ScriptedRuntime>();
  std::shared_ptr<memory::Ledger> ledger_ = std::make_shared<memory::Ledger>();
  std::shared_ptr<memory::DeviceMemory> memory_ =
      std::make_shared<memory::DeviceMemory>(runtime_, ledger_);
  std::optional<comm::RecordingCollectives> collectives_;
  std::optional<ParameterBuffers> buffers_;
};

}  // namespace lowtide::shard
