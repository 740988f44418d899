#include "integration/cli/codec_option.h"

#include "gradgate/device.h"
#include "integration/cli/error.h"
#include "integration/cli/options.h"

namespace gradgate::cli {
namespace {

// Every codec of the library, with example parameters where it needs some: "none,bf16,int8,chunk-topk:8/1024".
std::string all_codecs() {
  std::string list;
  for (const CodecInfo& info : codec_infos()) {
    std::string text = info.name;
    CodecSpec spec;
    for (const char* parameters : {"", ":8/1024", ":0.01"}) {
      text = std::string(info.name) + parameters;
      if (parse_codec(text, &spec, nullptr).ok()) break;
    }
    if (!parse_codec(text, &spec, nullptr).ok()) continue;
    list += (list.empty() ? "" : ",") + text;
  }
  return list;
}

}  // namespace

NamedCodec parse_one_codec(const std::string& option, const std::string& text) {
  Candidate candidate;
  Message why;
  if (!parse_candidate(text, &candidate, &why).ok()) throw UsageError(option + ": '" + text + "': " + why.text);
  return {candidate.codec, format_candidate(candidate).text, candidate.exchange, candidate.between};
}

CodecList parse_codecs(const std::string& option, const std::string& text) {
  CodecList list;
  list.option = option;
  list.all = text == "all";
  for (const std::string& part : split_list(option, list.all ? all_codecs() : text)) {
    list.codecs.push_back(parse_one_codec(option, part));
    for (size_t i = 0; i + 1 < list.codecs.size(); ++i) {
      if (list.codecs[i].candidate() == list.codecs.back().candidate()) throw UsageError(option + ": '" + text + "' lists " + list.codecs.back().text + " twice");
    }
  }
  return list;
}

template <class Refuses>
void CodecList::drop(Refuses refuses, const std::string& reason) {
  if (all) {
    std::erase_if(codecs, refuses);
    return;
  }
  for (const NamedCodec& codec : codecs) {
    if (refuses(codec)) throw UsageError(option + ": " + codec.text + " " + reason);
  }
}

void CodecList::restrict_to(DType dtype) {
  drop([dtype](const NamedCodec& codec) { return !codec_takes(codec.spec, dtype); }, std::string("does not take ") + dtype_name(dtype) + " gradients");
}

void CodecList::restrict_to_device(DType dtype, bool exchange) {
  constexpr size_t kAnyCount = 4096;
  const auto refuses = [dtype, exchange](const NamedCodec& codec) {
    if (!exchange) return !device::takes(codec.spec, dtype);
    ExchangeShape shape{codec.candidate(), kAnyCount, dtype, 0, 2};
    shape.ranks_per_node = codec.exchange == Exchange::hierarchical ? 1 : 0;
    shape.device = true;
    return exchange_wire_bytes(shape) == 0;
  };
  drop(refuses, std::string("does not run on a device with ") + dtype_name(dtype) + " gradients");
}

void CodecList::restrict_to_one_link() {
  drop([](const NamedCodec& codec) { return codec.exchange == Exchange::hierarchical; }, "needs two links, and one is judged here; accepted: all_reduce, two_shot, all_gather");
}

DType parse_dtype(const std::string& option, const std::string& text) {
  if (text == "float" || text == "f32") return DType::f32;
  if (text == "bfloat16" || text == "bf16") return DType::bf16;
  if (text == "half" || text == "f16") return DType::f16;
  throw UsageError(option + ": '" + text + "' is not a dtype; expected float (f32), bfloat16 (bf16) or half (f16)");
}

std::string codec_help() {
  std::string text = "Codecs, each also with :ef or :noef (error feedback on or off) where it loses anything, and @all_gather or another exchange:\n";
  for (const CodecInfo& info : codec_infos()) {
    const std::string grammar = info.grammar;
    text += "  " + grammar + std::string(grammar.size() < 36 ? 36 - grammar.size() : 1, ' ') + info.summary + "\n";
  }
  return text;
}

}  // namespace gradgate::cli
