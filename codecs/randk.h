// randk:ratio: elements drawn at random, one from each of K strata of the vector (docs/format.md §3). Element code, for
// host and device.
#pragma once

#include "codecs/chunk_topk.h"
#include "codecs/philox.h"

namespace gradgate::codecs {

/// The words of a sample: section 0 of a payload.
struct SampleWords {
  uint32_t word[4];

  /// What the seed gives for a vector that begins at Seed.first of its tensor.
  GRADGATE_HD static SampleWords of(const Seed& seed) {
    const PhiloxBlock block = random_block(seed, (uint64_t{1} << 63) + seed.first);
    return {{block.word[0], block.word[1], block.word[2], block.word[3]}};
  }
};

/// Numbers of a block of draws; a draw's block, and its word in it. Neighbours are in different blocks, as those of
/// elements are.
inline constexpr uint64_t kDrawsPerRun = 128, kBlocksPerRun = 32;

/// Which elements a sample has. Entries and elements are counted from 0; count <= 2^31, so every product below fits 64
/// bits.
struct Sample {
  uint64_t count, entries, shift;
  SampleWords words;

  GRADGATE_HD Sample(const SampleWords& w, uint64_t n, uint64_t k)
      : count(n), entries(k), shift((w.word[2] * n) >> 32), words(w) {}

  GRADGATE_HD PhiloxBlock draws(uint64_t block) const {
    return philox4x32_10(static_cast<uint32_t>(block), 0, 0, words.word[3], words.word[0], words.word[1]);
  }
  GRADGATE_HD uint32_t draw(uint64_t j) const {
    const PhiloxBlock block = draws(j / kDrawsPerRun * kBlocksPerRun + j % kBlocksPerRun);
    return block.word[j % kDrawsPerRun / kBlocksPerRun];
  }
  /// First element of stratum j on the ring; j <= entries.
  GRADGATE_HD uint64_t start(uint64_t j) const { return (j * count + shift) / entries; }
  /// Place on the ring of an entry whose stratum is begin … end-1.
  GRADGATE_HD static uint64_t place(uint64_t begin, uint64_t end, uint32_t r) {
    return begin + ((r * (end - begin)) >> 32);
  }
  /// Element of a place on the ring.
  GRADGATE_HD uint64_t element(uint64_t at) const { return at >= count ? at - count : at; }
  /// Element of entry j.
  GRADGATE_HD uint64_t index(uint64_t j) const { return element(place(start(j), start(j + 1), draw(j))); }
  /// Stratum of element i: the j with start(j) <= i < start(j + 1), on the ring.
  GRADGATE_HD uint64_t stratum(uint64_t i) const {
    const uint64_t at = i < start(0) ? i + count : i;
    return ((at + 1) * entries - 1 - shift) / count;
  }
};

template <>
struct Codec<CodecId::randk> {
  static constexpr size_t kMaxCount = size_t{1} << 31;
  static constexpr const char* kGrammar = "randk:ratio[:f32|:bf16][:noef]";
  static constexpr const char* kSummary =
      "a random ratio (0 to 1) of all elements, the same on every rank: payloads add";
  static constexpr bool kFeedback = true, kDefaultFeedback = true;
  static constexpr int kFidelity = 70;
  static constexpr Exchange kExchange = Exchange::all_reduce;
  static constexpr unsigned kTravels = by(Exchange::all_reduce) | by(Exchange::all_gather) | by(Exchange::hierarchical);

  static bool parse(std::string_view parameters, CodecSpec* spec, Message* why) noexcept;
  static void format(const CodecSpec& spec, Message* text) noexcept;
  static bool valid(const CodecSpec& spec) noexcept {
    return valid_ratio(spec) && (spec.value == DType::f32 || spec.value == DType::bf16);
  }
  static bool takes(DType gradient) noexcept { return widens_to_f32(gradient); }
  static WireSpec wire(const CodecSpec& spec, DType) noexcept { return {spec.value, spec.param0, spec.param1}; }
  static size_t unit(const CodecSpec&) noexcept { return kGroup; }
  static size_t entries(const CodecSpec& spec, size_t count) noexcept { return entries_of_ratio(spec, count); }

  /// The sample, the values.
  template <class Byte>
  static void layout(const CodecSpec& spec, DType, size_t count, Carver<Byte>& carver,
                     Sections<Byte>* sections) noexcept {
    const size_t k = entries(spec, count), width = dtype_bytes(spec.value), words = count == 0 ? 0 : 4;
    sections->first = carver.take(words, 4);
    sections->first_bytes = words * 4;
    sections->second = carver.take(count <= kMaxCount ? k : SIZE_MAX, width);  // longer vectors have no payload
    sections->second_bytes = k * width;
  }

  static Addends addends(const CodecSpec& spec, size_t count) noexcept {
    return {count == 0 ? size_t{32} : size_t{48}, entries(spec, count), spec.value};
  }
};

}  // namespace gradgate::codecs
