// NCCL: torch's own ProcessGroupNCCL runs, a communicator of any size is this
// process alone, collectives are work on their stream.
//
// Bytes that the host made travel as if every rank had sent the same: what this
// rank gives is in every place of what it gets (of broadcasts: broadcasts.h),
// and a reduction is what one rank gave.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "phantom/driver/broadcasts.h"
#include "phantom/driver/capture.h"
#include "phantom/driver/collective_log.h"
#include "phantom/driver/collective_time.h"
#include "phantom/driver/communicators.h"
#include "phantom/driver/device.h"
#include "phantom/driver/exchanges.h"
#include "phantom/driver/order.h"

namespace lowtide::dry {
namespace {

struct Type {
  const char* name;
  std::size_t bytes;
};

// By NCCL's numbers.
constexpr Type kTypes[] = {
    {"int8", 1},    {"uint8", 1},    {"int32", 4},         {"uint32", 4},
    {"int64", 8},   {"uint64", 8},   {"float16", 2},       {"float32", 4},
    {"float64", 8}, {"bfloat16", 2}, {"float8_e4m3fn", 1}, {"float8_e5m2", 1},
};
constexpr const char* kReductions[] = {"sum", "prod", "max", "min", "avg"};
static_assert(ncclFloat32 == 7 && ncclBfloat16 == 9 && ncclAvg == 4);

const Type& type_of(ncclDataType_t type) {
  const auto number = static_cast<std::size_t>(type);
  return kTypes[number < std::size(kTypes) ? number : std::size_t{ncclFloat32}];
}

const char* name_of(ncclRedOp_t op) {
  const auto number = static_cast<std::size_t>(op);
  return number < std::size(kReductions) ? kReductions[number] : "scaled sum";
}

std::size_t ranks_of(ncclComm_t comm) {
  return static_cast<std::size_t>(communicators().of(comm).size);
}

void note_new(const char* kind, const Communicator& made,
              const ncclConfig_t* config) {
  Call call{kind};
  call.communicator = made.number;
  call.most_ctas = config ? config->maxCTAs : NCCL_CONFIG_UNDEF_INT;
  collective_log().add(call);
  limit_channels(made, call.most_ctas);
}

bool is_of_pair(std::string_view kind) {
  return kind == "send" || kind == "recv";
}

// A gather's bytes are those that a rank gives, its time is that of all.
void keep_time(const Communicator& communicator, std::string_view kind,
               std::size_t bytes, int peer, cudaStream_t stream) {
  using Kind = phantom::CollectiveKind;
  static const std::map<std::string_view, Kind> kKinds = {
      {"all_gather", Kind::all_gather},
      {"reduce_scatter", Kind::reduce_scatter},
      {"all_reduce", Kind::all_reduce},
      {"reduce", Kind::broadcast},
      {"broadcast", Kind::broadcast},
      {"gather", Kind::all_gather},
      {"all_to_all", Kind::all_to_all},
      {"send", Kind::send},
      {"recv", Kind::receive},
  };
  const auto of_all = kKinds.at(kind) == Kind::all_gather
                          ? bytes * static_cast<std::size_t>(communicator.size)
                          : bytes;
  time_collective(communicator, kKinds.at(kind), of_all,
                  is_of_pair(kind) ? peer : -1, stream);
}

// Of the calls of the thread's group, which NCCL launches where the outermost
// one ends.
thread_local std::vector<cudaStream_t> not_launched;

void launch_unless_in_a_group() {
  if (CollectiveLog::depth() > 0) return;
  for (const auto stream : std::exchange(not_launched, {})) {
    capture().enqueue(stream);
    order().enqueue_collective(stream);
  }
}

// What travels between ranks, on `stream`: everything does by this function.
// `bytes` as in Call.  NCCL discards empty collectives (taskAppend).
ncclResult_t collective(const char* kind, std::size_t bytes,
                        ncclDataType_t type, const char* reduction, int peer,
                        ncclComm_t comm, cudaStream_t stream) {
  if (bytes == 0 && !is_of_pair(kind)) return ncclSuccess;
  Call call{kind, bytes, type_of(type).name, reduction, peer};
  call.communicator = communicators().of(comm).number;
  call.stream =
      static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(stream));
  call.priority = stream_of(stream).priority;
  collective_log().add(call);
  keep_time(communicators().of(comm), kind, bytes, peer, stream);
  not_launched.push_back(stream);
  launch_unless_in_a_group();
  return ncclSuccess;
}

// `bytes` from `from` to each of `places` behind each other.
void spread(void* to, const void* from, std::size_t bytes, std::size_t places) {
  for (std::size_t place = 0; place < places; ++place) {
    auto* at = static_cast<char*>(to) + place * bytes;
    if (at != from) copy_bytes(at, from, bytes);
  }
}

ncclResult_t broadcast(const void* from, void* to, std::size_t count,
                       ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream) {
  const auto bytes = count * type_of(type).bytes;
  bring_broadcast(communicators().of(comm), root, from, to, bytes);
  return collective("broadcast", bytes, type, "-", root, comm, stream);
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
  *id = new_unique_id();
  return ncclSuccess;
}
const char* ncclGetLastError(ncclComm_t) { return "none"; }

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id,
                                    int rank, ncclConfig_t* config) {
  const auto made = communicators().add(id, rank, size);
  *comm = Communicators::handle_of(made);
  note_new("init", made, config);
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
// Devices of this process, a rank each.
ncclResult_t ncclCommInitAll(ncclComm_t* comms, int count, const int*) {
  const auto clique = communicators().new_clique();
  for (int rank = 0; rank < count; ++rank) {
    const auto made = communicators().add_local(clique, rank, count);
    comms[rank] = Communicators::handle_of(made);
    note_new("init", made, nullptr);
  }
  return ncclSuccess;
}
// A call on the whole, also of ranks that are in no part.
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int, ncclComm_t* part,
                           ncclConfig_t* config) {
  Call call{"split"};
  call.communicator = communicators().of(comm).number;
  collective_log().add(call);
  *part = nullptr;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  const auto made = communicators().split(communicators().of(comm));
  *part = Communicators::handle_of(made);
  note_new("init", made, config);
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  *count = communicators().of(comm).size;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = communicators().of(comm).rank;
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
  collective_log().enter_group();
  time_group_begins();
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  collective_log().leave_group();
  if (CollectiveLog::depth() == 0) {
    bring_grouped_broadcasts();
    bring_exchanges();
  }
  launch_unless_in_a_group();
  time_group_ends();
  return ncclSuccess;
}

