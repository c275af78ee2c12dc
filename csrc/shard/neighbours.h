// Tensors that follow each other in memory, as one: a unit's shards, their
// gradients and an optimizer's states of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lowtide::shard {

// A flat tensor, [sum of elements], over the bytes of all of `tensors`;
// undefined unless they are plain, contiguous and of one dtype, have as many
// elements as those of `like` each, and follow each other without a gap within
// what was allocated at once.
at::Tensor neighbours_as_one(at::TensorList tensors, at::TensorList like);

// The elements of the flat tensor `whole` in turn, shaped as `like`.  Each has
// a storage of its own within the whole's, as shards do: who copies, pickles or
// hides one takes its bytes alone.
std::vector<at::Tensor> parts_of(const at::Tensor& whole, at::TensorList like);

}  // namespace lowtide::shard
