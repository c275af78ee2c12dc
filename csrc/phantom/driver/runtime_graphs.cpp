// CUDA's runtime: stream capture and graphs, which hold what time they take.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "phantom/driver/capture.h"
#include "phantom/driver/device.h"
#include "phantom/driver/timekeeper.h"

using namespace lowtide::dry;

namespace {

// Of the capture that runs.
cudaGraph_t captured = nullptr;

// What graphs and their executables keep for the program until they are
// destroyed: its own destructors run then.
class UserObjects {
 public:
  cudaUserObject_t add(void* data, cudaHostFn_t destroy, unsigned references) {
    cudaUserObject_t object;
    make_handle(&object);
    const std::lock_guard lock(mutex_);
    objects_[object] = {data, destroy, references};
    return object;
  }
  // Moves `count` of the program's references to `holder`, or adds as many.
  void keep(void* holder, cudaUserObject_t object, unsigned count, bool move) {
    const std::lock_guard lock(mutex_);
    if (!move) objects_[object].references += count;
    held_[holder].insert(held_[holder].end(), count, object);
  }
  void copy(void* from, void* to) {
    const std::lock_guard lock(mutex_);
    const auto found = held_.find(from);
    if (found == held_.end()) return;
    held_[to] = found->second;
    for (const auto object : found->second) ++objects_[object].references;
  }
  void drop(void* holder) {
    std::vector<cudaUserObject_t> objects;
    {
      const std::lock_guard lock(mutex_);
      objects = std::move(held_[holder]);
      held_.erase(holder);
    }
    for (const auto object : objects) release(object, 1);
  }
  void release(cudaUserObject_t object, unsigned count) {
    Object gone;
    {
      const std::lock_guard lock(mutex_);
      const auto found = objects_.find(object);
      if (found == objects_.end()) return;
      if ((found->second.references -= count) > 0) return;
      gone = found->second;
      objects_.erase(found);
    }
    gone.destroy(gone.data);
  }

 private:
  struct Object {
    void* data = nullptr;
    cudaHostFn_t destroy = nullptr;
    unsigned references = 0;
  };
  std::mutex mutex_;
  std::map<cudaUserObject_t, Object> objects_;
  std::map<void*, std::vector<cudaUserObject_t>> held_;
};

UserObjects& user_objects() {
  static UserObjects objects;
  return objects;
}

}  // namespace

extern "C" {

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  *mode = exchange_mode(*mode);
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream,
                                   cudaStreamCaptureMode mode) {
  if (const auto refused = capture().begin(stream, mode)) return refused;
  timekeeper().begin_graph(stream);
  make_handle(&captured);
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = captured;
  timekeeper().end_graph(*graph);
  return capture().end(stream);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream,
                                  cudaStreamCaptureStatus* now) {
  *now = capture().id(stream) != 0 ? cudaStreamCaptureStatusActive
                                   : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream,
                                     cudaStreamCaptureStatus* now,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** nodes,
                                     const cudaGraphEdgeData** edges,
                                     std::size_t* count) {
  if (id) *id = capture().id(stream);
  if (graph) *graph = captured;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaStreamIsCapturing(stream, now);
}
// torch warns of a graph without nodes.
cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t* nodes,
                              std::size_t* count) {
  if (nodes && *count > 0) make_handle(nodes);
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec,
                                          cudaGraph_t graph,
                                          unsigned long long) {
  make_handle(exec);
  timekeeper().instantiate(*exec, graph);
  user_objects().copy(graph, *exec);
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph,
                                 unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(exec, graph, flags);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  timekeeper().play(exec, stream);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  user_objects().drop(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  timekeeper().forget(exec);
  user_objects().drop(exec);
  return cudaSuccess;
}
cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* data,
                                 cudaHostFn_t destroy, unsigned references,
                                 unsigned) {
  *object = user_objects().add(data, destroy, references);
  return cudaSuccess;
}
cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned count) {
  user_objects().release(object, count);
  return cudaSuccess;
}
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph,
                                      cudaUserObject_t object, unsigned count,
                                      unsigned flags) {
  user_objects().keep(graph, object, count, flags & cudaGraphUserObjectMove);
  return cudaSuccess;
}

}  // extern "C"
