// The Python module lowtide._C.  Bindings hold no logic; each room binds its
// types in its own bind_<room>.cpp.
#include <pybind11/pybind11.h>

#include <string>

#include "python/bindings.h"

namespace py = pybind11;

namespace {

py::dict build_info() {
  const std::string cuda = LOWTIDE_CUDA_VERSION;
  py::dict info;
  info["version"] = LOWTIDE_VERSION;
  info["torch"] = LOWTIDE_TORCH_VERSION;
  info["cuda"] = !cuda.empty();
  info["cuda_version"] = cuda;
  info["cuda_archs"] = cuda.empty() ? "" : LOWTIDE_CUDA_ARCHS;
  info["compiler"] = LOWTIDE_COMPILER;
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "lowtide's C++ engine";
  module.def("build_info", &build_info,
             "What this build was compiled with: versions and CUDA.");
  lowtide::python::bind_memory(module);
  lowtide::python::bind_comm(module);
  lowtide::python::bind_shard(module);
  lowtide::python::bind_activation(module);
  lowtide::python::bind_gather(module);
  lowtide::python::bind_spmd(module);
}
