// CUDA's driver: green contexts, which have a part of a GPU's multiprocessors.
// They are their device's own context, and what they run may use all of it.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>

#include "phantom/driver/device.h"

namespace {

using namespace lowtide::dry;

// What a part is a multiple of, and has at least: as cuda.h lists it by
// capability.
CUdevResource multiprocessors(unsigned count) {
  const int major = settings().gpu->major;
  CUdevResource part = {};
  part.type = CU_DEV_RESOURCE_TYPE_SM;
  part.sm.smCount = count;
  part.sm.minSmPartitionSize = major >= 9 ? 8 : 4;
  part.sm.smCoscheduledAlignment = major >= 9 ? 8 : 2;
  return part;
}

}  // namespace

extern "C" {

CUresult cuDeviceGetDevResource(CUdevice, CUdevResource* all,
                                CUdevResourceType type) {
  if (type != CU_DEV_RESOURCE_TYPE_SM) {
    return CUDA_ERROR_INVALID_RESOURCE_TYPE;
  }
  *all =
      multiprocessors(static_cast<unsigned>(settings().gpu->multiprocessors));
  return CUDA_SUCCESS;
}
CUresult cuDevSmResourceSplitByCount(CUdevResource* parts, unsigned* count,
                                     const CUdevResource* all,
                                     CUdevResource* rest, unsigned,
                                     unsigned least) {
  const unsigned step = all->sm.smCoscheduledAlignment;
  const unsigned wanted = std::max(least, all->sm.minSmPartitionSize);
  const unsigned each = (wanted + step - 1) / step * step;
  const unsigned most = all->sm.smCount / each;
  if (most == 0) return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
  *count = parts == nullptr ? most : std::min(*count, most);
  if (parts != nullptr) std::fill_n(parts, *count, multiprocessors(each));
  if (rest != nullptr) *rest = multiprocessors(all->sm.smCount - *count * each);
  return CUDA_SUCCESS;
}
CUresult cuDevResourceGenerateDesc(CUdevResourceDesc* description,
                                   CUdevResource*, unsigned) {
  return make_handle(description), CUDA_SUCCESS;
}
CUresult cuGreenCtxCreate(CUgreenCtx* green, CUdevResourceDesc, CUdevice index,
                          unsigned) {
  return cuDevicePrimaryCtxRetain(reinterpret_cast<CUcontext*>(green), index);
}
CUresult cuCtxFromGreenCtx(CUcontext* context, CUgreenCtx green) {
  *context = reinterpret_cast<CUcontext>(green);
  return CUDA_SUCCESS;
}
CUresult cuGreenCtxStreamCreate(CUstream* stream, CUgreenCtx, unsigned flags,
                                int priority) {
  *stream = make_stream(current_device(), priority, flags);
  return CUDA_SUCCESS;
}

}  // extern "C"
