# LOWTIDE_CUDA=AUTO|ON|OFF -> LOWTIDE_WITH_CUDA and the target torch::cuda.
#
# CUDA is on if nvcc exists and torch is a CUDA build of the same major
# version; whether this machine has a GPU does not matter.

set(LOWTIDE_CUDA AUTO CACHE STRING "compile csrc/*/cuda: AUTO, ON or OFF")
set(LOWTIDE_CUDA_ARCHS "8.0;9.0;10.0+PTX" CACHE STRING
  "GPU architectures, as in TORCH_CUDA_ARCH_LIST")
if(NOT LOWTIDE_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "lowtide: LOWTIDE_CUDA: expected AUTO, ON or OFF, got "
    "'${LOWTIDE_CUDA}'. Set one of the three.")
endif()

set(LOWTIDE_WITH_CUDA OFF)
if(LOWTIDE_CUDA STREQUAL "OFF")
  return()
endif()

# "9.0" -> 90-real, "10.0+PTX" -> 100 (real and virtual).
set(CMAKE_CUDA_ARCHITECTURES "")
foreach(arch IN LISTS LOWTIDE_CUDA_ARCHS)
  if(NOT arch MATCHES "^([0-9]+)\\.([0-9]a?)(\\+PTX)?$")
    message(FATAL_ERROR "lowtide: LOWTIDE_CUDA_ARCHS: expected entries such as "
      "9.0 or 10.0+PTX, got '${arch}'. Separate entries with semicolons.")
  endif()
  set(number "${CMAKE_MATCH_1}${CMAKE_MATCH_2}")
  if(NOT CMAKE_MATCH_3)
    string(APPEND number "-real")
  endif()
  list(APPEND CMAKE_CUDA_ARCHITECTURES "${number}")
endforeach()

# A toolkit that the environment names is the only one considered.
if(DEFINED ENV{CUDACXX})
  set(nvcc_places "$ENV{CUDACXX}")
elseif(DEFINED ENV{CUDA_HOME})
  set(nvcc_places "$ENV{CUDA_HOME}/bin/nvcc")
else()
  set(nvcc_places "PATH or /usr/local/cuda")
  find_program(LOWTIDE_NVCC nvcc PATHS /usr/local/cuda/bin)
endif()
if(NOT LOWTIDE_NVCC AND EXISTS "${nvcc_places}")
  set(LOWTIDE_NVCC "${nvcc_places}")
endif()

set(obstacle "")
if(NOT LOWTIDE_TORCH_CUDA)
  set(obstacle "a CUDA build of torch, got the CPU build \
${LOWTIDE_TORCH_VERSION}. Install a CUDA build of torch, or set LOWTIDE_CUDA=OFF.")
elseif(NOT LOWTIDE_NVCC)
  set(obstacle "nvcc ${LOWTIDE_TORCH_CUDA} (${nvcc_places}), got none. Install \
the CUDA toolkit ${LOWTIDE_TORCH_CUDA} and set CUDA_HOME, or set LOWTIDE_CUDA=OFF.")
else()
  execute_process(COMMAND ${LOWTIDE_NVCC} --version OUTPUT_VARIABLE nvcc_text)
  string(REGEX MATCH "release (([0-9]+)\\.[0-9]+)" _ "${nvcc_text}")
  set(nvcc_version "${CMAKE_MATCH_1}")
  if(NOT LOWTIDE_TORCH_CUDA MATCHES "^${CMAKE_MATCH_2}\\.")
    set(obstacle "nvcc of torch's CUDA major (${LOWTIDE_TORCH_CUDA}), got \
${nvcc_version} (${LOWTIDE_NVCC}). Set CUDA_HOME to a matching toolkit, or set \
LOWTIDE_CUDA=OFF.")
  endif()
endif()
if(obstacle)
  if(LOWTIDE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "lowtide: LOWTIDE_CUDA=ON: expected ${obstacle}")
  endif()
  message(STATUS "lowtide: CUDA is off: expected ${obstacle}")
  return()
endif()

set(CMAKE_CUDA_COMPILER "${LOWTIDE_NVCC}")
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
set(LOWTIDE_WITH_CUDA ON)

add_library(torch::cuda INTERFACE IMPORTED)
target_compile_definitions(torch::cuda INTERFACE LOWTIDE_WITH_CUDA)
target_link_libraries(torch::cuda INTERFACE torch::cpu CUDA::cudart
  "${LOWTIDE_TORCH_LIB_DIR}/libtorch_cuda.so"
  "${LOWTIDE_TORCH_LIB_DIR}/libc10_cuda.so")
