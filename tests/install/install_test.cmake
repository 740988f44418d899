# Run by ctest: see CMakeLists.txt beside this file.
set(scratch ${BUILD_DIR}/install-test)
file(REMOVE_RECURSE ${scratch})

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "exit ${result} from: ${ARGN}\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

run(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${scratch}/prefix)
# What README.md shows of the C++ interface compiles as it stands there, given the names that it leaves to the reader.
file(READ ${SOURCE_DIR}/README.md readme)
if(NOT readme MATCHES "```cpp\n([^`]+)```")
  message(FATAL_ERROR "README.md has no block of C++")
endif()
file(WRITE ${scratch}/readme.cc "#include <gradgate/gradgate.h>
void shown(gradgate::Communicator& comm, std::span<const gradgate::BucketLayout> buckets, uint32_t b, float* gradient, size_t count) {
${CMAKE_MATCH_1}}
")

run(${CMAKE_COMMAND} -S ${SOURCE_DIR}/tests/install/consumer -B ${scratch}/build -G ${GENERATOR} -DCMAKE_PREFIX_PATH=${scratch}/prefix
    -DEXAMPLES=${SOURCE_DIR}/examples -DREADME=${scratch}/readme.cc -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_C_COMPILER=${CC} -DCMAKE_BUILD_TYPE=Release)
run(${CMAKE_COMMAND} --build ${scratch}/build)
run(${scratch}/build/consumer)
if(NOT output MATCHES "average 2.5")
  message(FATAL_ERROR "the C++ consumer printed: ${output}")
endif()
run(${scratch}/build/average)
if(NOT output MATCHES "gradient\\[999\\] = 999.5")
  message(FATAL_ERROR "the C example printed: ${output}")
endif()

find_program(pkg_config pkg-config)
if(pkg_config)
  file(GLOB_RECURSE pc ${scratch}/prefix/gradgate.pc)
  get_filename_component(pc_dir ${pc} DIRECTORY)
  set(ENV{PKG_CONFIG_PATH} ${pc_dir})
  run(${pkg_config} --cflags --libs gradgate)
  separate_arguments(flags UNIX_COMMAND "${output}")
  run(${CC} ${SOURCE_DIR}/examples/c/average.c -o ${scratch}/average-pc ${flags})
  run(${CMAKE_COMMAND} -E env LD_LIBRARY_PATH=${scratch}/prefix/lib ${scratch}/average-pc)
endif()
