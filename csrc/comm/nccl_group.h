// Lists of tensors as one launch of NCCL's where torch's group does not group
// them.
//
// [Note: Lists on nccl2]
// torch's older ProcessGroupNCCL ("nccl") launches a list's tensors together.
// nccl2, which is behind "nccl" from 2.15 on, and nccl-lazy call NCCL for each
// (torch 2.15, ProcessGroupNCCLBackend.cpp): each pays the group's latency, and
// nine weights of a block among 256 ranks take twice as long.  NCCL groups what
// one thread calls between ncclGroupStart and ncclGroupEnd, torch's calls as
// well, and launches it in ncclGroupEnd.
//
// What torch records behind each tensor's call then stands before the launch:
// its watchdog takes a gather that hangs for finished.  So an empty collective
// follows: NCCL discards it, and torch's record of it ends behind the launch
// and is timed from its call.
//
// A communicator that does not block its caller launches later than
// ncclGroupEnd returns, where only its owner can wait for it: on such no list
// is grouped.
#pragma once

#include <string_view>

namespace lowtide::comm {

// Whether torch's backend of this name calls NCCL for each tensor of a list,
// and NCCL's groups can be had: never in a process without NCCL, nor with
// TORCH_NCCL_USE_COMM_NONBLOCKING.
bool groups_lists(std::string_view backend);

// What is asked of NCCL while it lives, by this thread, is launched by `launch`
// at the latest; without it, by the destructor, which swallows errors.
class NcclGroup {
 public:
  // Throws std::runtime_error where NCCL refuses.
  NcclGroup();
  ~NcclGroup();
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  // Throws std::runtime_error with NCCL's words, and for a communicator that
  // does not block.
  void launch();

 private:
  bool open_ = true;
};

}  // namespace lowtide::comm
