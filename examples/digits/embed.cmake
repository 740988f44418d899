# embed_bytes(<file> <out.cc> <namespace> <symbol>): a C++ source that defines `const unsigned char <symbol>[]` and
# `const size_t <symbol>Bytes` with the bytes of a file. CMake itself reads the file, so no tool beyond the compiler is needed.
function(embed_bytes file out namespace symbol)
  file(READ ${file} hex HEX)
  string(LENGTH "${hex}" digits)
  math(EXPR bytes "${digits} / 2")
  string(REGEX REPLACE "(................................)" "\\1\n" hex "${hex}")
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," hex "${hex}")
  get_filename_component(name ${file} NAME)
  file(CONFIGURE OUTPUT ${out} @ONLY CONTENT "// Generated from @name@ when the build was configured.
#include <cstddef>

namespace @namespace@ {
extern const unsigned char @symbol@[];
extern const std::size_t @symbol@Bytes;
const unsigned char @symbol@[] = {
@hex@};
const std::size_t @symbol@Bytes = @bytes@;
}  // namespace @namespace@
")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
endfunction()
