// What else could do a codec's work: std::nth_element and torch, timed on the same gradient and compared with the codecs' own results.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "gradgate/codec.h"
#include "integration/cli/device.h"

namespace gradgate::cli {

/// One peer; seconds, one entry per round. Empty where it has no such part.
struct PeerTimes {
  std::string name;
  std::vector<double> encode_s, decode_s;
  uint64_t wrong = 0;  ///< 1 where the result is not the codec's
};

/// What the peers choose and cast, by the sum of bits over all values: the magnitudes of the chosen elements, and the rounded ones.
struct PeerSums {
  uint64_t topk = 0, f16 = 0, bf16 = 0;
};

/// The spec whose choice is compared.
CodecSpec peer_topk();
/// The sums that are right, by the scalar reference of the choice and by IEEE rounding.
PeerSums expected_sums(std::span<const float> gradient);

/// std::nth_element over the indices of all elements, by magnitude: the exact choice without gradgate.
class NthElementPeer {
 public:
  explicit NthElementPeer(std::span<const float> gradient) : gradient_(gradient), index_(gradient.size()) {}
  void choose();
  uint64_t sum() const;  ///< of what was chosen last

 private:
  std::span<const float> gradient_;
  std::vector<uint32_t> index_;
};

/// How torch is timed: with so many threads and cold caches, or on the first CUDA device by events.
struct TorchRun {
  std::string python;
  Device device = Device::cpu;
  size_t rounds = 0;
  unsigned threads = 1;
  size_t flush_bytes = 0;  ///< read before every call on the CPU
};
/// torch.topk and torch's casts in a process of their own. Without torch, or without a device for it, no peers, and `note` says why; a torch that fails is a
/// RunError.
std::vector<PeerTimes> torch_peers(const TorchRun& run, std::span<const float> gradient, const PeerSums& expected, std::string* note);

}  // namespace gradgate::cli
