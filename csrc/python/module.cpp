// The Python module lowtide._C.  Bindings hold no logic; each room binds its
// types in its own bind_<room>.cpp.
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <exception>
#include <optional>
#include <string>

#include "base/exception_text.h"
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

// torch's error of Python has no text of its own, and leaves the interpreter's
// error set for who calls back into Python.
std::optional<std::string> text_of_python_error(const std::exception& error) {
  const auto* of_python = dynamic_cast<const python_error*>(&error);
  if (of_python == nullptr) {
    return std::nullopt;
  }
  const py::gil_scoped_acquire gil;
  python_error copy(*of_python);
  copy.persist();
  if (copy.type == nullptr) {
    return std::nullopt;
  }
  const auto name = py::str(py::handle(copy.type).attr("__name__"));
  return std::string(name) + ": " + copy.what();
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "lowtide's C++ engine";
  lowtide::base::use_exception_text(&text_of_python_error);
  module.def("build_info", &build_info,
             "What this build was compiled with: versions and CUDA.");
  lowtide::python::bind_memory(module);
  lowtide::python::bind_comm(module);
  lowtide::python::bind_shard(module);
  lowtide::python::bind_activation(module);
  lowtide::python::bind_gather(module);
  lowtide::python::bind_spmd(module);
}
