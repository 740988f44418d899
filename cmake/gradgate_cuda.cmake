# GRADGATE_CUDA: so far the element code of the codecs is compiled for the device too, so that kernels can be built from the same lines.
# nvcc is called directly: CMake 3.25 does not know how to ask CUDA 13 for C++20.
set(GRADGATE_CUDA_ARCHITECTURE "90" CACHE STRING "Compute capability to compile device code for; the minimum is 75")
if(NOT GRADGATE_CUDA_ARCHITECTURE MATCHES "^[0-9]+a?$" OR GRADGATE_CUDA_ARCHITECTURE LESS 75)
  message(FATAL_ERROR "gradgate: GRADGATE_CUDA_ARCHITECTURE is '${GRADGATE_CUDA_ARCHITECTURE}', accepted: a compute capability of 75 or more, e.g. 90")
endif()

function(gradgate_cuda_object name source)
  if(GRADGATE_CUDA STREQUAL "OFF")
    message(STATUS "gradgate: CUDA off")
    return()
  endif()
  find_program(GRADGATE_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin PATHS /usr/local/cuda)
  if(NOT GRADGATE_NVCC)
    if(GRADGATE_CUDA STREQUAL "ON")
      message(FATAL_ERROR "gradgate: GRADGATE_CUDA=ON, but nvcc was not found")
    endif()
    message(STATUS "gradgate: CUDA skipped, nvcc not found")
    return()
  endif()
  message(STATUS "gradgate: CUDA: element code is compiled for sm_${GRADGATE_CUDA_ARCHITECTURE} by ${GRADGATE_NVCC}")
  set(object ${CMAKE_CURRENT_BINARY_DIR}/${name}.o)
  add_custom_command(OUTPUT ${object}
    COMMAND ${GRADGATE_NVCC} -std=c++20 -arch=sm_${GRADGATE_CUDA_ARCHITECTURE} -fmad=false -ftz=false -prec-div=true -prec-sqrt=true -O3
            -I${PROJECT_SOURCE_DIR} -I${PROJECT_SOURCE_DIR}/include -MD -MF ${object}.d -c ${source} -o ${object}
    DEPENDS ${source} DEPFILE ${object}.d COMMENT "nvcc ${name}" VERBATIM)
  add_custom_target(${name} ALL DEPENDS ${object})
endfunction()
