// Candidates as text: a codec, and the exchange that carries it where that is not the usual one.
#include <cstring>

#include "gradgate/exchange.h"

namespace gradgate {
namespace {

constexpr Exchange kExchanges[] = {Exchange::all_reduce, Exchange::two_shot, Exchange::all_gather};

}  // namespace

Status parse_candidate(std::string_view text, Candidate* candidate, Message* why) noexcept {
  if (candidate == nullptr) return StatusCode::invalid_argument;
  const size_t at = text.find('@');
  CodecSpec codec;
  GRADGATE_TRY(parse_codec(text.substr(0, at), &codec, why));
  Candidate parsed = default_candidate(codec);
  if (at != std::string_view::npos) {
    const std::string_view name = text.substr(at + 1);
    bool found = false;
    char accepted[100] = {};
    for (const Exchange exchange : kExchanges) {
      if (!codec_travels_by(codec, exchange)) continue;
      if (accepted[0] != 0) std::strncat(accepted, ", ", sizeof accepted - std::strlen(accepted) - 1);
      std::strncat(accepted, exchange_name(exchange), sizeof accepted - std::strlen(accepted) - 1);
      if (name != exchange_name(exchange)) continue;
      parsed.exchange = exchange;
      found = true;
    }
    if (!found) {
      if (why != nullptr) {
        const int shown = static_cast<int>(name.size() < 40 ? name.size() : 40);
        why->format("%s: exchange '%.*s' is not known or cannot carry it; accepted: %s", codec_info(codec.id).name,
                    shown, name.data(), accepted);
      }
      return StatusCode::invalid_argument;
    }
  }
  *candidate = parsed;
  return {};
}

Message format_candidate(const Candidate& candidate) noexcept {
  Message text = format_codec(candidate.codec);
  if (candidate.exchange == codec_info(candidate.codec.id).exchange) return text;
  std::strncat(text.text, "@", sizeof text.text - std::strlen(text.text) - 1);
  std::strncat(text.text, exchange_name(candidate.exchange), sizeof text.text - std::strlen(text.text) - 1);
  return text;
}

}  // namespace gradgate
