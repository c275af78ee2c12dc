#include "phantom/device/cublas_workspace.h"

#include <c10/core/Allocator.h>

#include <map>
#include <memory>
#include <mutex>
#include <regex>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "phantom/device/device_allocator.h"
#include "phantom/device/phantom_device.h"

namespace lowtide::phantom {
namespace {

class Workspaces {
 public:
  int take_handle() {
    const std::lock_guard lock(mutex_);
    if (free_handles_.empty()) return num_handles_++;
    const int handle = *free_handles_.begin();
    free_handles_.erase(free_handles_.begin());
    return handle;
  }

  void return_handle(int handle) {
    const std::lock_guard lock(mutex_);
    free_handles_.insert(handle);
  }

  enum class Library { cublas, cublaslt };

  void hold(Library library, int handle, StreamId stream, std::size_t bytes) {
    if (bytes == 0) return;
    const Key key(library, handle, stream);
    {
      const std::lock_guard lock(mutex_);
      if (held_.count(key) > 0) return;
    }
    // Unlocked: out of memory is reported while nothing is held here.
    c10::DataPtr workspace = device_allocator().allocate(bytes);
    const std::lock_guard lock(mutex_);
    held_.emplace(key, std::move(workspace));
  }

  void clear() {
    std::map<Key, c10::DataPtr> released;
    const std::lock_guard lock(mutex_);
    released.swap(held_);
  }

 private:
  using Key = std::tuple<Library, int, StreamId>;

  std::mutex mutex_;
  int num_handles_ = 0;
  std::set<int> free_handles_;
  std::map<Key, c10::DataPtr> held_;
};

Workspaces& workspaces() {
  // Threads return their handles until the process ends.
  static auto* workspaces = std::make_unique<Workspaces>().release();
  return *workspaces;
}

struct ThreadHandle {
  ThreadHandle() : handle(workspaces().take_handle()) {}
  ~ThreadHandle() { workspaces().return_handle(handle); }
  ThreadHandle(const ThreadHandle&) = delete;
  ThreadHandle& operator=(const ThreadHandle&) = delete;
  const int handle;
};

void hold(Workspaces::Library library, std::size_t bytes) {
  thread_local const ThreadHandle mine;
  workspaces().hold(library, mine.handle, current_stream(), bytes);
}

}  // namespace

void hold_cublas_workspace() {
  hold(Workspaces::Library::cublas,
       phantom_device().options().cublas_workspace);
}

void hold_cublaslt_workspace() {
  hold(Workspaces::Library::cublaslt,
       phantom_device().options().cublaslt_workspace);
}

void clear_cublas_workspaces() { workspaces().clear(); }

std::size_t cublas_workspace_bytes(std::string_view config) {
  static const std::regex part(":([0-9]{1,9}):([0-9]{1,9})");
  const std::string text(config);
  std::size_t bytes = 0;
  for (std::sregex_iterator match(text.begin(), text.end(), part), end;
       match != end; ++match) {
    bytes += std::stoull((*match)[1]) * 1024 * std::stoull((*match)[2]);
  }
  if (bytes == 0) {
    throw InvalidArgument(base::error_text(
        "CUBLAS_WORKSPACE_CONFIG", "':KiB:count', once or several times",
        base::concat("'", config, "'"),
        "Set it to ':4096:8' for instance, or unset it."));
  }
  return bytes;
}

}  // namespace lowtide::phantom
