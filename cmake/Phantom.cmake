# The simulated accelerator: liblowtide_phantom.so and _phantom.

# Compiled without torch's include directories, so that the models of memory and
# time cannot come to depend on torch.
file(GLOB model_sources CONFIGURE_DEPENDS
  "csrc/phantom/allocator/*.cpp" "csrc/phantom/time/*.cpp")
add_library(lowtide_phantom_models OBJECT ${model_sources})
target_compile_features(lowtide_phantom_models PUBLIC cxx_std_20)
target_include_directories(lowtide_phantom_models PUBLIC csrc)
target_link_libraries(lowtide_phantom_models PRIVATE lowtide_warnings)

file(GLOB_RECURSE phantom_sources CONFIGURE_DEPENDS "csrc/phantom/*.cpp")
list(FILTER phantom_sources EXCLUDE REGEX "/phantom/(allocator|time|driver|observer|python)/")
add_library(lowtide_phantom SHARED
  ${phantom_sources} $<TARGET_OBJECTS:lowtide_phantom_models>)
set_target_properties(lowtide_phantom PROPERTIES DEFINE_SYMBOL "")
target_link_libraries(lowtide_phantom
  PUBLIC lowtide_core PRIVATE lowtide_warnings)
target_precompile_headers(lowtide_phantom REUSE_FROM lowtide_core)

file(GLOB phantom_bindings CONFIGURE_DEPENDS "csrc/phantom/python/*.cpp")
add_library(_phantom MODULE ${phantom_bindings})
set_target_properties(_phantom PROPERTIES
  PREFIX "" SUFFIX ".${Python_SOABI}.so" CXX_VISIBILITY_PRESET hidden)
target_link_libraries(_phantom
  PRIVATE lowtide_phantom lowtide_warnings torch::python)
