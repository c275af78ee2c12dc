#include "comm/nccl_group.h"

#include <c10/util/env.h>

#include <stdexcept>
#include <string>

#include "base/check.h"

// Of the NCCL that torch calls: linked weakly, they are looked up where torch's
// own calls are, and null in a build of torch without it.
extern "C" {
[[gnu::weak]] int ncclGroupStart();
[[gnu::weak]] int ncclGroupEnd();
[[gnu::weak]] const char* ncclGetErrorString(int result);
}

namespace lowtide::comm {
namespace {

// Values of ncclResult_t.
constexpr int kSuccess = 0;
constexpr int kInProgress = 7;

[[noreturn]] void refuse(const char* call, int result) {
  const char* why =
      ncclGetErrorString != nullptr ? ncclGetErrorString(result) : "";
  throw std::runtime_error(base::concat(call, ": ", why, " (", result, ")"));
}

}  // namespace

bool groups_lists(std::string_view backend) {
  const bool calls_each = backend == "nccl2" || backend == "nccl-lazy";
  return calls_each && ncclGroupStart != nullptr && ncclGroupEnd != nullptr &&
         !c10::utils::check_env("TORCH_NCCL_USE_COMM_NONBLOCKING")
              .value_or(false);
}

NcclGroup::NcclGroup() {
  const int result = ncclGroupStart();
  if (result != kSuccess) refuse("ncclGroupStart", result);
}

NcclGroup::~NcclGroup() {
  if (open_) ncclGroupEnd();
}

void NcclGroup::launch() {
  open_ = false;
  const int result = ncclGroupEnd();
  if (result == kInProgress) {
    throw std::runtime_error(
        "the communicator does not block (config.blocking of its options), so "
        "lists can not be launched together.  Set "
        "TORCH_NCCL_USE_COMM_NONBLOCKING=1 to have them launched one by one");
  }
  if (result != kSuccess) refuse("ncclGroupEnd", result);
}

}  // namespace lowtide::comm
