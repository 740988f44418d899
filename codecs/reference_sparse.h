// The part of the reference that is about codecs which choose over a whole vector.
#pragma once

#include <cstdint>
#include <vector>

#include "gradgate/codec.h"

namespace gradgate::reference {

/// Sections of a topk payload for n elements, by the page: entries, chunks, and where each section begins.
struct TopkLayout {
  size_t entries, chunks, values_at, indices_at, bytes;
  TopkLayout(const CodecSpec& spec, size_t n);
};

/// Writes counts, values and indices of x into a payload that has its header.
void encode_vector_topk(const CodecSpec& spec, const std::vector<float>& x, std::vector<std::byte>* payload);
/// What the payload says, into d and sent.
void vector_topk_values(const CodecSpec& spec, size_t n, const std::byte* payload, std::vector<float>* d,
                        std::vector<bool>* sent);

}  // namespace gradgate::reference
