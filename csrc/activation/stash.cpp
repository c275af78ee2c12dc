#include "activation/stash.h"

#include <c10/core/StreamGuard.h>
#include <c10/util/Logging.h>

#include <exception>
#include <utility>

#include "base/check.h"
#include "base/tensor_over.h"
#include "device/current_stream.h"

namespace lowtide::activation {

using device::Access;
using device::Stream;

Stash::Stash(Memories memories, std::string name, const at::Tensor& tensor)
    : memories_(std::move(memories)),
      name_(std::move(name)),
      identity_(c10::weak_intrusive_ptr<c10::StorageImpl>(
          tensor.storage().getWeakStorageImpl())),
      counter_(tensor.unsafeGetTensorImpl()->version_counter()),
      version_(counter_.current_version()),
      num_bytes_(static_cast<std::int64_t>(tensor.storage().nbytes())),
      home_(device::current_stream(tensor.device())),
      source_(tensor.storage()) {}

Stash::~Stash() {
  try {
    let_go();
    drop_fetched();
  } catch (const std::exception& error) {
    LOG(ERROR) << "lowtide: giving back the stash of '" << name_
               << "' failed: " << error.what();
  }
}

Place Stash::place() const {
  const std::lock_guard lock(mutex_);
  if (source_) return slot_ ? Place::leaving : Place::kept;
  return fetched_ ? Place::back : Place::host;
}

bool Stash::is_of(const at::Tensor& tensor) const {
  const auto storage = identity_.lock();
  return storage && storage.get() == tensor.storage().unsafeGetStorageImpl() &&
         tensor._version() == version_ && !modified();
}

bool Stash::modified() const { return counter_.current_version() != version_; }

void Stash::copy_out(const device::Event& ready) {
  const std::lock_guard lock(mutex_);
  if (slot_ || !source_) return;
  slot_ = memories_.host->acquire(name_, num_bytes_);
  runtime().wait(Stream::offload, ready);
  slot_.wait_for_last_use(Stream::offload);
  runtime().copy(Stream::offload, slot_.data(), source_.data(),
                 static_cast<std::size_t>(num_bytes_), device::Copy::to_host);
  copied_out_ = runtime().record(Stream::offload);
}

void Stash::let_go() {
  c10::Storage released;  // destroyed after the lock is
  const std::lock_guard lock(mutex_);
  if (!slot_ || !source_) return;
  const c10::StreamGuard home(home_);
  memories_.waits->wait(runtime(), copied_out_);
  released = std::move(source_);
}

void Stash::fetch() {
  const std::lock_guard lock(mutex_);
  fetch_locked();
}

void Stash::fetch_locked() {
  if (source_ || fetched_) return;
  LOWTIDE_INVARIANT(slot_, "a stash without device bytes is on the host");
  c10::DataPtr data =
      memories_.device->lease(memory::Category::activations, name_, num_bytes_);
  runtime().wait(Stream::reload, runtime().record(Stream::compute));
  // `let_go` had compute wait for this, but maybe another thread's compute.
  runtime().wait(Stream::reload, copied_out_);
  runtime().copy(Stream::reload, data.mutable_get(), slot_.data(),
                 static_cast<std::size_t>(num_bytes_), device::Copy::to_device);
  copied_back_ = runtime().record(Stream::reload);
  slot_.set_last_use(copied_back_);
  awaited_ = false;
  fetched_ = base::owning_storage(std::move(data), num_bytes_);
}

c10::Storage Stash::on_device() {
  const std::lock_guard lock(mutex_);
  if (source_) return source_;
  fetch_locked();
  await_copy_back();
  return fetched_;
}

void Stash::await_copy_back() {
  if (std::exchange(awaited_, true)) return;
  memories_.waits->wait(runtime(), copied_back_);
}

void Stash::drop_fetched() {
  c10::Storage released;
  const std::lock_guard lock(mutex_);
  if (!fetched_) return;
  await_copy_back();
  released = std::move(fetched_);
}

}  // namespace lowtide::activation
