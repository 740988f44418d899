# Compile options shared by every target, and the helpers with which each folder declares its part of the library.

find_package(Threads REQUIRED)

# One interface target carries the rules of the arithmetic: C++20, no contraction of a*b+c into one rounding, no fast-math. They
# are part of the payload format (docs/determinism.md), so they hold for every object of this project.
add_library(gradgate_options INTERFACE)
target_compile_features(gradgate_options INTERFACE cxx_std_20)
target_compile_options(gradgate_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX,C>:-Wall -Wextra -Wshadow -ffp-contract=off -fno-fast-math>
  $<$<AND:$<COMPILE_LANGUAGE:CXX,C>,$<BOOL:${GRADGATE_WERROR}>>:-Werror>)
target_include_directories(gradgate_options INTERFACE
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/include>
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>)
target_link_libraries(gradgate_options INTERFACE Threads::Threads)
if(GRADGATE_SANITIZE)
  target_compile_options(gradgate_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX,C>:-fsanitize=${GRADGATE_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all>)
  if(GRADGATE_SANITIZE MATCHES "address.*undefined|undefined.*address")
    # AddressSanitizer finds what these checks look for; together they double the time that a compilation takes.
    target_compile_options(gradgate_options INTERFACE $<$<COMPILE_LANGUAGE:CXX,C>:-fno-sanitize=null,object-size,vptr>)
  endif()
  target_link_options(gradgate_options INTERFACE -fsanitize=${GRADGATE_SANITIZE})
endif()

configure_file(${PROJECT_SOURCE_DIR}/cmake/version.h.in ${PROJECT_BINARY_DIR}/include/gradgate/version.h @ONLY)

# gradgate_part(<name> <source>...): one folder's objects of libgradgate.
function(gradgate_part name)
  add_library(${name} OBJECT ${ARGN})
  target_link_libraries(${name} PUBLIC gradgate_options)
  set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden
                                           C_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
endfunction()

# gradgate_test_headers(): GoogleTest's headers, compiled once for all test programs: they are most of what a test file's compilation takes.
function(gradgate_test_headers)
  file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/test_headers.cc CONTENT "")
  add_library(gradgate_test_headers OBJECT ${CMAKE_CURRENT_BINARY_DIR}/test_headers.cc)
  target_link_libraries(gradgate_test_headers PRIVATE gradgate_options GTest::gtest GTest::gmock)
  target_precompile_headers(gradgate_test_headers PRIVATE <gmock/gmock.h> <gtest/gtest.h>)
endfunction()

# gradgate_test(<name> LABELS <labels> SOURCES <sources> [LINK <targets>] [TIMEOUT <s>]): a GoogleTest program, one ctest entry a case.
function(gradgate_test name)
  cmake_parse_arguments(arg "" "TIMEOUT" "LABELS;SOURCES;LINK" ${ARGN})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE gradgate_options GTest::gtest GTest::gmock GTest::gtest_main ${arg_LINK})
  target_precompile_headers(${name} REUSE_FROM gradgate_test_headers)
  target_compile_definitions(${name} PRIVATE GRADGATE_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  foreach(label ${arg_LABELS})  # target tests_<label>: what `ctest -L <label>` needs
    if(NOT TARGET tests_${label})
      add_custom_target(tests_${label})
    endif()
    add_dependencies(tests_${label} ${name})
  endforeach()
  gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60 PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT})
endfunction()
