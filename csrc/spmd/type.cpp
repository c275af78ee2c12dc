#include "spmd/type.h"

namespace lowtide::spmd {
namespace {

constexpr std::string_view kTypeNames[kNumTypes] = {"R", "I", "V", "P",
                                                    "constant"};

}  // namespace

std::string_view type_name(Type type) {
  return kTypeNames[static_cast<std::size_t>(type)];
}

std::optional<Type> type_named(std::string_view name) {
  for (std::size_t i = 0; i < kNumTypes; ++i) {
    if (kTypeNames[i] == name) return static_cast<Type>(i);
  }
  return std::nullopt;
}

}  // namespace lowtide::spmd
