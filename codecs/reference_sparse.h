// The part of the reference that is about codecs which choose over a whole vector.
#pragma once

#include <cstdint>
#include <vector>

#include "gradgate/codec.h"

namespace gradgate::reference {

/// Bytes of a section of k values: f32, bf16, or (u8) int8 codes behind their scales.
size_t values_bytes(DType value, size_t k);
/// Writes the values at `at`, and reads them.
void put_values(DType value, const std::vector<float>& values, size_t at, std::vector<std::byte>* payload);
std::vector<float> get_values(DType value, size_t k, const std::byte* payload, size_t at);

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

/// Elements of a randk payload's entries, from the four words of its sample; n > 0.
std::vector<size_t> randk_elements(const CodecSpec& spec, size_t n, const uint32_t* words);
/// Bytes of its sections 0 and 1.
void randk_section_bytes(const CodecSpec& spec, size_t n, size_t* first, size_t* second);
/// Writes sample and values of x into a payload that has its header.
void encode_randk(const CodecSpec& spec, const std::vector<float>& x, Seed seed, std::vector<std::byte>* payload);
void randk_values(const CodecSpec& spec, size_t n, const std::byte* payload, std::vector<float>* d,
                  std::vector<bool>* sent);

}  // namespace gradgate::reference
