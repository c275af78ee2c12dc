// Work that NVIDIA's libraries enqueue: on which stream, and that there is
// some.
//
// Without NVIDIA's headers: the build declares their functions otherwise.
#pragma once

extern "C" {

// The build makes functions of the libraries end here
// (cmake/nvidia_functions.py).  `handle`: their first argument, whatever its
// type; of cuFFT's plans, which are numbers, the lower half counts.

// What `handle` computes from now on is on `stream`.
__attribute__((visibility("default"))) int lowtide_dry_set_stream(void* handle,
                                                                  void* stream);
// One computation: a product, a convolution, a solver's step.
__attribute__((visibility("default"))) int lowtide_dry_computes(
    const char* name, void* handle);

}  // extern "C"

namespace lowtide::dry {

// A cudaStream_t; null, the default stream, for a handle that was given none.
void* stream_of_handle(void* handle);

}  // namespace lowtide::dry
