// NCCL: torch's own ProcessGroupNCCL runs, a communicator of any size is this
// process alone, collectives are work on their stream.
//
// Bytes that the host made travel as if every rank had sent the same: what this
// rank gives is in every place of what it gets, and a reduction is what one
// rank gave.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstdint>
#include <cstring>
#include <string>

#include "phantom/driver/capture.h"
#include "phantom/driver/collective_log.h"
#include "phantom/driver/device.h"
#include "phantom/driver/order.h"

namespace lowtide::dry {
namespace {

std::size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    default:
      return 4;
  }
}

const char* name_of(ncclRedOp_t op) {
  if (op == ncclSum) return "sum";
  return op == ncclAvg ? "avg" : "other";
}

std::size_t ranks_of(ncclComm_t comm) {
  return static_cast<std::size_t>(collective_log().of(comm).size);
}

void note_new(const char* how, ncclComm_t comm, const ncclConfig_t* config) {
  const int most = config ? config->maxCTAs : NCCL_CONFIG_UNDEF_INT;
  collective_log().note(std::string(how) + " " + std::to_string(most), comm);
}

ncclResult_t collective(const char* what, std::size_t bytes, const char* op,
                        ncclComm_t comm, cudaStream_t stream) {
  collective_log().note(std::string(what) + " " + std::to_string(bytes) + " " +
                            op + " " +
                            std::to_string(stream_of(stream).priority),
                        comm);
  capture().enqueue(stream);
  order().enqueue_collective(stream);
  return ncclSuccess;
}

// `bytes` from `from` to each of `places` behind each other.
void spread(void* to, const void* from, std::size_t bytes, std::size_t places) {
  for (std::size_t place = 0; place < places; ++place) {
    auto* at = static_cast<char*>(to) + place * bytes;
    if (at != from) copy_bytes(at, from, bytes);
  }
}

}  // namespace
}  // namespace lowtide::dry

using namespace lowtide::dry;

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::memset(id, 1, sizeof *id);
  return ncclSuccess;
}
const char* ncclGetLastError(ncclComm_t) { return "none"; }

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId,
                                    int rank, ncclConfig_t* config) {
  *comm = collective_log().add({rank, size});
  note_new("init", *comm, config);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id,
                              int rank) {
  return ncclCommInitRankConfig(comm, size, id, rank, nullptr);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int size, int rank, int,
                                      ncclUniqueId* id, ncclConfig_t* config) {
  return ncclCommInitRankConfig(comm, size, *id, rank, config);
}
// How many ranks share a color is not known here: as many as were there.
ncclResult_t ncclCommSplit(ncclComm_t comm, int, int, ncclComm_t* part,
                           ncclConfig_t* config) {
  *part = collective_log().add(collective_log().of(comm));
  note_new("split", *part, config);
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  *count = collective_log().of(comm).size;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = collective_log().of(comm).rank;
  return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t, int* index) {
  *index = current_device();
  return ncclSuccess;
}
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void*, ncclDataType_t,
                                      ncclScalarResidence_t, ncclComm_t) {
  *op = ncclSum;
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  collective_log().enter_group(1);
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  collective_log().enter_group(-1);
  return ncclSuccess;
}

ncclResult_t ncclAllGather(const void* from, void* to, std::size_t count,
                           ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  const auto bytes = count * size_of(type);
  spread(to, from, bytes, ranks_of(comm));
  return collective("all_gather", bytes, "-", comm, stream);
}
ncclResult_t ncclReduceScatter(const void* from, void* to, std::size_t count,
                               ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  const auto bytes = count * size_of(type);
  const auto rank = static_cast<std::size_t>(collective_log().of(comm).rank);
  spread(to, static_cast<const char*>(from) + rank * bytes, bytes, 1);
  return collective("reduce_scatter", bytes * ranks_of(comm), name_of(op), comm,
                    stream);
}
ncclResult_t ncclAllReduce(const void* from, void* to, std::size_t count,
                           ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream) {
  const auto bytes = count * size_of(type);
  spread(to, from, bytes, 1);
  return collective("all_reduce", bytes, name_of(op), comm, stream);
}
ncclResult_t ncclReduce(const void* from, void* to, std::size_t count,
                        ncclDataType_t type, ncclRedOp_t op, int,
                        ncclComm_t comm, cudaStream_t stream) {
  const auto bytes = count * size_of(type);
  if (to != nullptr) spread(to, from, bytes, 1);
  return collective("reduce", bytes, name_of(op), comm, stream);
}
ncclResult_t ncclBroadcast(const void* from, void* to, std::size_t count,
                           ncclDataType_t type, int, ncclComm_t comm,
                           cudaStream_t stream) {
  const auto bytes = count * size_of(type);
  if (from != nullptr) spread(to, from, bytes, 1);
  return collective("broadcast", bytes, "-", comm, stream);
}
ncclResult_t ncclBcast(void*, std::size_t count, ncclDataType_t type, int,
                       ncclComm_t comm, cudaStream_t stream) {
  return collective("broadcast", count * size_of(type), "-", comm, stream);
}
ncclResult_t ncclAlltoAll(const void* from, void* to, std::size_t count,
                          ncclDataType_t type, ncclComm_t comm,
                          cudaStream_t stream) {
  const auto bytes = count * size_of(type) * ranks_of(comm);
  spread(to, from, bytes, 1);
  return collective("all_to_all", bytes, "-", comm, stream);
}
ncclResult_t ncclSend(const void*, std::size_t count, ncclDataType_t type, int,
                      ncclComm_t comm, cudaStream_t stream) {
  return collective("send", count * size_of(type), "-", comm, stream);
}
ncclResult_t ncclRecv(void* to, std::size_t count, ncclDataType_t type, int,
                      ncclComm_t comm, cudaStream_t stream) {
  const auto bytes = count * size_of(type);
  kept().forget(reinterpret_cast<Address>(to), bytes);
  return collective("recv", bytes, "-", comm, stream);
}

// Registered memory is ordinary memory of the device.
ncclResult_t ncclMemAlloc(void** address, std::size_t bytes) {
  collective_log().note("mem_alloc " + std::to_string(bytes), nullptr);
  return cudaMalloc(address, bytes) == cudaSuccess ? ncclSuccess
                                                   : ncclSystemError;
}
ncclResult_t ncclMemFree(void* address) {
  cudaFree(address);
  return ncclSuccess;
}
ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buffer,
                              std::size_t bytes, void** handle) {
  collective_log().note("register " + std::to_string(bytes), comm);
  *handle = buffer;
  return ncclSuccess;
}
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* buffer,
                                    std::size_t bytes, ncclWindow_t* window,
                                    int) {
  collective_log().note("register_window " + std::to_string(bytes), comm);
  *window = reinterpret_cast<ncclWindow_t>(buffer);
  return ncclSuccess;
}

}  // extern "C"
