# The dry driver: liblowtide_cuda_dry.so, which stands for CUDA's driver, runtime
# and libraries (csrc/phantom/driver).  Preloaded, never linked.
#
# Sets LOWTIDE_DRY_TARGETS: lowtide_cuda_dry where torch is a CUDA build, else
# nothing.

# Compiled without torch's include directories, so that the model of time cannot
# come to depend on torch; tests link it wherever they run.
file(GLOB time_sources CONFIGURE_DEPENDS "csrc/phantom/time/*.cpp")
add_library(lowtide_phantom_time OBJECT ${time_sources})
target_compile_features(lowtide_phantom_time PUBLIC cxx_std_20)
target_include_directories(lowtide_phantom_time PUBLIC csrc)
target_link_libraries(lowtide_phantom_time PRIVATE lowtide_warnings)

set(LOWTIDE_DRY_TARGETS "")
if(NOT LOWTIDE_TORCH_CUDA)
  return()
endif()
get_filename_component(nvidia_root "${LOWTIDE_TORCH_CUDA_LIB_DIR}/../.." ABSOLUTE)
file(GLOB nvidia_headers "${nvidia_root}/*/include")

set(dry_generated "${PROJECT_BINARY_DIR}/dry/nvidia_functions.cpp"
  "${PROJECT_BINARY_DIR}/dry/nvidia_functions_rest.cpp")
list(GET dry_generated 0 first_generated)
add_custom_command(OUTPUT ${dry_generated}
  COMMAND ${CMAKE_COMMAND} -E make_directory "${PROJECT_BINARY_DIR}/dry"
  COMMAND ${Python_EXECUTABLE} "${PROJECT_SOURCE_DIR}/cmake/nvidia_functions.py"
    "${first_generated}" "${LOWTIDE_TORCH_LIB_DIR}" "${nvidia_root}"
  DEPENDS "${PROJECT_SOURCE_DIR}/cmake/nvidia_functions.py"
    "${LOWTIDE_TORCH_LIB_DIR}/../version.py" VERBATIM)

set(dry_models address_space.cpp capture.cpp completion.cpp gpus.cpp
  kept_bytes.cpp order.cpp pinned_memory.cpp settings.cpp timekeeper.cpp)
# What is no function of CUDA's, so that tests can link it.
list(TRANSFORM dry_models PREPEND "csrc/phantom/driver/")
add_library(lowtide_dry_models OBJECT ${dry_models})
# Its files name their helpers alike, and take a second each.
set_target_properties(lowtide_dry_models PROPERTIES UNITY_BUILD OFF)
target_compile_features(lowtide_dry_models PUBLIC cxx_std_20)
target_include_directories(lowtide_dry_models PUBLIC csrc)
target_include_directories(lowtide_dry_models SYSTEM PUBLIC ${nvidia_headers})
target_link_libraries(lowtide_dry_models PRIVATE lowtide_warnings)

file(GLOB dry_sources CONFIGURE_DEPENDS RELATIVE "${PROJECT_SOURCE_DIR}"
  "csrc/phantom/driver/*.cpp")
list(REMOVE_ITEM dry_sources ${dry_models})
add_library(lowtide_cuda_dry SHARED ${dry_sources} ${dry_generated}
  $<TARGET_OBJECTS:lowtide_dry_models> $<TARGET_OBJECTS:lowtide_phantom_time>
  ${older_libraries})
set_target_properties(lowtide_cuda_dry PROPERTIES
  DEFINE_SYMBOL "" NO_SONAME ON UNITY_BUILD OFF)
target_compile_features(lowtide_cuda_dry PRIVATE cxx_std_20)
target_include_directories(lowtide_cuda_dry PRIVATE csrc)
target_include_directories(lowtide_cuda_dry SYSTEM PRIVATE ${nvidia_headers})
target_link_libraries(lowtide_cuda_dry PRIVATE lowtide_warnings)
# Programs that look for the driver find it by this name.
target_link_options(lowtide_cuda_dry PRIVATE -Wl,-soname,libcuda.so.1
  -Wl,-Bsymbolic-functions)
set_source_files_properties(${dry_generated} PROPERTIES
  COMPILE_OPTIONS "-w;-O0")

# Beside it, what only torch knows: loaded by lowtide/phantom/dry, never linked.
file(GLOB observer_sources CONFIGURE_DEPENDS "csrc/phantom/observer/*.cpp")
add_library(lowtide_dry_observer SHARED ${observer_sources} ${older_libraries})
target_compile_features(lowtide_dry_observer PRIVATE cxx_std_20)
target_include_directories(lowtide_dry_observer PRIVATE csrc)
target_include_directories(lowtide_dry_observer SYSTEM PRIVATE ${nvidia_headers}
  ${Python_INCLUDE_DIRS})
target_link_libraries(lowtide_dry_observer PRIVATE lowtide_warnings torch::cpu
  "${LOWTIDE_TORCH_LIB_DIR}/libc10_cuda.so")
# Where the functions of base/dynamic_loader.h are before glibc 2.34.
find_library(LOWTIDE_LIBDL libdl.so.2)
if(LOWTIDE_LIBDL)
  foreach(library lowtide_cuda_dry lowtide_dry_observer)
    target_link_options(${library} PRIVATE -Wl,--push-state,--no-as-needed
      "${LOWTIDE_LIBDL}" -Wl,--pop-state)
  endforeach()
endif()
set(LOWTIDE_DRY_TARGETS lowtide_cuda_dry lowtide_dry_observer)
