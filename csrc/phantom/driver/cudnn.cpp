// cuDNN's functions before graphs: what has results beside handles and sizes,
// which cmake/nvidia_functions.py makes.
#include <cudnn.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "phantom/driver/device.h"
#include "phantom/driver/library_calls.h"

namespace {

// What a program said of an RNN's descriptor, which says how many weights.
struct Rnn {
  std::int64_t gates = 1;
  std::int64_t input = 0;
  std::int64_t hidden = 0;
  std::int64_t projection = 0;
  std::int64_t layers = 0;
  std::int64_t directions = 1;
  bool has_bias = true;
  std::size_t bytes = 4;  // of a number

  std::int64_t inputs_of(std::int64_t layer) const {
    return layer == 0 ? input : projection * directions;
  }
  bool projects() const { return projection != hidden; }
  // Numbers of one layer in one direction: matrices, what projects, biases.
  std::int64_t matrices_of(std::int64_t layer) const {
    const auto after = projects() ? projection * hidden : 0;
    return gates * hidden * (inputs_of(layer) + projection) + after;
  }
  std::int64_t weights_of(std::int64_t layer) const {
    return matrices_of(layer) + (has_bias ? 2 * gates * hidden : 0);
  }
  std::int64_t weights() const {
    std::int64_t sum = 0;
    for (std::int64_t i = 0; i < layers; ++i) {
      sum += directions * weights_of(i);
    }
    return sum;
  }
};

struct Tensor {
  cudnnDataType_t type;
  std::vector<int> sizes;
};

std::mutex mutex;
std::map<cudnnRNNDescriptor_t, Rnn> rnns;
std::map<cudnnTensorDescriptor_t, Tensor> tensors;

std::size_t bytes_of(cudnnDataType_t type) {
  switch (type) {
    case CUDNN_DATA_DOUBLE:
      return 8;
    case CUDNN_DATA_HALF:
    case CUDNN_DATA_BFLOAT16:
      return 2;
    default:
      return 4;
  }
}

}  // namespace

