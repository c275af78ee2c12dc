# Asks the Python interpreter where its torch is.  find_package(Torch) is not
# used: under a CUDA wheel it is fatal on a machine without the CUDA toolkit.
#
# Sets LOWTIDE_TORCH_VERSION  "2.11.0+cu130", of one of LOWTIDE_TORCH_MINORS
#      LOWTIDE_TORCH_CUDA     "13.0", empty for a CPU build
#      LOWTIDE_TORCH_LIB_DIR
# and the targets torch::cpu, torch::python (and Python::Module).

# Minor versions that the tests are run with (docs/torch_versions.md); where any
# will do, the first is asked for.
set(LOWTIDE_TORCH_MINORS 2.11 2.12 2.13 2.14 2.15)
list(GET LOWTIDE_TORCH_MINORS 0 torch_first)
list(JOIN LOWTIDE_TORCH_MINORS ", " torch_minors)
string(REGEX REPLACE ", ([^,]+)$" " or \\1" torch_minors "${torch_minors}")

find_package(Python 3.11 COMPONENTS Interpreter Development.Module QUIET)
if(NOT Python_Interpreter_FOUND)
  message(FATAL_ERROR "lowtide: Python: expected an interpreter >= 3.11, got "
    "none. Run `apt install python3-dev python3-venv`, or pass "
    "-DPython_EXECUTABLE=<path>.")
elseif(NOT Python_Development.Module_FOUND)
  message(FATAL_ERROR "lowtide: Python.h: expected the headers of "
    "${Python_EXECUTABLE}, got none. Run `apt install python3-dev`.")
endif()

execute_process(
  COMMAND ${Python_EXECUTABLE} -W ignore -c "
import pathlib, torch
root = pathlib.Path(torch.__file__).parent
site = sorted(root.parent.glob('nvidia/cu*/lib'))
print(torch.__version__, torch.version.cuda or '', root.as_posix(),
      int(torch.compiled_with_cxx11_abi()), site[0] if site else '', sep=';')"
  OUTPUT_VARIABLE torch_facts
  ERROR_VARIABLE torch_error
  RESULT_VARIABLE torch_missing
  OUTPUT_STRIP_TRAILING_WHITESPACE)
if(torch_missing)
  string(REGEX REPLACE ".*\n([^\n]+)\n*$" "\\1" torch_error "${torch_error}")
  message(FATAL_ERROR "lowtide: torch: expected torch ${torch_minors} "
    "in ${Python_EXECUTABLE}, got '${torch_error}'. "
    "Run `${Python_EXECUTABLE} -m pip install 'torch==${torch_first}.*'`.")
endif()
list(GET torch_facts 0 LOWTIDE_TORCH_VERSION)
list(GET torch_facts 1 LOWTIDE_TORCH_CUDA)
list(GET torch_facts 2 torch_root)
list(GET torch_facts 3 torch_cxx11_abi)
list(GET torch_facts 4 LOWTIDE_TORCH_CUDA_LIB_DIR)
string(REGEX MATCH "^[0-9]+\\.[0-9]+" torch_minor "${LOWTIDE_TORCH_VERSION}")
if(NOT torch_minor IN_LIST LOWTIDE_TORCH_MINORS)
  message(FATAL_ERROR "lowtide: torch: expected ${torch_minors}, got "
    "${LOWTIDE_TORCH_VERSION} in ${Python_EXECUTABLE}. "
    "Run `${Python_EXECUTABLE} -m pip install 'torch==${torch_first}.*'`.")
endif()
set(LOWTIDE_TORCH_LIB_DIR "${torch_root}/lib")

add_library(torch::cpu INTERFACE IMPORTED)
target_include_directories(torch::cpu SYSTEM INTERFACE
  "${torch_root}/include" "${torch_root}/include/torch/csrc/api/include")
target_compile_definitions(torch::cpu INTERFACE
  _GLIBCXX_USE_CXX11_ABI=${torch_cxx11_abi} USE_DISTRIBUTED USE_C10D_GLOO)
target_link_libraries(torch::cpu INTERFACE
  "${LOWTIDE_TORCH_LIB_DIR}/libtorch.so"
  "${LOWTIDE_TORCH_LIB_DIR}/libtorch_cpu.so"
  "${LOWTIDE_TORCH_LIB_DIR}/libc10.so")

add_library(torch::python INTERFACE IMPORTED)
target_link_libraries(torch::python INTERFACE torch::cpu Python::Module
  "${LOWTIDE_TORCH_LIB_DIR}/libtorch_python.so")
