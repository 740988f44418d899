// Texts of topk and randk, whose parameter is a ratio.
#include <cfenv>
#include <charconv>
#include <cmath>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "codecs/codecs.h"

namespace gradgate::codecs {
namespace {

double ratio_of(const CodecSpec& spec) noexcept {
  return std::bit_cast<double>(static_cast<uint64_t>(spec.param1) << 32 | spec.param0);
}

// Trainers set the rounding of their threads; a ratio means the same under any.
class RoundToNearest {
 public:
#if defined(__SSE2__)
  RoundToNearest() noexcept : found_(_mm_getcsr()) { _mm_setcsr(0x1f80); }  // fegetround() would look at the x87
  ~RoundToNearest() { _mm_setcsr(found_); }

 private:
  uint32_t found_;
#else
  RoundToNearest() noexcept : found_(std::fegetround()) { std::fesetround(FE_TONEAREST); }
  ~RoundToNearest() { std::fesetround(found_); }

 private:
  int found_;
#endif
  RoundToNearest(const RoundToNearest&) = delete;
  RoundToNearest& operator=(const RoundToNearest&) = delete;
};

int shown(std::string_view text) noexcept { return static_cast<int>(text.size() < 40 ? text.size() : 40); }

}  // namespace

size_t entries_of_ratio(const CodecSpec& spec, size_t count) noexcept {
  const RoundToNearest nearest;
  // volatile: not computed before the rounding is set.
  volatile size_t n = count;
  volatile double ratio = ratio_of(spec);
  volatile double product = ratio * static_cast<double>(n);
  const double k = std::round(product);
  if (count == 0 || k < 1) return count == 0 ? 0 : 1;
  return k < static_cast<double>(count) ? static_cast<size_t>(k) : count;
}

bool parse_ratio(std::string_view text, const char* name, CodecSpec* spec, Message* why) noexcept {
  const RoundToNearest nearest;
  double ratio = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), ratio);
  if (text.empty() || error != std::errc() || end != text.data() + text.size() || !(ratio > 0 && ratio <= 1)) {
    if (why != nullptr)
      why->format("%s: ratio is '%.*s', must be a number above 0 and up to 1, as in %s:0.01", name, shown(text),
                  text.data(), name);
    return false;
  }
  const auto bits = std::bit_cast<uint64_t>(ratio);
  spec->param0 = static_cast<uint32_t>(bits);
  spec->param1 = static_cast<uint32_t>(bits >> 32);
  return true;
}

Message ratio_text(const CodecSpec& spec) noexcept {
  Message text;
  std::to_chars(text.text, text.text + sizeof text.text - 1, ratio_of(spec));
  return text;
}

bool parse_value_type(std::string_view text, const char* name, DType* value, Message* why) noexcept {
  if (text == "f32" || text == "bf16" || text == "int8") {
    *value = text == "f32" ? DType::f32 : text == "bf16" ? DType::bf16 : DType::u8;
    return true;
  }
  if (why != nullptr)
    why->format("%s: value type is '%.*s', must be f32, bf16 or int8", name, shown(text), text.data());
  return false;
}

const char* value_type_suffix(DType value) noexcept {
  return value == DType::bf16 ? ":bf16" : value == DType::u8 ? ":int8" : "";
}

bool Codec<CodecId::topk>::parse(std::string_view parameters, CodecSpec* spec, Message* why) noexcept {
  const size_t colon = parameters.find(':');
  if (!parse_ratio(parameters.substr(0, colon), "topk", spec, why)) return false;
  return colon == std::string_view::npos || parse_value_type(parameters.substr(colon + 1), "topk", &spec->value, why);
}

void Codec<CodecId::topk>::format(const CodecSpec& spec, Message* text) noexcept {
  text->format("topk:%s%s", ratio_text(spec).text, value_type_suffix(spec.value));
}

bool Codec<CodecId::randk>::parse(std::string_view parameters, CodecSpec* spec, Message* why) noexcept {
  const size_t colon = parameters.find(':');
  if (!parse_ratio(parameters.substr(0, colon), "randk", spec, why)) return false;
  if (colon == std::string_view::npos) return true;
  const std::string_view type = parameters.substr(colon + 1);
  if (type != "bf16" && type != "f32") {  // int8 codes do not add
    if (why != nullptr) why->format("randk: value type is '%.*s', must be f32 or bf16", shown(type), type.data());
    return false;
  }
  spec->value = type == "bf16" ? DType::bf16 : DType::f32;
  return true;
}

void Codec<CodecId::randk>::format(const CodecSpec& spec, Message* text) noexcept {
  text->format("randk:%s%s", ratio_text(spec).text, value_type_suffix(spec.value));
}

}  // namespace gradgate::codecs
