// The calibration profile: what `gradgate calibrate` measured on one machine and set of ranks, as a JSON file, and its
// strict reader. docs/program.md gives the format. A profile is a struct here and nothing else: what is done with its
// numbers, and whether its key fits, is the caller's business.
#pragma once

#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "integration/cli/options.h"

namespace gradgate::cli {

inline constexpr const char* kProfileFormat = "gradgate-profile";
inline constexpr uint64_t kProfileVersion = 1;

/// What a profile is valid for; a profile whose key differs from where it is used is stale.
struct ProfileKey {
  std::string device;           ///< what encodes, e.g. the CPU's model name
  std::string backend;          ///< "thread", "mpi", "nccl", …
  uint64_t world_size = 0;      ///< ranks, 2 … 2^20
  uint64_t ranks_per_node = 0;  ///< 1 … world_size
  std::string version;          ///< of gradgate
  std::string topology;         ///< how the ranks are placed, in the calibrator's words

  friend bool operator==(const ProfileKey&, const ProfileKey&) = default;
};

/// A stretch of sizes with parameters of its own, where the library switches protocol.
struct ProfilePiece {
  double up_to_bytes = std::numeric_limits<double>::infinity();  ///< of the whole vector; the last piece has no end
  double alpha_s = 0, beta_bytes_per_s = 0;
};

/// How far the fitted line is from the sample at one size: line / sample − 1.
struct ProfileError {
  double bytes = 0;
  double relative = 0;
};

/// One collective. α and β are those of its ring formula at the key's world_size (docs/cost-models.md): with N ranks
/// and a whole vector of M bytes, T = s·((N−1)·α + (N−1)/N·M/β), s = 2 for all_reduce, 1 for all_gather and all_to_all.
struct ProfileCollective {
  double alpha_s = 0;                ///< seconds, ≥ 0
  double beta_bytes_per_s = 0;       ///< one way, > 0
  double confidence = 0;             ///< 0 … 1: share of the samples' variation that the fit explains
  std::vector<ProfilePiece> pieces;  ///< ascending; empty: one line for all sizes
  std::vector<ProfileError> errors;  ///< ascending sizes; may be empty
};

/// One encode and one decode of a gradient of `bytes`, feedback as the codec's text says.
struct ProfileCodec {
  std::string codec;  ///< canonical text, e.g. "int8"
  std::string dtype;  ///< of the gradient: "f32", "bf16"
  double bytes = 0;
  double encode_s = 0, decode_s = 0;
};

struct Profile {
  ProfileKey key;
  ProfileCollective all_reduce, all_gather, all_to_all;
  std::vector<ProfileCodec> codecs;  ///< may be empty
};

/// True when the text is a JSON object whose "format" is that of a profile; says nothing about the rest.
bool looks_like_profile(std::string_view text) noexcept;
/// Throws UsageError naming `path`, the key, and what would be accepted. Unknown keys are refused.
Profile parse_profile(const std::string& path, const std::string& text);
/// Reads and parses; throws UsageError naming `option` where the file cannot be read.
Profile read_profile(std::string_view option, const std::string& path);
/// The file's content. parse_profile() of its dump gives back the same profile.
Json profile_json(const Profile& profile);

}  // namespace gradgate::cli
