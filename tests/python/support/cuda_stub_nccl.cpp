// NCCL over the CUDA stub: torch's own ProcessGroupNCCL runs, a communicator
// of any size is one process, collectives are work on their stream.
//
// cuda_stub_nccl_calls() lists them, a line each: what, bytes a rank gives,
// reduction, priority of its stream, communicator, and the depth of groups they
// are in.  New communicators: "init" or "split", and the most CTAs they may
// have.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <string>

#include "cuda_stub_capture.h"
#include "cuda_stub_order.h"

namespace {

struct Communicator {
  int rank = 0;
  int size = 0;
};

class Nccl {
 public:
  static Nccl& instance() {
    static Nccl nccl;
    return nccl;
  }

  ncclComm_t add(int rank, int size) {
    const std::lock_guard lock(mutex_);
    const auto id = ++last_;
    communicators_[id] = {rank, size};
    return reinterpret_cast<ncclComm_t>(id);
  }
  Communicator of(ncclComm_t comm) {
    const std::lock_guard lock(mutex_);
    return communicators_.at(reinterpret_cast<std::uintptr_t>(comm));
  }
  void group(int more) {
    const std::lock_guard lock(mutex_);
    depth_ += more;
  }
  void note(const std::string& what, ncclComm_t comm) {
    const std::lock_guard lock(mutex_);
    std::ostringstream line;
    line << what << " comm " << reinterpret_cast<std::uintptr_t>(comm)
         << " group " << depth_ << "\n";
    calls_ += line.str();
  }
  const char* calls() { return calls_.c_str(); }

 private:
  std::mutex mutex_;
  std::uintptr_t last_ = 0;
  int depth_ = 0;
  std::map<std::uintptr_t, Communicator> communicators_;
  std::string calls_;
};

Nccl& nccl() { return Nccl::instance(); }

std::size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
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

void note_new(const char* how, ncclComm_t comm, const ncclConfig_t* config) {
  const int most = config ? config->maxCTAs : NCCL_CONFIG_UNDEF_INT;
  nccl().note(std::string(how) + " " + std::to_string(most), comm);
}

ncclResult_t collective(const char* what, std::size_t bytes, const char* op,
                        ncclComm_t comm, cudaStream_t stream) {
  int priority = 0;
  cudaStreamGetPriority(stream, &priority);
  std::ostringstream line;
  line << what << " " << bytes << " " << op << " " << priority;
  nccl().note(line.str(), comm);
  cuda_stub::Capture::instance().enqueue(stream);
  cuda_stub::Order::instance().enqueue_collective(stream);
  return ncclSuccess;
}

}  // namespace

extern "C" {

const char* cuda_stub_nccl_calls() { return nccl().calls(); }

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::memset(id, 1, sizeof *id);
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t) { return "stub"; }
const char* ncclGetLastError(ncclComm_t) { return "stub"; }

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId,
                                    int rank, ncclConfig_t* config) {
  *comm = nccl().add(rank, size);
  note_new("init", *comm, config);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id,
                              int rank) {
  return ncclCommInitRankConfig(comm, size, id, rank, nullptr);
}
ncclResult_t ncclCommSplit(ncclComm_t comm, int, int, ncclComm_t* part,
                           ncclConfig_t* config) {
  const auto whole = nccl().of(comm);
  *part = nccl().add(whole.rank, whole.size);
  note_new("split", *part, config);
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  *count = nccl().of(comm).size;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = nccl().of(comm).rank;
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  nccl().group(1);
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  nccl().group(-1);
  return ncclSuccess;
}

ncclResult_t ncclAllGather(const void*, void*, std::size_t count,
                           ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return collective("all_gather", count * size_of(type), "-", comm, stream);
}
ncclResult_t ncclReduceScatter(const void*, void*, std::size_t count,
                               ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  const auto bytes =
      count * size_of(type) * static_cast<std::size_t>(nccl().of(comm).size);
  return collective("reduce_scatter", bytes, name_of(op), comm, stream);
}
ncclResult_t ncclAllReduce(const void*, void*, std::size_t count,
                           ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream) {
  const auto bytes = count * size_of(type);
  return collective("all_reduce", bytes, name_of(op), comm, stream);
}
ncclResult_t ncclBroadcast(const void*, void*, std::size_t count,
                           ncclDataType_t type, int, ncclComm_t comm,
                           cudaStream_t stream) {
  return collective("broadcast", count * size_of(type), "-", comm, stream);
}
ncclResult_t ncclBcast(void*, std::size_t count, ncclDataType_t type, int,
                       ncclComm_t comm, cudaStream_t stream) {
  return collective("broadcast", count * size_of(type), "-", comm, stream);
}

// Registered memory is ordinary memory of the device.
ncclResult_t ncclMemAlloc(void** address, std::size_t bytes) {
  nccl().note("mem_alloc " + std::to_string(bytes), nullptr);
  return cudaMalloc(address, bytes) == cudaSuccess ? ncclSuccess
                                                   : ncclSystemError;
}
ncclResult_t ncclMemFree(void* address) {
  cudaFree(address);
  return ncclSuccess;
}
ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buffer,
                              std::size_t bytes, void** handle) {
  nccl().note("register " + std::to_string(bytes), comm);
  *handle = buffer;
  return ncclSuccess;
}
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* buffer,
                                    std::size_t bytes, ncclWindow_t* window,
                                    int) {
  nccl().note("register_window " + std::to_string(bytes), comm);
  *window = reinterpret_cast<ncclWindow_t>(buffer);
  return ncclSuccess;
}

}  // extern "C"
