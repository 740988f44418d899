// The specs that tests run over: every codec of the list, and every variant of it.
#pragma once

#include <string>

#include "gradgate/exchange.h"

namespace gradgate::test {

inline constexpr const char* kSpecs[] = {
    "none",
    "bf16",
    "int8",
    "int8:sr",
    "fp8",
    "fp8:e5m2",
    "int4",
    "int4:sr",
    "int4:hadamard",
    "int4:hadamard:sr",
    "onebit",
    "fp16",
    "chunk-topk:8/1024",
    "chunk-topk:8/1024:bf16",
    "chunk-topk:1/32",           // chunks shorter than a group
    "chunk-topk:32/32:bf16",     // everything is sent
    "chunk-topk:63/64",          // all but one
    "chunk-topk:16/256",         // chunk = group
    "chunk-topk:100/2048",       // more entries than the least number of columns
    "chunk-topk:300/1024:bf16",  // a key for every element
    "chunk-topk:13/32768",       // the longest chunk
    "chunk-topk:8/1024:int8",
    "chunk-topk:1/32:int8",      // many chunks share a scale
    "chunk-topk:300/1024:int8",  // runs of entries end within chunks
    "topk:0.01",
    "topk:0.001:bf16",
    "topk:0.4",  // more entries than a threshold is good for
    "topk:1:bf16",
    "topk:0.01:int8",
    "topk:0.3:int8",
    "randk:0.01",
    "randk:0.001:bf16",
    "randk:0.4",  // strata of two or three elements
    "randk:1",
};

inline CodecSpec spec_of(const char* text) {
  CodecSpec spec;
  Message why;
  if (!parse_codec(text, &spec, &why).ok()) throw std::string(why.text);
  return spec;
}

inline Candidate candidate_of(const char* text) {
  Candidate candidate;
  Message why;
  if (!parse_candidate(text, &candidate, &why).ok()) throw std::string(why.text);
  return candidate;
}

inline bool is_sparse(const CodecSpec& spec) {
  return spec.id == CodecId::chunk_topk || spec.id == CodecId::topk || spec.id == CodecId::randk;
}

inline bool takes_feedback(const CodecSpec& spec) { return spec.id != CodecId::none; }

/// A name that GoogleTest accepts.
inline std::string test_name(std::string text) {
  for (char& c : text) {
    if (!((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'))) c = '_';
  }
  return text;
}

}  // namespace gradgate::test
