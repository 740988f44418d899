// Codecs and dtypes as the user writes them, and the lists that help texts print.
#pragma once

#include <string>
#include <vector>

#include "gradgate/exchange.h"

namespace gradgate::cli {

struct NamedCodec {
  CodecSpec spec;
  std::string text;  ///< canonical
  Exchange exchange = Exchange::two_shot;
  Exchange between = Exchange::all_reduce;

  Candidate candidate() const { return {spec, exchange, between}; }
};

/// The value of an option that takes codecs.
struct CodecList {
  std::string option;  ///< who gave it, for errors
  bool all = false;    ///< "all": every codec that takes the dtype
  std::vector<NamedCodec> codecs;

  /// Drops what does not take gradients of `dtype` from "all"; for a codec that was named throws UsageError.
  void restrict_to(DType dtype);
  /// The same for what has no kernels; with `exchange` also for what does not travel between devices.
  void restrict_to_device(DType dtype, bool exchange);
  /// The same for what travels on two links, in nodes and between them.
  void restrict_to_one_link();

 private:
  template <class Refuses>
  void drop(Refuses refuses, const std::string& reason);
};

/// "int8,none" or "all". Throws UsageError naming `option`, the entry and what the library says about it.
CodecList parse_codecs(const std::string& option, const std::string& text);
/// The one codec of `text`.
NamedCodec parse_one_codec(const std::string& option, const std::string& text);

/// float, f32, bfloat16, bf16, half, f16.
DType parse_dtype(const std::string& option, const std::string& text);

/// One line per codec with its grammar and summary.
std::string codec_help();

}  // namespace gradgate::cli
