#include "integration/cli/profile.h"

#include <cmath>

#include "integration/cli/json_fields.h"

namespace gradgate::cli {
namespace {

constexpr double kLargest = std::numeric_limits<double>::max();
constexpr double kSlowest = 1, kFastest = 1e15;  // bytes per second
constexpr double kLongest = 1e6;                 // seconds
constexpr uint64_t kMostRanks = 1u << 20;

ProfileKey parse_key(JsonFields fields) {
  ProfileKey key;
  key.device = fields.text("device");
  key.backend = fields.text("backend");
  key.world_size = fields.count("world_size", 2, kMostRanks);
  key.ranks_per_node = fields.count("ranks_per_node", 1, key.world_size);
  key.version = fields.text("version");
  key.topology = fields.text("topology");
  fields.done();
  return key;
}

std::vector<ProfilePiece> parse_pieces(JsonFields& fields) {
  std::vector<ProfilePiece> pieces;
  std::vector<JsonFields> list = fields.list("pieces");
  double previous = 0;
  for (size_t i = 0; i < list.size(); ++i) {
    ProfilePiece piece;
    const bool last = i + 1 == list.size();
    if (list[i].null("up_to_bytes") != last) {
      list[i].refuse("up_to_bytes", "must be null in the last piece and a number in the others");
    }
    if (!last) {
      piece.up_to_bytes = list[i].number("up_to_bytes", 0, kLargest);
      if (piece.up_to_bytes <= previous) list[i].refuse("up_to_bytes", "is not greater than in the piece before");
      previous = piece.up_to_bytes;
    }
    piece.alpha_s = list[i].number("alpha_s", 0, kLongest);
    piece.beta_bytes_per_s = list[i].number("beta_bytes_per_s", kSlowest, kFastest);
    list[i].done();
    pieces.push_back(piece);
  }
  return pieces;
}

ProfileCollective parse_collective(JsonFields fields) {
  ProfileCollective collective;
  collective.alpha_s = fields.number("alpha_s", 0, kLongest);
  collective.beta_bytes_per_s = fields.number("beta_bytes_per_s", kSlowest, kFastest);
  collective.confidence = fields.number("confidence", 0, 1);
  collective.pieces = parse_pieces(fields);
  for (JsonFields& entry : fields.list("errors")) {
    collective.errors.push_back({entry.number("bytes", 0, kLargest), entry.number("relative", -1, kLargest)});
    entry.done();
  }
  fields.done();
  return collective;
}

ProfileCodec parse_codec_times(JsonFields fields) {
  ProfileCodec codec;
  codec.codec = fields.text("codec");
  codec.dtype = fields.text("dtype");
  codec.bytes = fields.number("bytes", 1, kLargest);
  codec.encode_s = fields.number("encode_s", 0, kLongest);
  codec.decode_s = fields.number("decode_s", 0, kLongest);
  fields.done();
  return codec;
}

Json collective_json(const ProfileCollective& collective) {
  Json pieces = Json::array(), errors = Json::array();
  for (const ProfilePiece& piece : collective.pieces) {
    pieces.push_back({{"up_to_bytes", std::isfinite(piece.up_to_bytes) ? Json(piece.up_to_bytes) : Json(nullptr)},
                      {"alpha_s", piece.alpha_s},
                      {"beta_bytes_per_s", piece.beta_bytes_per_s}});
  }
  for (const ProfileError& error : collective.errors) {
    errors.push_back({{"bytes", error.bytes}, {"relative", error.relative}});
  }
  return {{"alpha_s", collective.alpha_s},
          {"beta_bytes_per_s", collective.beta_bytes_per_s},
          {"confidence", collective.confidence},
          {"pieces", pieces},
          {"errors", errors}};
}

}  // namespace

bool looks_like_profile(std::string_view text) noexcept {
  const Json json = Json::parse(text, nullptr, false);
  return json.is_object() && json.contains("format") && json["format"] == kProfileFormat;
}

Profile parse_profile(const std::string& path, const std::string& text) {
  const Json json = parse_config(path, text);
  JsonFields fields(path, "", json);
  if (fields.text("format") != kProfileFormat) {
    fields.refuse("format", json["format"].dump() + " is not \"" + kProfileFormat + "\"");
  }
  (void)fields.count("version", kProfileVersion, kProfileVersion);
  Profile profile;
  profile.key = parse_key(fields.object("key"));
  JsonFields collectives = fields.object("collectives");
  profile.all_reduce = parse_collective(collectives.object("all_reduce"));
  profile.all_gather = parse_collective(collectives.object("all_gather"));
  profile.all_to_all = parse_collective(collectives.object("all_to_all"));
  collectives.done();
  for (JsonFields& entry : fields.list("codecs")) profile.codecs.push_back(parse_codec_times(entry));
  fields.done();
  return profile;
}

Profile read_profile(std::string_view option, const std::string& path) {
  return parse_profile(path, read_text(option, path));
}

Json profile_json(const Profile& profile) {
  Json codecs = Json::array();
  for (const ProfileCodec& codec : profile.codecs) {
    codecs.push_back({{"codec", codec.codec},
                      {"dtype", codec.dtype},
                      {"bytes", codec.bytes},
                      {"encode_s", codec.encode_s},
                      {"decode_s", codec.decode_s}});
  }
  return {{"format", kProfileFormat},
          {"version", kProfileVersion},
          {"key",
           {{"device", profile.key.device},
            {"backend", profile.key.backend},
            {"world_size", profile.key.world_size},
            {"ranks_per_node", profile.key.ranks_per_node},
            {"version", profile.key.version},
            {"topology", profile.key.topology}}},
          {"collectives",
           {{"all_reduce", collective_json(profile.all_reduce)},
            {"all_gather", collective_json(profile.all_gather)},
            {"all_to_all", collective_json(profile.all_to_all)}}},
          {"codecs", codecs}};
}

}  // namespace gradgate::cli
