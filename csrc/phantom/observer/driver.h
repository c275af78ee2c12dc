// The dry driver's own functions (csrc/phantom/driver/report.cpp).
#pragma once

#include <c10/core/Storage.h>

#include <cstdint>

#include "base/dynamic_loader.h"
#include "phantom/time/costs.h"

namespace lowtide::dry {

template <typename Function>
Function* driver_function(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

inline void driver_forgets(const void* first, std::int64_t bytes) {
  static auto* const forget =
      driver_function<void(const void*, std::int64_t)>("lowtide_dry_forget");
  forget(first, bytes);
}

// Whether the host made all of these bytes.
inline bool driver_knows(const void* first, std::int64_t bytes) {
  static auto* const known =
      driver_function<int(const void*, std::int64_t)>("lowtide_dry_known");
  return known(first, bytes) != 0;
}

inline void driver_copies(void* to, const void* from, std::int64_t bytes) {
  static auto* const copy =
      driver_function<void(void*, const void*, std::int64_t)>(
          "lowtide_dry_copy");
  copy(to, from, bytes);
}

// [Note: Time of operators] in csrc/phantom/driver/timekeeper.h.
inline bool driver_keeps_time() {
  static auto* const keeps = driver_function<int()>("lowtide_dry_keeps_time");
  return keeps() != 0;
}

inline void driver_enters(const char* name) {
  static auto* const enter =
      driver_function<void(const char*)>("lowtide_dry_enter_operator");
  enter(name);
}

inline void driver_leaves(const phantom::Work& work) {
  static auto* const leave = driver_function<void(double, double, int, int)>(
      "lowtide_dry_leave_operator");
  leave(work.flops, work.bytes, static_cast<int>(work.rate),
        work.is_attention ? 1 : 0);
}

// Of the plans that cuDNN makes from here on, on this thread.
inline void driver_asks_workspace(std::int64_t bytes) {
  static auto* const ask =
      driver_function<void(std::int64_t)>("lowtide_dry_cudnn_workspace");
  ask(bytes);
}

// Null where there are no bytes; asking such a storage itself may raise.
inline const void* first_byte(const c10::Storage& storage) {
  return storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
}

}  // namespace lowtide::dry
