#include "memory/device_memory.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "base/wrapped_bytes.h"
#include "device/allocation_observer.h"

namespace lowtide::memory {
namespace {

// What the DataPtr of a lease owns.
struct Lease {
  std::shared_ptr<device::Runtime> runtime;
  std::shared_ptr<Ledger> ledger;
  c10::DataPtr bytes;
  Category category;
  std::string name;
  std::int64_t num_bytes;
  bool poison;
};

// On compute, whose pool the bytes come from and go back to: another stream's
// fill could hit what an earlier kernel of compute still uses.
void fill_with_nan(device::Runtime& runtime, void* begin, std::int64_t bytes) {
  const device::StreamScope scope(runtime, device::Stream::compute);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::from_blob(begin, {bytes},
                at::TensorOptions(at::kByte).device(runtime.device()))
      .fill_(0xFF);
}

// Runs wherever the last reference dies, on any thread: logs, never throws.
void release(void* context) {
  const std::unique_ptr<Lease> lease(static_cast<Lease*>(context));
  try {
    lease->ledger->remove(lease->category, lease->name, lease->num_bytes);
    const device::UnobservedAllocations unobserved;
    if (lease->poison) {
      fill_with_nan(*lease->runtime, lease->bytes.get(), lease->num_bytes);
    }
    lease->bytes.clear();
  } catch (const std::exception& error) {
    LOG(ERROR) << "lowtide: giving back " << lease->num_bytes << " bytes of "
               << category_name(lease->category) << " of '" << lease->name
               << "' failed: " << error.what();
  }
}

const base::Wrapping kLeases(&release, [](void* lease) {
  return &static_cast<Lease*>(lease)->bytes;
});

std::string shortage(Category category, std::string_view name,
                     std::int64_t bytes) {
  return base::error_text(
      base::concat(category_name(category), " of '", name, "'"),
      base::concat(bytes, " bytes"), "no memory for them",
      "Save fewer activations, shard over more ranks or make smaller units; "
      "lowtide.memory_report() and `lowtide plan` show what takes how much.");
}

}  // namespace

DeviceMemory::DeviceMemory(std::shared_ptr<device::Runtime> runtime,
                           std::shared_ptr<Ledger> ledger)
    : runtime_(std::move(runtime)), ledger_(std::move(ledger)) {
  LOWTIDE_INVARIANT(runtime_ != nullptr && ledger_ != nullptr,
                    "device memory has a runtime and a ledger");
}

c10::DataPtr DeviceMemory::lease(Category category, std::string_view name,
                                 std::int64_t bytes) {
  LOWTIDE_INVARIANT(bytes >= 0, "a lease is not negative");
  if (bytes == 0) return {nullptr, runtime_->device()};
  {
    const std::lock_guard lock(mutex_);
    if (fault_ && fault_->category == category && fault_->name == name) {
      fault_.reset();
      throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__},
                                  shortage(category, name, bytes));
    }
  }
  auto lease = std::make_unique<Lease>();
  lease->runtime = runtime_;
  lease->ledger = ledger_;
  lease->category = category;
  lease->name = name;
  lease->num_bytes = bytes;
  lease->poison = poison_;
  {
    const device::UnobservedAllocations unobserved;
    try {
      lease->bytes = runtime_->allocate(static_cast<std::size_t>(bytes));
    } catch (c10::Error& error) {  // of the device's own type
      error.add_context(shortage(category, name, bytes));
      throw;
    } catch (const std::bad_alloc&) {
      throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__},
                                  shortage(category, name, bytes));
    }
  }
  void* const data = lease->bytes.get();
  if (lease->poison) {
    fill_with_nan(*runtime_, data, bytes);
  }
  runtime_->describe(data, category_name(category), name);
  ledger_->add(category, name, bytes, data);
  return {data, lease.release(), &release, runtime_->device()};
}

std::optional<DeviceMemory::Asked> DeviceMemory::asked_for(
    const c10::DataPtr& bytes) {
  if (bytes.get_deleter() != &release) return std::nullopt;
  const auto& lease = *static_cast<const Lease*>(bytes.get_context());
  return Asked{lease.category, lease.name};
}

void DeviceMemory::fail_next_lease(Category category, std::string name) {
  const std::lock_guard lock(mutex_);
  fault_ = Fault{category, std::move(name)};
}

}  // namespace lowtide::memory
