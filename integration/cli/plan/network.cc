#include "integration/cli/plan/network.h"

#include <chrono>
#include <functional>

#include "integration/cli/buffer.h"
#include "integration/cli/error.h"
#include "integration/cli/json_fields.h"
#include "integration/cli/quantity.h"
#include "integration/cli/report.h"
#include "integration/cli/statistics.h"
#include "integration/cli/test_data.h"

namespace gradgate::cli {
namespace {

constexpr size_t kMeasuredElements = size_t{4} << 20;
constexpr int kMeasuredRounds = 5;

gate::Link piece(const ProfileCollective& collective, double bytes) {
  for (const ProfilePiece& p : collective.pieces) {
    if (bytes <= p.up_to_bytes) return {p.alpha_s, p.beta_bytes_per_s};
  }
  return {collective.alpha_s, collective.beta_bytes_per_s};
}

gate::Link plain(const NamedLink& link) { return {link.link.alpha_s, link.link.beta_bytes_per_s}; }

// Ring lines over `ranks`, each collective with its own α and β.
struct Lines {
  gate::LinearCost all_reduce, all_gather, all_to_all;

  Lines(gate::Link reduce, gate::Link gather, gate::Link shuffle, uint32_t ranks)
      : all_reduce(gate::ring_line(reduce, ranks)),
        all_gather(gate::ring_line(gather, ranks)),
        all_to_all(gate::ring_line(shuffle, ranks)) {
    all_reduce = {2 * all_reduce.fixed_s, 2 * all_reduce.per_byte_s};
  }
};

double seconds_of(const std::function<Status()>& call, const std::string& what) {
  const auto start = std::chrono::steady_clock::now();
  const Status status = call();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (!status.ok()) throw RunError(what + ": " + status.message());
  return seconds;
}

// One thread, feedback as written, a gradient that no cache holds.
PlanCodecs measure(const CodecList& codecs, DType dtype) {
  const size_t count = kMeasuredElements, bytes = count * dtype_bytes(dtype);
  Buffer gradient(bytes), out(bytes), residual(count * sizeof(float));
  const GradientLike data;
  data.fill(1, 0, {gradient.data(), count, dtype});
  out.touch();
  residual.touch();
  PlanCodecs result;
  result.source = "measured now: " + machine_text() + ", one thread, " + format_size(bytes);
  for (const NamedCodec& codec : codecs.codecs) {
    const CodecSpec& spec = codec.spec;
    Buffer payload(payload_bytes(spec, dtype, count)), workspace(workspace_bytes(spec, dtype, count));
    EncodeArgs encode_args;
    encode_args.gradient = {gradient.data(), count, dtype};
    encode_args.residual = spec.feedback ? residual.as<float>() : nullptr;
    encode_args.payload = payload.bytes();
    encode_args.workspace = workspace.bytes();
    DecodeArgs decode_args;
    decode_args.payload = payload.bytes();
    decode_args.gradient = dtype;
    decode_args.out = {out.data(), count, dtype};
    // Payloads that every rank receives from every other are added up.
    if (codec_info(spec.id).exchange == Exchange::all_gather) decode_args.into = Into::add;
    std::vector<double> encode_s, decode_s;
    for (int round = 0; round <= kMeasuredRounds; ++round) {
      const double e = seconds_of([&] { return encode(spec, encode_args); }, codec.text + ": encode");
      const double d = seconds_of([&] { return decode(spec, decode_args); }, codec.text + ": decode");
      if (round > 0) encode_s.push_back(e), decode_s.push_back(d);
    }
    const double size = static_cast<double>(bytes);
    result.list.push_back({codec, size / median(encode_s), size / median(decode_s), 0});
  }
  return result;
}

// The file that `gradgate bench --json` or -J wrote.
PlanCodecs from_bench(const CodecList& codecs, DType dtype, const SpeedOptions& options) {
  const std::string& path = options.bench_file;
  const Json json = parse_config(path, read_text(options.bench_option, path));
  const auto refuse = [&](const std::string& why) { throw UsageError(path + ": " + why); };
  if (json.value("schema", Json()) != "gradgate.bench/1")
    refuse("schema: expected \"gradgate.bench/1\", what gradgate bench --json writes");
  if (json.value("dtype", Json()) != dtype_name(dtype))
    refuse(std::string("dtype: expected \"") + dtype_name(dtype) + "\" (--dtype)");
  const auto positive = [&](const Json& from, const std::string& key) {
    const auto found = from.find(key);
    if (found == from.end() || !found->is_number() || !(found->get<double>() > 0))
      refuse(key + ": expected a number above 0");
    return found->get<double>();
  };
  const double bytes = positive(json, "bytes");
  const auto results = json.find("results");
  if (results == json.end() || !results->is_array()) refuse("results: expected a list");
  PlanCodecs out;
  out.source = path + " (gradgate bench)";
  for (const NamedCodec& codec : codecs.codecs) {
    const Json* found = nullptr;
    for (const Json& one : *results) {
      if (one.is_object() && one.value("codec", Json()) == codec.text) found = &one;
    }
    if (found == nullptr)
      throw UsageError(path + ": has no times of " + codec.text + "; run gradgate bench " + codec.text);
    const double encode_s = positive(*found, codec.spec.feedback ? "encode_feedback_s" : "encode_s");
    out.list.push_back({codec, bytes / encode_s, bytes / positive(*found, "decode_s"), 0});
  }
  return out;
}

// The times at the largest size of each codec; false where the profile lacks one.
bool from_profile(const CodecList& codecs, DType dtype, const Profile& profile, PlanCodecs* out) {
  out->source = "the profile (" + profile.key.device + ")";
  out->list.clear();
  for (const NamedCodec& codec : codecs.codecs) {
    const ProfileCodec* best = nullptr;
    for (const ProfileCodec& entry : profile.codecs) {
      const bool fits =
          entry.codec == codec.text && entry.dtype == dtype_name(dtype) && entry.encode_s > 0 && entry.decode_s > 0;
      if (fits && (best == nullptr || entry.bytes > best->bytes)) best = &entry;
    }
    if (best == nullptr) return false;
    out->list.push_back({codec, best->bytes / best->encode_s, best->bytes / best->decode_s, 0});
  }
  return true;
}

}  // namespace

gate::LinkModel PlanNetwork::model(uint32_t ranks, double vector_bytes) const {
  const gate::Link one = plain(between);
  const gate::Link reduce = profile ? piece(profile->all_reduce, vector_bytes) : one;
  const gate::Link gather = profile ? piece(profile->all_gather, vector_bytes) : one;
  const gate::Link shuffle = profile ? piece(profile->all_to_all, vector_bytes) : one;
  if (ranks_per_node > 1 && ranks <= ranks_per_node) return gate::link_model(plain(inside), ranks);
  const Lines flat(reduce, gather, shuffle, ranks);
  gate::LinkModel model{flat.all_reduce, flat.all_gather, flat.all_to_all, ranks};
  if (two_levels(ranks)) {
    const Lines nodes(reduce, gather, shuffle, ranks / ranks_per_node);
    model.node = {gate::ring_line(plain(inside), ranks_per_node), nodes.all_reduce, nodes.all_gather, nodes.all_to_all,
                  ranks_per_node};
  }
  return model;
}

std::string PlanNetwork::describe() const {
  std::string text;
  if (profile) {
    const ProfileKey& key = profile->key;
    text = between.text + ": calibrated on " + std::to_string(key.world_size) + " ranks, " + key.backend + ", " +
           key.device + ", " + key.topology + "; all_reduce " + format_link_rate(profile->all_reduce.beta_bytes_per_s) +
           ", " + format_time(profile->all_reduce.alpha_s) + " per message";
    text += "\nother numbers of ranks are extrapolated by the ring formulas";
  } else {
    text = describe_rates(between);
  }
  if (ranks_per_node > 1)
    text += "\n" + std::to_string(ranks_per_node) + " ranks a node, inside it " + describe_rates(inside);
  return text;
}

Json PlanNetwork::json() const {
  const auto link = [](const NamedLink& l) {
    return Json{{"text", l.text}, {"alpha_s", l.link.alpha_s}, {"beta_bytes_per_s", l.link.beta_bytes_per_s}};
  };
  Json json = {{"ranks_per_node", ranks_per_node}, {"inside", ranks_per_node > 1 ? link(inside) : Json(nullptr)}};
  if (profile) {
    json["profile"] = {{"file", between.text}, {"key", profile_json(*profile)["key"]}};
  } else {
    json["between"] = link(between);
  }
  return json;
}

PlanCodecs codec_speeds(const CodecList& codecs, DType dtype, const SpeedOptions& options,
                        const std::optional<Profile>& profile) {
  PlanCodecs result;
  if (options.encode_Bps) {
    result.source = "given (--encode-rate)";
    for (const NamedCodec& codec : codecs.codecs)
      result.list.push_back({codec, *options.encode_Bps, options.decode_Bps.value_or(*options.encode_Bps), 0});
  } else if (!options.bench_file.empty()) {
    result = from_bench(codecs, dtype, options);
  } else if (!profile || !from_profile(codecs, dtype, *profile, &result)) {
    result = measure(codecs, dtype);
  }
  for (PlanCodec& codec : result.list) codec.fixed_s = options.fixed_s.value_or(0);
  return result;
}

}  // namespace gradgate::cli
