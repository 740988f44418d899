// Candidates as text: a codec, and the exchange that carries it where that is not the usual one.
#include <cstring>

#include "gradgate/exchange.h"

namespace gradgate {
namespace {

constexpr Exchange kExchanges[] = {Exchange::all_reduce, Exchange::two_shot, Exchange::all_gather,
                                   Exchange::hierarchical};

void append(Message* text, const char* more) noexcept {
  std::strncat(text->text, more, sizeof text->text - std::strlen(text->text) - 1);
}

}  // namespace

Status parse_candidate(std::string_view text, Candidate* candidate, Message* why) noexcept {
  if (candidate == nullptr) return StatusCode::invalid_argument;
  const size_t at = text.find('@');
  CodecSpec codec;
  GRADGATE_TRY(parse_codec(text.substr(0, at), &codec, why));
  Candidate parsed = default_candidate(codec);
  if (at != std::string_view::npos) {
    std::string_view name = text.substr(at + 1);
    // "hierarchical/all_gather" says what runs between nodes.
    const bool two = name.substr(0, name.find('/')) == exchange_name(Exchange::hierarchical);
    if (two) {
      parsed.between = parsed.exchange;
      parsed.exchange = Exchange::hierarchical;
      if (name.find('/') == std::string_view::npos) {
        *candidate = parsed;
        return {};
      }
      name = name.substr(name.find('/') + 1);
    }
    bool found = false;
    char accepted[100] = {};
    for (const Exchange exchange : kExchanges) {
      if (!codec_travels_by(codec, exchange) || (two && exchange == Exchange::hierarchical)) continue;
      if (accepted[0] != 0) std::strncat(accepted, ", ", sizeof accepted - std::strlen(accepted) - 1);
      std::strncat(accepted, exchange_name(exchange), sizeof accepted - std::strlen(accepted) - 1);
      if (name != exchange_name(exchange)) continue;
      (two ? parsed.between : parsed.exchange) = exchange;
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
  append(&text, "@");
  append(&text, exchange_name(candidate.exchange));
  if (candidate.exchange == Exchange::hierarchical && candidate.between != codec_info(candidate.codec.id).exchange) {
    append(&text, "/");
    append(&text, exchange_name(candidate.between));
  }
  return text;
}

}  // namespace gradgate
