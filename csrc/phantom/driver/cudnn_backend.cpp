// cuDNN's graphs: every one has one engine, which wants the workspace that the
// observer says (observer/cudnn_workspace.h), or none.
#include <cudnn_backend.h>

#include <cstdint>
#include <cstring>

namespace {

thread_local std::int64_t workspace = 0;

}  // namespace

extern "C" {

__attribute__((visibility("default"))) void lowtide_dry_cudnn_workspace(
    std::int64_t bytes) {
  workspace = bytes;
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type,
                                       std::int64_t wanted, std::int64_t* count,
                                       void* result) {
  std::int64_t found = 0;
  if (name == CUDNN_ATTR_ENGINEHEUR_RESULTS) {
    found = 1;  // the configuration that the caller brought
  } else if (name == CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT) {
    found = 1;
    if (result && wanted > 0) *static_cast<std::int64_t*>(result) = 1;
  } else if (name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE) {
    found = 1;
    if (result && wanted > 0) *static_cast<std::int64_t*>(result) = workspace;
  } else if (result && wanted > 0) {
    // Bytes of workspace and of shared memory among them.
    const std::size_t size = type == CUDNN_TYPE_INT64   ? 8
                             : type == CUDNN_TYPE_INT32 ? 4
                                                        : 0;
    found = size > 0;
    std::memset(result, 0, size * static_cast<std::size_t>(wanted));
  }
  if (count) *count = found;
  return CUDNN_STATUS_SUCCESS;
}

}  // extern "C"
