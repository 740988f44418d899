// docs/format.md as plain scalar code, written from the page and from nothing else: the oracle that every fast path is
// compared with. Arguments are taken as valid, memory is allocated freely, speed does not matter. Runs in the IEEE
// environment (no FTZ/DAZ).
#pragma once

#include <cstdint>
#include <vector>

#include "gradgate/codec.h"

namespace gradgate::reference {

/// Size of a payload by the layout table of the page.
size_t payload_bytes(const CodecSpec& spec, DType gradient, size_t count);

/// g widened to f32 (f32, bf16 and f16).
std::vector<float> widen(ConstVec gradient);

/// Encodes gradient (+ residual, updated in place; null: none) and returns the payload.
std::vector<std::byte> encode(const CodecSpec& spec, ConstVec gradient, float* residual, bool flush, Seed seed,
                              EncodeStats* stats);

/// What the payload says: d, one value per element. `sent` (optional) tells which elements have an entry.
std::vector<float> values(const CodecSpec& spec, DType gradient, size_t count, const std::byte* payload,
                          std::vector<bool>* sent);

/// Decodes a valid payload into out (f32, bf16 or f16).
void decode(const CodecSpec& spec, DType gradient, const std::byte* payload, Vec out, float scale, Into into);

/// The sum of all ranks' payloads, times scale, into out (f32 or bf16).
void decode_sum(const CodecSpec& spec, DType gradient, std::span<const ConstBytes> payloads, Vec out, float scale);

/// The owner's part of two_shot.
std::vector<std::byte> reduce_encode(const CodecSpec& spec, std::span<const ConstBytes> payloads, size_t self,
                                     ConstVec gradient, float* residual, Seed seed, EncodeStats* stats);

void fold_residual(Vec gradient, float* residual);

/// Rule 7.
uint16_t bf16_of(float x);
uint16_t f16_of(float x);

}  // namespace gradgate::reference