extern "C" {

std::size_t cudnnGetVersion() { return CUDNN_VERSION; }
std::size_t cudnnGetCudartVersion() { return CUDART_VERSION; }
std::size_t cudnnGetMaxDeviceVersion() { return 1200; }
void cudnnGetLastErrorString(char* message, std::size_t bytes) {
  if (bytes > 0) *message = 0;
}
cudnnStatus_t cudnnGetProperty(libraryPropertyType which, int* value) {
  *value = which == MAJOR_VERSION   ? CUDNN_MAJOR
           : which == MINOR_VERSION ? CUDNN_MINOR
                                    : CUDNN_PATCHLEVEL;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t* stream) {
  *stream = static_cast<cudaStream_t>(lowtide::dry::stream_of_handle(handle));
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetTensorNdDescriptor(cudnnTensorDescriptor_t tensor,
                                         cudnnDataType_t type, int dimensions,
                                         const int sizes[], const int[]) {
  const std::lock_guard lock(mutex);
  tensors[tensor] = {type, {sizes, sizes + dimensions}};
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetTensorNdDescriptor(const cudnnTensorDescriptor_t tensor,
                                         int wanted, cudnnDataType_t* type,
                                         int* dimensions, int sizes[],
                                         int strides[]) {
  const std::lock_guard lock(mutex);
  const auto& known = tensors.at(tensor);
  *type = known.type;
  *dimensions = static_cast<int>(known.sizes.size());
  int stride = 1;
  for (int i = std::min(wanted, *dimensions) - 1; i >= 0; --i) {
    sizes[i] = known.sizes[static_cast<std::size_t>(i)];
    strides[i] = stride;
    stride *= sizes[i];
  }
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnDestroyTensorDescriptor(cudnnTensorDescriptor_t tensor) {
  const std::lock_guard lock(mutex);
  tensors.erase(tensor);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetRNNDescriptor_v8(
    cudnnRNNDescriptor_t rnn, cudnnRNNAlgo_t, cudnnRNNMode_t mode,
    cudnnRNNBiasMode_t bias, cudnnDirectionMode_t direction,
    cudnnRNNInputMode_t, cudnnDataType_t type, cudnnDataType_t, cudnnMathType_t,
    std::int32_t input, std::int32_t hidden, std::int32_t projection,
    std::int32_t layers, cudnnDropoutDescriptor_t, std::uint32_t) {
  const std::lock_guard lock(mutex);
  rnns[rnn] = {
      .gates = mode == CUDNN_LSTM  ? 4
               : mode == CUDNN_GRU ? 3
                                   : 1,
      .input = input,
      .hidden = hidden,
      .projection = projection,
      .layers = layers,
      .directions = direction == CUDNN_BIDIRECTIONAL ? 2 : 1,
      .has_bias = bias != CUDNN_RNN_NO_BIAS,
      .bytes = bytes_of(type),
  };
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnDestroyRNNDescriptor(cudnnRNNDescriptor_t rnn) {
  const std::lock_guard lock(mutex);
  rnns.erase(rnn);
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetRNNWeightSpaceSize(cudnnHandle_t,
                                         cudnnRNNDescriptor_t rnn,
                                         std::size_t* bytes) {
  const std::lock_guard lock(mutex);
  const auto& known = rnns.at(rnn);
  *bytes = static_cast<std::size_t>(known.weights()) * known.bytes;
  return CUDNN_STATUS_SUCCESS;
}
// torch lays its weights out by what this says: input matrices, then hidden
// ones, what projects, then both biases, gate by gate.
cudnnStatus_t cudnnGetRNNWeightParams(cudnnHandle_t, cudnnRNNDescriptor_t rnn,
                                      std::int32_t pseudo_layer, std::size_t,
                                      const void* space, std::int32_t number,
                                      cudnnTensorDescriptor_t matrix_tensor,
                                      void** matrix,
                                      cudnnTensorDescriptor_t bias_tensor,
                                      void** bias) {
  const std::lock_guard lock(mutex);
  const auto& known = rnns.at(rnn);
  const auto layer = pseudo_layer / known.directions;
  auto before = (pseudo_layer % known.directions) * known.weights_of(layer);
  for (std::int64_t i = 0; i < layer; ++i) {
    before += known.directions * known.weights_of(i);
  }
  const auto gates = known.gates, hidden = known.hidden;
  const auto inputs = known.inputs_of(layer), recurrent = known.projection;
  // Addresses of the device, never read here; none for sizes of 0.
  const auto tell = [&](cudnnTensorDescriptor_t tensor, void** address,
                        std::int64_t place, std::int64_t rows,
                        std::int64_t columns) {
    const auto at = reinterpret_cast<std::uintptr_t>(space) +
                    static_cast<std::size_t>(before + place) * known.bytes;
    if (address) *address = rows > 0 ? reinterpret_cast<void*>(at) : nullptr;
    if (!tensor) return;
    const auto sizes = {rows > 0 ? 1 : 0, static_cast<int>(rows),
                        rows > 0 ? static_cast<int>(columns) : 0};
    tensors[tensor] = {CUDNN_DATA_FLOAT, sizes};
  };
  if (number < gates) {
    tell(matrix_tensor, matrix, number * hidden * inputs, hidden, inputs);
  } else if (number < 2 * gates) {
    const auto place = gates * inputs + (number - gates) * recurrent;
    tell(matrix_tensor, matrix, hidden * place, hidden, recurrent);
  } else {
    const auto place = gates * hidden * (inputs + recurrent);
    tell(matrix_tensor, matrix, place, known.projects() ? recurrent : 0,
         hidden);
  }
  const bool is_biased = known.has_bias && number < 2 * gates;
  tell(bias_tensor, bias, known.matrices_of(layer) + number * hidden,
       is_biased ? hidden : 0, 1);
  return CUDNN_STATUS_SUCCESS;
}

}  // extern "C"
