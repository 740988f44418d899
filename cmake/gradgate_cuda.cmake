# GRADGATE_CUDA: libgradgate_cuda, which libgradgate opens at run time. nvcc is called directly: CMake 3.25 does not know how to ask
# CUDA 13 for C++20. Result: GRADGATE_HAVE_CUDA, and where the toolkit's headers and runtime are.
set(GRADGATE_CUDA_ARCHITECTURES "75;80;86;89;90;100" CACHE STRING "Compute capabilities to compile for; those the compiler does not know are left out")
set(GRADGATE_HAVE_CUDA FALSE CACHE INTERNAL "libgradgate_cuda is built")

if(GRADGATE_CUDA STREQUAL "OFF")
  message(STATUS "gradgate: CUDA off")
  return()
endif()
foreach(architecture ${GRADGATE_CUDA_ARCHITECTURES})
  if(NOT architecture MATCHES "^[0-9]+a?$" OR architecture LESS 75)
    message(FATAL_ERROR "gradgate: GRADGATE_CUDA_ARCHITECTURES has '${architecture}', accepted: compute capabilities of 75 or more, e.g. 80;90")
  endif()
endforeach()

find_program(GRADGATE_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin PATHS /usr/local/cuda)
if(NOT GRADGATE_NVCC)
  if(GRADGATE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "gradgate: GRADGATE_CUDA=ON, but nvcc was not found")
  endif()
  message(STATUS "gradgate: CUDA skipped, nvcc not found")
  return()
endif()

# nvcc may be a script in front of the toolkit: it knows where that is.
execute_process(COMMAND ${GRADGATE_NVCC} --dryrun -x cu -c ${CMAKE_CURRENT_LIST_FILE} -o /dev/null ERROR_VARIABLE gradgate_dryrun OUTPUT_QUIET)
string(REGEX MATCH "TOP=([^\n]*)" gradgate_top "${gradgate_dryrun}")
string(STRIP "${CMAKE_MATCH_1}" gradgate_top)
get_filename_component(gradgate_top "${gradgate_top}" REALPATH)
find_path(GRADGATE_CUDA_INCLUDE cuda_runtime_api.h HINTS ${gradgate_top}/include ${gradgate_top}/targets/x86_64-linux/include ${gradgate_top}/targets/sbsa-linux/include NO_DEFAULT_PATH)
find_library(GRADGATE_CUDART cudart HINTS ${gradgate_top}/lib64 ${gradgate_top}/lib ${gradgate_top}/targets/x86_64-linux/lib ${gradgate_top}/targets/sbsa-linux/lib NO_DEFAULT_PATH)
if(NOT GRADGATE_CUDA_INCLUDE OR NOT GRADGATE_CUDART)
  if(GRADGATE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "gradgate: GRADGATE_CUDA=ON, but cuda_runtime_api.h or libcudart was not found under '${gradgate_top}'")
  endif()
  message(STATUS "gradgate: CUDA skipped, no runtime under '${gradgate_top}'")
  return()
endif()

execute_process(COMMAND ${GRADGATE_NVCC} --list-gpu-arch OUTPUT_VARIABLE gradgate_known OUTPUT_STRIP_TRAILING_WHITESPACE)
set(gradgate_gencode)
set(gradgate_built)
foreach(architecture ${GRADGATE_CUDA_ARCHITECTURES})
  if("${gradgate_known}" MATCHES "compute_${architecture}")
    # PTX of every architecture goes along: newer devices can run it.
    list(APPEND gradgate_gencode -gencode "arch=compute_${architecture},code=[sm_${architecture},compute_${architecture}]")
    list(APPEND gradgate_built ${architecture})
  endif()
endforeach()
if(NOT gradgate_built)
  message(FATAL_ERROR "gradgate: ${GRADGATE_NVCC} knows none of GRADGATE_CUDA_ARCHITECTURES='${GRADGATE_CUDA_ARCHITECTURES}'")
endif()
list(JOIN gradgate_built " " gradgate_built)
message(STATUS "gradgate: CUDA for sm ${gradgate_built} by ${GRADGATE_NVCC}")
set(GRADGATE_HAVE_CUDA TRUE CACHE INTERNAL "libgradgate_cuda is built")

# gradgate_cuda_library(<name> SOURCES <a.cu>… OBJECTS <host objects>…): a shared library beside the program, linked to the shared CUDA
# runtime.
function(gradgate_cuda_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;OBJECTS" ${ARGN})
  set(library ${PROJECT_BINARY_DIR}/lib${name}.so)
  set(objects)
  foreach(source ${ARG_SOURCES})
    get_filename_component(stem ${source} NAME_WE)
    set(object ${CMAKE_CURRENT_BINARY_DIR}/${name}.${stem}.o)
    list(APPEND objects ${object})
    add_custom_command(OUTPUT ${object}
      COMMAND ${GRADGATE_NVCC} -std=c++20 ${gradgate_gencode} -fmad=false -ftz=false -prec-div=true -prec-sqrt=true -O3 -lineinfo
              -Xcompiler -fPIC,-fvisibility=hidden,-ffp-contract=off -I${PROJECT_SOURCE_DIR} -I${PROJECT_SOURCE_DIR}/include -I${PROJECT_BINARY_DIR}/include
              -MD -MF ${object}.d -c ${source} -o ${object}
      DEPENDS ${source} DEPFILE ${object}.d COMMENT "nvcc ${name} ${stem}" VERBATIM)
  endforeach()
  add_custom_command(OUTPUT ${library}
    COMMAND ${CMAKE_CXX_COMPILER} -shared -o ${library} ${objects} ${ARG_OBJECTS} ${GRADGATE_CUDART} -Wl,-soname,lib${name}.so
    DEPENDS ${objects} ${ARG_OBJECTS} COMMENT "Linking lib${name}.so" VERBATIM COMMAND_EXPAND_LISTS)
  add_custom_target(${name} ALL DEPENDS ${library})
  install(FILES ${library} DESTINATION ${CMAKE_INSTALL_LIBDIR})
endfunction()
