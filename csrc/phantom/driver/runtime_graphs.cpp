// CUDA's runtime: stream capture and graphs, which hold what time they take.
#include <cuda_runtime_api.h>

#include <cstdint>

#include "phantom/driver/capture.h"
#include "phantom/driver/device.h"
#include "phantom/driver/timekeeper.h"

using namespace lowtide::dry;

extern "C" {

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  *mode = exchange_mode(*mode);
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream,
                                   cudaStreamCaptureMode mode) {
  if (const auto refused = capture().begin(stream, mode)) return refused;
  timekeeper().begin_graph(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  make_handle(graph);
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
  if (graph) make_handle(graph);
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
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  timekeeper().forget(exec);
  return cudaSuccess;
}

}  // extern "C"
