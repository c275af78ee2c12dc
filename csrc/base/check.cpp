#include "base/check.h"

namespace lowtide::base {

std::string listed(const std::vector<std::string>& words) {
  std::string list;
  for (const auto& word : words) {
    list += (list.empty() ? "" : ", ") + word;
  }
  return list;
}

std::string error_text(const std::string& who, const std::string& expected,
                       const std::string& got, const std::string& next_step) {
  return concat("lowtide: ", who, ": expected ", expected, ", got ", got, ". ",
                next_step);
}

std::string on_rank(const std::string& value, std::int64_t rank,
                    std::int64_t world_size) {
  return concat(value, " (rank ", rank, " of ", world_size, ")");
}

}  // namespace lowtide::base
