#include "phantom/device/allocation_listener.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "phantom/device/stream_table.h"

namespace lowtide::phantom {
namespace {

// Those that run on this thread, outermost first.  Names live in schemas.
thread_local std::vector<std::string_view> running_operators;

std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& function) {
  running_operators.emplace_back(function.name());
  return nullptr;
}

void leave(const at::RecordFunction&, at::ObserverContext*) {
  // Entered before the listener was there.
  if (!running_operators.empty()) running_operators.pop_back();
}

// "aten::mm" is one, "PythonSubclass" and a node of autograd are not.
bool is_operator(std::string_view name) {
  return name.find("::") != std::string_view::npos &&
         name.find(' ') == std::string_view::npos &&
         name.substr(0, 7) != "torch::" && name.substr(0, 9) != "lowtide::";
}

bool only_makes_storage(std::string_view name) {
  static constexpr std::array<std::string_view, 3> kPrefixes{
      "aten::empty", "aten::new_empty", "aten::resize_"};
  return std::any_of(kPrefixes.begin(), kPrefixes.end(),
                     [&](std::string_view prefix) {
                       return name.substr(0, prefix.size()) == prefix;
                     });
}

std::string_view current_operator() {
  std::string_view storage;
  for (auto name = running_operators.rbegin(); name != running_operators.rend();
       ++name) {
    if (!is_operator(*name)) continue;
    if (!only_makes_storage(*name)) return *name;
    storage = *name;
  }
  return storage;
}

class Listeners {
 public:
  void set(AllocationListener listener) {
    auto next =
        listener
            ? std::make_shared<const AllocationListener>(std::move(listener))
            : nullptr;
    const bool listens = next != nullptr;
    {
      const std::lock_guard lock(mutex_);
      current_.swap(next);
    }  // the old one dies unlocked
    if (listens == (next != nullptr)) return;
    if (listens) {
      operators_ =
          at::addGlobalCallback(at::RecordFunctionCallback(&enter, &leave)
                                    .scopes({at::RecordScope::FUNCTION}));
    } else {
      at::removeCallback(operators_);
    }
  }

  std::shared_ptr<const AllocationListener> current() {
    const std::lock_guard lock(mutex_);
    return current_;
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<const AllocationListener> current_;
  at::CallbackHandle operators_ = at::INVALID_CALLBACK_HANDLE;
};

Listeners& listeners() {
  // Tensors are made until the process ends.
  static auto* listeners = std::make_unique<Listeners>().release();
  return *listeners;
}

}  // namespace

void set_allocation_listener(AllocationListener listener) {
  listeners().set(std::move(listener));
}

void tell_listener(Address address, std::size_t bytes) {
  if (const auto listener = listeners().current()) {
    (*listener)({address, bytes, current_stream(), current_operator()});
  }
}

}  // namespace lowtide::phantom
