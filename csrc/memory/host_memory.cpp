#include "memory/host_memory.h"

#include <c10/util/Logging.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <utility>

#include "base/check.h"

namespace lowtide::memory {

using device::Stream;

namespace {

void add(std::vector<c10::Stream>& streams, c10::Stream stream) {
  if (std::ranges::find(streams, stream) == streams.end()) {
    streams.push_back(stream);
  }
}

}  // namespace

// What the DataPtr of a lease owns.
struct HostMemory::Lease {
  std::shared_ptr<HostMemory> host;
  HostSlot slot;
  std::vector<c10::Stream> users;  // torch's copies ran there
};

const base::HostUses HostMemory::kLeases(&release, &use);

HostMemory::HostMemory(std::shared_ptr<device::Runtime> runtime,
                       std::shared_ptr<PinnedPool> pool, bool page_locked)
    : runtime_(std::move(runtime)),
      pool_(std::move(pool)),
      page_locked_(page_locked) {
  LOWTIDE_INVARIANT(runtime_ != nullptr && pool_ != nullptr,
                    "host memory has a runtime and a pool");
}

HostMemory::~HostMemory() {
  try {
    wait();
  } catch (const std::exception& error) {
    LOG(ERROR) << "lowtide: waiting for copies failed: " << error.what();
  }
}

c10::DataPtr HostMemory::lease(Category category, std::string_view name,
                               std::int64_t num_bytes) {
  const c10::Device cpu(c10::DeviceType::CPU);
  if (num_bytes == 0) return {nullptr, cpu};
  make_ready(category);
  auto lease = std::make_unique<Lease>(
      Lease{shared_from_this(),
            pool_->acquire(name, num_bytes, category, page_locked_),
            {}});
  void* const data = lease->slot.data();
  return {data, lease.release(), &release, cpu};
}

bool HostMemory::leased(const c10::DataPtr& bytes) {
  return bytes.get_deleter() == &release;
}

// Runs wherever the last reference dies, on any thread.
void HostMemory::release(void* context) {
  const std::unique_ptr<Lease> lease(static_cast<Lease*>(context));
  const auto host = lease->host;
  host->give_back(std::move(*lease));
}

void HostMemory::use(void* context, c10::Stream stream) {
  auto& lease = *static_cast<Lease*>(context);
  const std::lock_guard lock(lease.host->mutex_);
  add(lease.users, stream);
}

void HostMemory::give_back(Lease lease) {
  const std::lock_guard lock(mutex_);
  for (const auto stream : lease.users) add(users_, stream);
  if (reads_ || writes_) {
    given_back_.push_back(std::move(lease.slot));
  } else if (!lease.users.empty()) {
    left_to_users_.push_back(std::move(lease.slot));
  }
}

void HostMemory::make_ready(Category category) {
  std::vector<HostSlot> unused;
  const std::lock_guard lock(mutex_);
  unused = follow_users();
  if (category == Category::parameters && std::exchange(follows_, false)) {
    runtime_->synchronize(Stream::offload);
  }
}

std::vector<HostSlot> HostMemory::follow_users() {
  const auto followed = std::erase_if(users_, [&](c10::Stream stream) {
    return runtime_->follow(Stream::offload, stream);
  });
  follows_ = follows_ || followed != 0;
  if (!users_.empty()) return {};
  return std::exchange(left_to_users_, {});
}

device::Event HostMemory::copy(Stream behind, Stream on, void* to,
                               const void* from, std::int64_t num_bytes,
                               device::Copy direction) {
  const std::lock_guard lock(mutex_);
  (direction == device::Copy::to_host ? writes_ : reads_) = true;
  if (runtime_->capturing()) {
    throw Error(base::error_text(
        "offload_policy", "steps outside of a graph capture", "one inside",
        "The host has a part in every step of an offloaded model: run it "
        "without a graph."));
  }
  runtime_->wait(on, runtime_->record(behind));
  runtime_->copy(on, to, from, static_cast<std::size_t>(num_bytes), direction);
  return runtime_->record(on);
}

device::Event HostMemory::to_device(void* to, const void* from,
                                    std::int64_t num_bytes) {
  return copy(Stream::compute, Stream::reload, to, from, num_bytes,
              device::Copy::to_device);
}

device::Event HostMemory::to_host(void* to, const void* from,
                                  std::int64_t num_bytes) {
  return copy(runtime_->current(), Stream::offload, to, from, num_bytes,
              device::Copy::to_host);
}

void HostMemory::wait() {
  std::vector<HostSlot> unused;
  const std::lock_guard lock(mutex_);
  if (std::exchange(writes_, false)) runtime_->synchronize(Stream::offload);
  if (std::exchange(reads_, false)) runtime_->synchronize(Stream::reload);
  std::ranges::move(std::exchange(given_back_, {}),
                    std::back_inserter(left_to_users_));
  unused = follow_users();
}

}  // namespace lowtide::memory
