# ccache where it exists; precompiled headers need the sloppiness.
find_program(LOWTIDE_CCACHE ccache)
if(LOWTIDE_CCACHE)
  add_compile_options($<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fpch-preprocess>)
  foreach(language CXX CUDA)
    set(CMAKE_${language}_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
      CCACHE_SLOPPINESS=pch_defines,time_macros ${LOWTIDE_CCACHE})
  endforeach()
endif()
