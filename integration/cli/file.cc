#include "integration/cli/file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "integration/cli/error.h"

namespace gradgate::cli {

void write_whole(const std::string& path, std::initializer_list<std::string_view> parts) {
  std::string temporary = path + ".XXXXXX";
  const int descriptor = mkstemp(temporary.data());
  if (descriptor < 0) throw RunError(path + ": cannot be written: " + std::strerror(errno));
  const auto fail = [&] {
    const int error = errno;
    unlink(temporary.c_str());
    throw RunError(path + ": cannot be written: " + std::strerror(error));
  };
  std::FILE* file = fdopen(descriptor, "wb");
  if (file == nullptr) {
    close(descriptor);
    fail();
  }
  bool good = true;
  for (const std::string_view part : parts)
    good = good && (part.empty() || std::fwrite(part.data(), 1, part.size(), file) == part.size());
  good = good && std::fflush(file) == 0;
  // mkstemp gives 0600; a result file gets what a plain open() would have given it.
  const mode_t mask = umask(0);
  umask(mask);
  good = good && fchmod(descriptor, static_cast<mode_t>(0666 & ~mask)) == 0;
  if (std::fclose(file) != 0) good = false;
  if (!good || std::rename(temporary.c_str(), path.c_str()) != 0) fail();
}

}  // namespace gradgate::cli
