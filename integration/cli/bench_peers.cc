#include "integration/cli/bench_peers.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "codecs/codecs.h"
#include "integration/cli/error.h"
#include "integration/cli/options.h"
#include "integration/comm/half.h"

namespace gradgate::cli {

extern const unsigned char kPeersScript[];
extern const std::size_t kPeersScriptBytes;

namespace {

uint32_t magnitude(float x) { return std::bit_cast<uint32_t>(x) & 0x7fffffffu; }
size_t entries(size_t count) { return codecs::entries_of_ratio(peer_topk(), count); }

// A file in the temporary directory, gone with the object.
class TemporaryFile {
 public:
  explicit TemporaryFile(std::span<const std::byte> content) {
    const char* folder = std::getenv("TMPDIR");
    path_ = std::string(folder != nullptr && *folder != 0 ? folder : "/tmp") + "/gradgate-peers-XXXXXX";
    const int file = mkstemp(path_.data());
    if (file < 0) throw RunError("--peers: " + path_ + ": " + std::strerror(errno));
    std::FILE* stream = fdopen(file, "wb");
    const bool whole = std::fwrite(content.data(), 1, content.size(), stream) == content.size();
    if (std::fclose(stream) == 0 && whole) return;
    const std::string why = std::strerror(errno);
    unlink(path_.c_str());
    throw RunError("--peers: " + path_ + ": " + why);
  }
  ~TemporaryFile() { unlink(path_.c_str()); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::string quoted(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

}  // namespace

CodecSpec peer_topk() {
  CodecSpec spec;
  if (!parse_codec("topk:0.01:noef", &spec, nullptr).ok()) throw RunError("--peers: topk is not there");
  return spec;
}

PeerSums expected_sums(std::span<const float> gradient) {
  PeerSums sums;
  std::vector<uint32_t> magnitudes(gradient.size());
  for (size_t i = 0; i < gradient.size(); ++i) {
    magnitudes[i] = magnitude(gradient[i]);
    sums.f16 += comm::float_to_f16(gradient[i]);
    sums.bf16 += comm::float_to_bf16(gradient[i]);
  }
  const auto end = magnitudes.begin() + static_cast<std::ptrdiff_t>(entries(gradient.size()));
  std::nth_element(magnitudes.begin(), end, magnitudes.end(), std::greater<>());
  sums.topk = std::accumulate(magnitudes.begin(), end, uint64_t{0});
  return sums;
}

void NthElementPeer::choose() {
  std::iota(index_.begin(), index_.end(), 0u);
  const auto end = index_.begin() + static_cast<std::ptrdiff_t>(entries(index_.size()));
  std::nth_element(index_.begin(), end, index_.end(), [this](uint32_t a, uint32_t b) { return magnitude(gradient_[a]) > magnitude(gradient_[b]); });
}

uint64_t NthElementPeer::sum() const {
  uint64_t sum = 0;
  for (size_t j = 0; j < entries(index_.size()); ++j) sum += magnitude(gradient_[index_[j]]);
  return sum;
}

std::vector<PeerTimes> torch_peers(const TorchRun& run, std::span<const float> gradient, const PeerSums& expected, std::string* note) {
  if (gradient.empty()) {
    *note = "nothing to choose from";
    return {};
  }
  const TemporaryFile data(std::as_bytes(gradient)), script(std::as_bytes(std::span(kPeersScript, kPeersScriptBytes)));
  const bool on_device = run.device == Device::cuda;
  std::string command = quoted(run.python) + " " + quoted(script.path()) + " " + quoted(data.path()) + (on_device ? " cuda" : " cpu");
  for (const size_t number : {gradient.size(), entries(gradient.size()), run.rounds, size_t{run.threads}, run.flush_bytes}) command += " " + std::to_string(number);
  std::FILE* pipe = popen((command + " </dev/null").c_str(), "r");
  if (pipe == nullptr) throw RunError("--peers: " + run.python + ": " + std::strerror(errno));
  std::string output;
  char piece[4096];
  for (size_t n; (n = std::fread(piece, 1, sizeof piece, pipe)) > 0;) output.append(piece, n);
  const int status = pclose(pipe);
  if (status == 127 * 256 || status == 126 * 256) {  // the shell's words for a program that it cannot start
    *note = "torch not found: cannot run " + run.python;
    return {};
  }
  const Json json = Json::parse(output, nullptr, false);
  if (status != 0 || !json.is_object()) throw RunError("--peers: " + run.python + " ended with " + std::to_string(status) + ": " + output.substr(0, 200));
  if (json.contains("missing")) {
    *note = json["missing"].get<std::string>() + " (" + run.python + ")";
    return {};
  }
  *note = "torch " + json["version"].get<std::string>() + ", " + json["where"].get<std::string>() + ", in a process of its own after the rounds above";
  const auto seconds = [&](const char* name) { return json["seconds"][name].get<std::vector<double>>(); };
  const auto wrong = [&](const char* name, uint64_t sum) { return static_cast<uint64_t>(json[name].get<uint64_t>() != sum); };
  return {{"torch.topk 1 %", seconds("topk"), {}, wrong("topk_bits", expected.topk)},
          {"torch float16", seconds("f16"), seconds("f16_back"), wrong("f16_bits", expected.f16)},
          {"torch bfloat16", seconds("bf16"), seconds("bf16_back"), wrong("bf16_bits", expected.bf16)}};
}

}  // namespace gradgate::cli
