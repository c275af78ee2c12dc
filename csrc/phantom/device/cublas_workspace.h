// The workspaces torch gives to cuBLAS: one for each handle and stream it
// multiplied matrices with, taken from the caching allocator on first use and
// kept.  A handle belongs to a thread (forward and backward run on different
// ones) and passes to another when the thread ends.
#pragma once

#include <cstddef>
#include <string_view>

namespace lowtide::phantom {

// Called by every matrix product; each takes the workspace of this thread and
// its current stream if there is none yet.
void hold_cublas_workspace();
void hold_cublaslt_workspace();

// As torch._C._cuda_clearCublasWorkspaces().
void clear_cublas_workspaces();

// Bytes of a value of CUBLAS_WORKSPACE_CONFIG: the sum of KiB * count over its
// ":KiB:count" parts, ":4096:2:16:8" for instance.  Throws
// lowtide::InvalidArgument when there is no such part.
std::size_t cublas_workspace_bytes(std::string_view config);

// torch's default on Hopper and Blackwell; 8.125 MiB elsewhere.
inline constexpr std::size_t kHopperWorkspace = std::size_t{32} << 20;
// CUBLASLT_WORKSPACE_SIZE, which is in KiB, unless set.
inline constexpr std::size_t kCublasLtWorkspace = std::size_t{1} << 20;

}  // namespace lowtide::phantom
