// gradgate roundtrip: what a codec does to one gradient in a file.
#include <cmath>
#include <cstring>
#include <optional>

#include "codecs/reference.h"
#include "integration/cli/buffer.h"
#include "integration/cli/codec_option.h"
#include "integration/cli/context.h"
#include "integration/cli/error.h"
#include "integration/cli/error_metrics.h"
#include "integration/cli/npy.h"
#include "integration/cli/quantity.h"
#include "integration/cli/report.h"
#include "integration/cli/table.h"

namespace gradgate::cli {
namespace {

struct Arguments {
  std::string input, output_path;
  CodecList codecs;
  OutputOptions output;
};

struct RoundTrip {
  std::vector<float> decoded;
  size_t payload = 0;
  ErrorMetrics error;
  bool right = true;
  std::string wrong;  ///< what was found wrong
};

// Encodes and decodes without a residual (a file is one step), and compares payload and values with the scalar reference.
RoundTrip round_trip(const NamedCodec& codec, const ArrayFile& array) {
  const size_t count = array.values.size();
  RoundTrip result;
  result.payload = payload_bytes(codec.spec, DType::f32, count);
  result.decoded.resize(count);
  const Buffer payload(result.payload), workspace(workspace_bytes(codec.spec, DType::f32, count));
  const ConstVec gradient(array.values.data(), count, DType::f32);
  Status status = encode(codec.spec, {.gradient = gradient, .payload = payload.bytes(), .workspace = workspace.bytes(), .seed = {}, .executor = {}});
  if (!status.ok()) throw RunError(codec.text + ": encode: " + status.message());
  status = decode(codec.spec, {.payload = payload.bytes(), .gradient = DType::f32, .out = {result.decoded.data(), count, DType::f32}, .executor = {}});
  if (!status.ok()) throw RunError(codec.text + ": decode: " + status.message());
  result.error = compare(array.values, result.decoded);

  const std::vector<std::byte> expected = reference::encode(codec.spec, gradient, nullptr, false, Seed{}, nullptr);
  std::vector<float> decoded(count);
  reference::decode(codec.spec, DType::f32, expected.data(), {decoded.data(), count, DType::f32}, 1.0f, Into::store);
  if (expected.size() != payload.size() || std::memcmp(expected.data(), payload.data(), expected.size()) != 0) {
    result.wrong = "the payload differs from the scalar reference's";
  } else if (count > 0 && std::memcmp(decoded.data(), result.decoded.data(), count * sizeof(float)) != 0) {
    result.wrong = "the decoded values differ from the scalar reference's";
  }
  result.right = result.wrong.empty();
  return result;
}

std::string shape_text(const ArrayFile& array) {
  std::string text = "(";
  for (size_t i = 0; i < array.shape.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(array.shape[i]);
  return text + (array.shape.size() == 1 ? ",)" : ")");
}

int run(const Arguments& arguments, const Context& context, const OptionSet& options) {
  check_array_suffix("input", arguments.input);
  if (!arguments.output_path.empty() && arguments.codecs.codecs.size() != 1) {
    throw UsageError("-o/--output: needs one codec, --codec lists " + std::to_string(arguments.codecs.codecs.size()));
  }
  const ArrayFile array = read_array(arguments.input);
  const uint64_t bytes = array.values.size() * sizeof(float);
  const Table table({{"codec", "", 22, true},
                     {"payload", "B", 12},
                     {"ratio", "", 8},
                     {"max error", "", 11},
                     {"relative", "L2", 11},
                     {"cosine", "1-cos", 11},
                     {"#wrong", "", 7}});
  arguments.output.print(comment("gradgate roundtrip: " + arguments.input + ", f32" + (array.narrowed ? " (rounded from f64)" : "") + ", shape " + shape_text(array) + ", " +
                                 std::to_string(array.values.size()) + " elements, " + format_size(bytes) +
                                 "\nencoded and decoded once, without error feedback; ratio = f32 bytes / payload bytes; errors against the input") +
                         table.header());
  Json results = Json::array();
  uint64_t wrong = 0;
  for (const NamedCodec& codec : arguments.codecs.codecs) {
    const RoundTrip trip = round_trip(codec, array);
    const double ratio = static_cast<double>(bytes) / static_cast<double>(trip.payload);
    wrong += !trip.right;
    arguments.output.print(table.row({codec.text, std::to_string(trip.payload), format_number(ratio, 4), format_number(trip.error.max_error, 3),
                                      format_number(trip.error.relative_l2, 3), format_number(trip.error.cosine_error, 3), trip.right ? "0" : "1"}) +
                           (trip.right ? "" : comment(codec.text + ": " + trip.wrong)));
    if (trip.error.non_finite > 0) {
      arguments.output.print(comment(codec.text + ": " + std::to_string(trip.error.non_finite) + " inputs are Inf or NaN, " + std::to_string(trip.error.poisoned) +
                                     " finite inputs decode to NaN with them; both are left out of the errors"));
    }
    results.push_back({{"codec", codec.text},
                       {"elements", array.values.size()},
                       {"bytes", bytes},
                       {"payload_bytes", trip.payload},
                       {"ratio", number(ratio)},
                       {"max_error", number(trip.error.max_error)},
                       {"relative_l2", number(trip.error.relative_l2)},
                       {"cosine_error", number(trip.error.cosine_error)},
                       {"norm", number(trip.error.norm)},
                       {"non_finite", trip.error.non_finite},
                       {"poisoned", trip.error.poisoned},
                       {"correct", trip.right}});
    if (!arguments.output_path.empty() && trip.right) write_array(arguments.output_path, array.shape, trip.decoded);
  }
  arguments.output.print(comment("Out of bounds values : " + std::to_string(wrong) + (wrong == 0 ? " OK" : " FAILED")));
  Json json = report_header("roundtrip", context, options);
  json["input"] = {{"path", arguments.input}, {"shape", array.shape}, {"narrowed_from_f64", array.narrowed}};
  json["results"] = results;
  arguments.output.finish(json);
  return wrong == 0 ? kExitOk : kExitFailed;
}

}  // namespace

void add_roundtrip(CLI::App& program, Context& context) {
  Command& command = context.add(program, "roundtrip", "encode and decode a gradient from a file: ratio and error",
                                 codec_help() +
                                     "\nFiles: .npy ('<f4' or '<f8', C order) or raw little-endian f32 (.f32, .raw, .bin).\n\n"
                                     "Examples:\n"
                                     "  gradgate roundtrip gradients.npy\n"
                                     "  gradgate roundtrip gradients.npy --codec chunk-topk:8/1024 -o decoded.npy");
  auto arguments = std::make_shared<Arguments>();
  OptionSet& options = *command.options;
  command.app->add_option("input", arguments->input, "the gradient")->required()->type_name("FILE");
  options.add("-c,--codec", "all", "LIST", "codecs, separated by commas, or all", [arguments](const std::string& option, const std::string& text) {
    arguments->codecs = parse_codecs(option, text);
    arguments->codecs.restrict_to(DType::f32);
    for (const NamedCodec& codec : arguments->codecs.codecs) {
      if (codec.text.find('@') != std::string::npos) throw UsageError(option + ": '" + codec.text + "': no exchange takes part in a round trip of a file");
    }
  });
  options.add("-o,--output", "", "FILE", "write the decoded gradient (one codec), .npy or raw f32 by its suffix", [arguments](const std::string& option, const std::string& text) {
    check_array_suffix(option, text);
    arguments->output_path = text;
  });
  arguments->output.add_to(options);
  command.run = [arguments, &context, &options] { return run(*arguments, context, options); };
}

}  // namespace gradgate::cli