ncclResult_t ncclAllGather(const void* from, void* to, std::size_t count,
                           ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  const auto bytes = count * type_of(type).bytes;
  spread(to, from, bytes, ranks_of(comm));
  return collective("all_gather", bytes, type, "-", -1, comm, stream);
}
ncclResult_t ncclGather(const void* from, void* to, std::size_t count,
                        ncclDataType_t type, int root, ncclComm_t comm,
                        cudaStream_t stream) {
  const auto bytes = count * type_of(type).bytes;
  if (communicators().of(comm).rank == root) {
    spread(to, from, bytes, ranks_of(comm));
  }
  return collective("gather", bytes, type, "-", root, comm, stream);
}
ncclResult_t ncclReduceScatter(const void* from, void* to, std::size_t count,
                               ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  const auto bytes = count * type_of(type).bytes;
  const auto rank = static_cast<std::size_t>(communicators().of(comm).rank);
  spread(to, static_cast<const char*>(from) + rank * bytes, bytes, 1);
  return collective("reduce_scatter", bytes * ranks_of(comm), type, name_of(op),
                    -1, comm, stream);
}
ncclResult_t ncclAllReduce(const void* from, void* to, std::size_t count,
                           ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream) {
  const auto bytes = count * type_of(type).bytes;
  spread(to, from, bytes, 1);
  return collective("all_reduce", bytes, type, name_of(op), -1, comm, stream);
}
ncclResult_t ncclReduce(const void* from, void* to, std::size_t count,
                        ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  const auto bytes = count * type_of(type).bytes;
  if (to != nullptr) spread(to, from, bytes, 1);
  return collective("reduce", bytes, type, name_of(op), root, comm, stream);
}
ncclResult_t ncclBroadcast(const void* from, void* to, std::size_t count,
                           ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return broadcast(from, to, count, type, root, comm, stream);
}
ncclResult_t ncclBcast(void* buffer, std::size_t count, ncclDataType_t type,
                       int root, ncclComm_t comm, cudaStream_t stream) {
  return broadcast(buffer, buffer, count, type, root, comm, stream);
}
ncclResult_t ncclAlltoAll(const void* from, void* to, std::size_t count,
                          ncclDataType_t type, ncclComm_t comm,
                          cudaStream_t stream) {
  const auto bytes = count * type_of(type).bytes * ranks_of(comm);
  spread(to, from, bytes, 1);
  return collective("all_to_all", bytes, type, "-", -1, comm, stream);
}
ncclResult_t ncclSend(const void* from, std::size_t count, ncclDataType_t type,
                      int peer, ncclComm_t comm, cudaStream_t stream) {
  const auto bytes = count * type_of(type).bytes;
  send_in_group(communicators().of(comm), peer, from, bytes);
  return collective("send", bytes, type, "-", peer, comm, stream);
}
ncclResult_t ncclRecv(void* to, std::size_t count, ncclDataType_t type,
                      int peer, ncclComm_t comm, cudaStream_t stream) {
  const auto bytes = count * type_of(type).bytes;
  kept().forget(reinterpret_cast<Address>(to), bytes);
  receive_in_group(communicators().of(comm), peer, to, bytes);
  return collective("recv", bytes, type, "-", peer, comm, stream);
}

}  // extern "C"
