// Texts and sizes of codecs: the public functions that need no data.
#include <cinttypes>
#include <cstring>

#include "codecs/codecs.h"
#include "codecs/header.h"

namespace gradgate {
namespace codecs {
namespace {

struct Entry {
  CodecInfo info;
  bool feedback;
  unsigned travels;
};

constexpr Entry kEntries[] = {
#define GRADGATE_CODEC(identifier, value, name)                                                            \
  {{CodecId::identifier, name, Codec<CodecId::identifier>::kGrammar, Codec<CodecId::identifier>::kSummary, \
    Codec<CodecId::identifier>::kDefaultFeedback, Codec<CodecId::identifier>::kFidelity,                   \
    Codec<CodecId::identifier>::kExchange},                                                                \
   Codec<CodecId::identifier>::kFeedback,                                                                  \
   Codec<CodecId::identifier>::kTravels},
#include "gradgate/codec_list.def"
#undef GRADGATE_CODEC
};
constexpr size_t kCount = std::size(kEntries);

constexpr bool unique_ids() {
  for (size_t i = 0; i < kCount; ++i) {
    for (size_t j = i + 1; j < kCount; ++j) {
      if (kEntries[i].info.id == kEntries[j].info.id) return false;
    }
  }
  return true;
}
static_assert(unique_ids(), "wire ids are never reused");

constexpr bool travel_by_their_own_exchange() {
  for (const Entry& entry : kEntries) {
    if ((entry.travels & by(entry.info.exchange)) == 0) return false;
  }
  return true;
}
static_assert(travel_by_their_own_exchange());

constexpr auto kInfos = [] {
  struct {
    CodecInfo info[kCount];
  } table{};
  for (size_t i = 0; i < kCount; ++i) table.info[i] = kEntries[i].info;
  return table;
}();

const Entry* find(CodecId id) noexcept {
  for (const Entry& entry : kEntries) {
    if (entry.info.id == id) return &entry;
  }
  return nullptr;
}

// At most this much of the user's text is quoted back.
int shown(std::string_view text) noexcept { return static_cast<int>(text.size() < 40 ? text.size() : 40); }

template <class... Args>
void say(Message* why, const char* format, Args... args) noexcept {
  if (why != nullptr) why->format(format, args...);
}

// A decimal number of 1 to 9 digits without sign, blanks or leading zeros.
bool parse_number(std::string_view text, uint32_t* value) noexcept {
  if (text.empty() || text.size() > 9 || (text.size() > 1 && text[0] == '0')) return false;
  uint32_t sum = 0;
  for (const char c : text) {
    if (c < '0' || c > '9') return false;
    sum = sum * 10 + static_cast<uint32_t>(c - '0');
  }
  *value = sum;
  return true;
}

}  // namespace

bool no_parameters(std::string_view parameters, const char* name, Message* why) noexcept {
  if (parameters.empty()) return true;
  say(why, "%s: parameter '%.*s' is not known; %s takes only :ef or :noef", name, shown(parameters), parameters.data(),
      name);
  return false;
}

bool parse_flags(std::string_view parameters, const char* name, std::initializer_list<const char*> flags,
                 uint32_t* bits, Message* why) noexcept {
  while (!parameters.empty()) {
    const std::string_view part = parameters.substr(0, parameters.find(':'));
    uint32_t bit = 0, found = 0;
    for (const char* flag : flags) {
      if (part == flag) found = 1u << bit;
      ++bit;
    }
    if (found == 0 || (*bits & found) != 0) {
      char known[80] = {};
      for (const char* flag : flags) {
        std::strncat(known, ":", sizeof known - std::strlen(known) - 1);
        std::strncat(known, flag, sizeof known - std::strlen(known) - 1);
        std::strncat(known, ", ", sizeof known - std::strlen(known) - 1);
      }
      say(why, "%s: parameter '%.*s' %s; %s takes %s:ef or :noef", name, shown(part), part.data(),
          found == 0 ? "is not known" : "stands there twice", name, known);
      return false;
    }
    *bits |= found;
    if (part.size() + 1 == parameters.size()) {  // "int8:sr:" names nothing after the last ':'
      say(why, "%s: nothing follows the ':'", name);
      return false;
    }
    parameters = part.size() < parameters.size() ? parameters.substr(part.size() + 1) : std::string_view{};
  }
  return true;
}

void format_flags(const char* name, std::initializer_list<const char*> flags, uint32_t bits, Message* text) noexcept {
  text->format("%s", name);
  for (const char* flag : flags) {
    if ((bits & 1u) != 0) {
      std::strncat(text->text, ":", sizeof text->text - std::strlen(text->text) - 1);
      std::strncat(text->text, flag, sizeof text->text - std::strlen(text->text) - 1);
    }
    bits >>= 1;
  }
}

bool Codec<CodecId::chunk_topk>::parse(std::string_view parameters, CodecSpec* spec, Message* why) noexcept {
  const size_t colon = parameters.find(':');
  const std::string_view ratio = parameters.substr(0, colon);
  const size_t slash = ratio.find('/');
  if (slash == std::string_view::npos) {
    say(why, "chunk-topk: '%.*s' is not c/B, as in chunk-topk:8/1024", shown(ratio), ratio.data());
    return false;
  }
  const std::string_view c_text = ratio.substr(0, slash), b_text = ratio.substr(slash + 1);
  uint32_t c = 0, b = 0;
  if (!parse_number(b_text, &b) || b < kMinChunk || b > kMaxChunk || (b & (b - 1)) != 0) {
    say(why, "chunk-topk: B is '%.*s', must be a power of two from %u to %u", shown(b_text), b_text.data(), kMinChunk,
        kMaxChunk);
    return false;
  }
  if (!parse_number(c_text, &c) || c < 1 || c > b) {
    say(why, "chunk-topk: c is '%.*s', must be a whole number from 1 to B = %u", shown(c_text), c_text.data(), b);
    return false;
  }
  DType value = DType::f32;
  if (colon != std::string_view::npos) {
    if (!parse_value_type(parameters.substr(colon + 1), "chunk-topk", &value, why)) return false;
  }
  spec->param0 = c;
  spec->param1 = b;
  spec->value = value;
  return true;
}

void Codec<CodecId::chunk_topk>::format(const CodecSpec& spec, Message* text) noexcept {
  text->format("chunk-topk:%" PRIu32 "/%" PRIu32 "%s", spec.param0, spec.param1, value_type_suffix(spec.value));
}

bool valid_spec(const CodecSpec& spec) noexcept {
  const Entry* entry = find(spec.id);
  if (entry == nullptr || (spec.feedback && !entry->feedback)) return false;
  return visit(spec.id, false, [&](auto codec) { return codec.valid(spec); });
}

WireSpec wire_spec(const CodecSpec& spec, DType gradient) noexcept {
  return visit(spec.id, WireSpec{DType::f32, 0, 0}, [&](auto codec) { return codec.wire(spec, gradient); });
}

}  // namespace codecs

using namespace codecs;

Status parse_codec(std::string_view text, CodecSpec* spec, Message* why) noexcept {
  if (spec == nullptr) return StatusCode::invalid_argument;
  const std::string_view name = text.substr(0, text.find(':'));
  const Entry* found = nullptr;
  for (const Entry& entry : kEntries) {
    if (name == entry.info.name) found = &entry;
  }
  if (found == nullptr) {
    if (why != nullptr) {
      char known[200] = {};
      for (const Entry& entry : kEntries) {
        if (known[0] != 0) std::strncat(known, ", ", sizeof known - std::strlen(known) - 1);
        std::strncat(known, entry.info.name, sizeof known - std::strlen(known) - 1);
      }
      why->format("codec '%.*s' is not known; there are %s", shown(name), name.data(), known);
    }
    return StatusCode::invalid_argument;
  }
  std::string_view parameters;
  bool feedback = found->info.default_feedback;
  if (name.size() < text.size()) {
    parameters = text.substr(name.size() + 1);
    const size_t colon = parameters.rfind(':');
    const std::string_view last = colon == std::string_view::npos ? parameters : parameters.substr(colon + 1);
    const bool on = last == "ef", off = last == "noef";
    if (on && !found->feedback) {
      say(why, "%s: loses nothing and takes no :ef", found->info.name);
      return StatusCode::invalid_argument;
    }
    if (on || off) {
      feedback = on;
      parameters = colon == std::string_view::npos ? std::string_view{} : parameters.substr(0, colon);
      if (colon == 0) {  // "int8::ef"
        say(why, "%s: an empty parameter stands before ':%.*s'", found->info.name, shown(last), last.data());
        return StatusCode::invalid_argument;
      }
    } else if (parameters.empty()) {
      say(why, "%s: nothing follows the ':'", found->info.name);
      return StatusCode::invalid_argument;
    }
  }
  CodecSpec parsed;
  parsed.id = found->info.id;
  parsed.feedback = feedback;
  const bool ok = visit(parsed.id, false, [&](auto codec) { return codec.parse(parameters, &parsed, why); });
  if (!ok) return StatusCode::invalid_argument;
  *spec = parsed;
  return {};
}

Message format_codec(const CodecSpec& spec) noexcept {
  Message text;
  const Entry* entry = find(spec.id);
  if (entry == nullptr) {
    text.format("?");
    return text;
  }
  visit(spec.id, 0, [&](auto codec) {
    codec.format(spec, &text);
    return 0;
  });
  if (spec.feedback != entry->info.default_feedback) {
    std::strncat(text.text, spec.feedback ? ":ef" : ":noef", sizeof text.text - std::strlen(text.text) - 1);
  }
  return text;
}

std::span<const CodecInfo> codec_infos() noexcept { return kInfos.info; }

const CodecInfo& codec_info(CodecId id) noexcept {
  static constexpr CodecInfo kUnknown{CodecId::none, "?", "?", "not a codec", false, 0, Exchange::all_reduce};
  for (const CodecInfo& info : kInfos.info) {
    if (info.id == id) return info;
  }
  return kUnknown;
}

int codec_fidelity(const CodecSpec& spec) noexcept {
  const int plain = codec_info(spec.id).fidelity;
  return visit(spec.id, plain, [&](auto codec) {
    if constexpr (requires { codec.fidelity(spec); }) {
      return codec.fidelity(spec);
    } else {
      return plain;
    }
  });
}

bool codec_takes(const CodecSpec& spec, DType gradient) noexcept {
  return valid_spec(spec) && visit(spec.id, false, [&](auto codec) { return codec.takes(gradient); });
}

bool codec_travels_by(const CodecSpec& spec, Exchange exchange) noexcept {
  const Entry* entry = find(spec.id);
  return entry != nullptr && (entry->travels & by(exchange)) != 0;
}

size_t payload_bytes(const CodecSpec& spec, DType gradient, size_t count) noexcept {
  Sections<std::byte> sections;
  return bind_payload<std::byte>(spec, gradient, count, nullptr, &sections);
}

size_t shard_alignment(const CodecSpec& spec) noexcept {
  if (!valid_spec(spec)) return kGroup;
  return visit(spec.id, kGroup, [&](auto codec) { return codec.unit(spec); });
}

}  // namespace gradgate
