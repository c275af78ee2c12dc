// What programs and tests tell and ask the dry driver of NCCL
// (lowtide/phantom/dry/calls.py, groups.py).
#include <nccl.h>

#include <cstdint>
#include <cstring>
#include <string>

#include "phantom/driver/collective_log.h"
#include "phantom/driver/communicators.h"

#define LOWTIDE_DRY_API __attribute__((visibility("default")))

using namespace lowtide::dry;

extern "C" {

// Communicators made from `id`, 128 bytes, are of the group `name`, which has
// those ranks of the world.
LOWTIDE_DRY_API void lowtide_dry_name_group(const char* id, const char* name,
                                            const std::int64_t* ranks,
                                            std::int64_t count) {
  ncclUniqueId unique{};
  std::memcpy(unique.internal, id, sizeof unique.internal);
  communicators().name(unique, {name, {ranks, ranks + count}});
}
// The next communicator that the calling thread splits off is.
LOWTIDE_DRY_API void lowtide_dry_name_split(const char* name,
                                            const std::int64_t* ranks,
                                            std::int64_t count) {
  Communicators::name_split({name, {ranks, ranks + count}});
}
// A line each: number, rank, size, ranks of the world, name, with tabs between
// them.  Valid until the next call.
LOWTIDE_DRY_API const char* lowtide_dry_communicators() {
  static std::string lines;
  lines = communicators().lines();
  return lines.c_str();
}
// See collective_log.h; valid until the next call.
LOWTIDE_DRY_API const char* lowtide_dry_calls() {
  return collective_log().lines();
}
LOWTIDE_DRY_API std::int64_t lowtide_dry_num_calls() {
  return collective_log().size();
}
// Who hears of each call; null for nobody.
LOWTIDE_DRY_API void lowtide_dry_hear_calls(CollectiveLog::Heard heard) {
  collective_log().heard = heard;
}

}  // extern "C"
