// NCCL: memory that it allocates, registers and shows to kernels.
//
// It is ordinary memory of the device.  A peer's window is this rank's own: the
// peer is not there, and nothing that a kernel writes to it is read.
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <nccl_device/impl/comm__types.h>

#include <cstddef>

#include "phantom/driver/collective_log.h"
#include "phantom/driver/communicators.h"

namespace lowtide::dry {
namespace {

void note(const char* kind, ncclComm_t comm, std::size_t bytes) {
  Call call{kind, bytes};
  if (comm != nullptr) call.communicator = communicators().of(comm).number;
  collective_log().add(call);
}

void* at(ncclWindow_t window, std::size_t offset) {
  return reinterpret_cast<char*>(window) + offset;
}

}  // namespace
}  // namespace lowtide::dry

using namespace lowtide::dry;

extern "C" {

ncclResult_t ncclMemAlloc(void** address, std::size_t bytes) {
  note("mem_alloc", nullptr, bytes);
  return cudaMalloc(address, bytes) == cudaSuccess ? ncclSuccess
                                                   : ncclSystemError;
}
ncclResult_t ncclMemFree(void* address) {
  cudaFree(address);
  return ncclSuccess;
}
ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buffer,
                              std::size_t bytes, void** handle) {
  note("register", comm, bytes);
  *handle = buffer;
  return ncclSuccess;
}
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* buffer,
                                    std::size_t bytes, ncclWindow_t* window,
                                    int) {
  note("register_window", comm, bytes);
  *window = reinterpret_cast<ncclWindow_t>(buffer);
  return ncclSuccess;
}

// What kernels read, which none does here: as if all ranks were of one node.
ncclResult_t ncclDevCommCreate(ncclComm_t comm,
                               const ncclDevCommRequirements_t*,
                               ncclDevComm_t* made) {
  note("device_communicator", comm, 0);
  const auto communicator = communicators().of(comm);
  *made = {};
  made->rank = made->lsaRank = communicator.rank;
  made->nRanks = made->lsaSize = communicator.size;
  return ncclSuccess;
}
ncclResult_t ncclDevCommDestroy(ncclComm_t, const ncclDevComm_t*) {
  return ncclSuccess;
}

ncclResult_t ncclWinGetUserPtr(ncclComm_t, ncclWindow_t window, void** found) {
  *found = at(window, 0);
  return ncclSuccess;
}
ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t window, std::size_t offset,
                                      int, void** found) {
  *found = at(window, offset);
  return ncclSuccess;
}
// Null where the switch adds nothing, which is what programs are told here.
ncclResult_t ncclGetLsaMultimemDevicePointer(ncclWindow_t, std::size_t,
                                             void** found) {
  *found = nullptr;
  return ncclSuccess;
}

}  // extern "C"
