// Functions of NVIDIA's libraries that the dry driver does not have.
#pragma once

extern "C" {

// Says so, once a name, and remembers it; returns `status`, what the function's
// library calls an error.  The build makes a function of every other name in
// those libraries that ends here (cmake/nvidia_functions.py).
__attribute__((visibility("default"))) int lowtide_dry_missing(const char* name,
                                                               int status);

}  // extern "C"
