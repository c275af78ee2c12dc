# One GoogleTest executable per folder of tests/cpp, one ctest entry each: a
# process that loads torch takes 0.4 s to start, so tests share it.  Run one
# test with `build/<room>_test --gtest_filter=...`.

find_package(GTest QUIET)
if(NOT GTest_FOUND)
  message(STATUS "lowtide: GoogleTest: expected the system's, got none; "
    "downloading 1.14.0. Run `apt install libgtest-dev libgmock-dev` to avoid "
    "this, or if the download fails.")
  include(FetchContent)
  FetchContent_Declare(googletest DOWNLOAD_EXTRACT_TIMESTAMP ON
    URL https://github.com/google/googletest/archive/refs/tags/v1.14.0.tar.gz
    URL_HASH SHA256=8ad598c73ad796e0d8280b082cebd82a630d73e73cd3c70057938a6501bba5d7)
  set(INSTALL_GTEST OFF CACHE INTERNAL "")
  FetchContent_MakeAvailable(googletest)
endif()

# What only tests need: runtimes and collectives that write down what happens.
file(GLOB testing_sources CONFIGURE_DEPENDS
  "${PROJECT_SOURCE_DIR}/csrc/testing/*.cpp")
add_library(lowtide_testing STATIC ${testing_sources})
target_link_libraries(lowtide_testing PUBLIC lowtide_core lowtide_warnings)
target_precompile_headers(lowtide_testing REUSE_FROM lowtide_core)

enable_testing()
# What ctest runs, without the package.
add_custom_target(cpp_tests)
file(GLOB rooms CONFIGURE_DEPENDS LIST_DIRECTORIES true
  RELATIVE "${PROJECT_SOURCE_DIR}/tests/cpp" "${PROJECT_SOURCE_DIR}/tests/cpp/*")
foreach(room IN LISTS rooms)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS
    "${PROJECT_SOURCE_DIR}/tests/cpp/${room}/*.cpp")
  if(NOT sources OR (room STREQUAL "driver" AND NOT LOWTIDE_DRY_TARGETS))
    continue()
  endif()
  add_executable(${room}_test ${sources})
  add_dependencies(cpp_tests ${room}_test)
  target_include_directories(${room}_test PRIVATE
    "${PROJECT_SOURCE_DIR}/csrc" "${PROJECT_SOURCE_DIR}/tests/cpp")
  target_link_libraries(${room}_test PRIVATE
    lowtide_testing lowtide_core lowtide_warnings GTest::gmock GTest::gtest_main)
  if(room STREQUAL "phantom" OR room STREQUAL "driver")
    target_sources(${room}_test PRIVATE $<TARGET_OBJECTS:lowtide_phantom_time>)
  endif()
  if(room STREQUAL "driver")
    target_sources(${room}_test PRIVATE $<TARGET_OBJECTS:lowtide_dry_models>)
    target_include_directories(${room}_test SYSTEM PRIVATE ${nvidia_headers})
  endif()
  target_link_options(${room}_test PRIVATE -Wl,--allow-shlib-undefined)
  target_precompile_headers(${room}_test REUSE_FROM lowtide_core)
  # Files of a room name their helpers alike: each has a namespace of its own
  # where they are compiled together, and one without a name elsewhere.
  target_compile_definitions(${room}_test PRIVATE LOWTIDE_FILE=)
  set_target_properties(${room}_test PROPERTIES
    UNITY_BUILD_UNIQUE_ID LOWTIDE_FILE)
  # What tests share is no file's own, and CUDA on the host takes its words.
  list(FILTER sources EXCLUDE REGEX "_test\\.cpp$")
  set_source_files_properties(${sources}
    "${PROJECT_SOURCE_DIR}/tests/cpp/ops/kernels_test.cpp"
    PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  add_test(NAME cpp.${room} COMMAND ${room}_test --gtest_brief=0)
  set_tests_properties(cpp.${room} PROPERTIES TIMEOUT 900
    ENVIRONMENT "${LOWTIDE_SANITIZE_ENVIRONMENT}")
endforeach()

# CUDA's runtime runs over the dry driver, on a GPU or without one.  Only this
# entry has the driver, whose answers CudaRuntimeTest asks for.
set_tests_properties(cpp.device PROPERTIES
  ENVIRONMENT "GTEST_FILTER=-CudaRuntimeTest.*;${LOWTIDE_SANITIZE_ENVIRONMENT}")
if(LOWTIDE_WITH_CUDA)
  add_test(NAME cpp.device.cuda
    COMMAND device_test "--gtest_filter=CudaRuntimeTest.*:*/cuda")
  set(machine LOWTIDE_DRY_GPU=h100 LOWTIDE_DRY_DEVICES=2
    LOWTIDE_DRY_EVENTS=at_sync)
  set_tests_properties(cpp.device.cuda PROPERTIES TIMEOUT 120
    ENVIRONMENT "LD_PRELOAD=$<TARGET_FILE:lowtide_cuda_dry>;${machine}")
endif()
