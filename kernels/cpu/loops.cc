#include "kernels/cpu/loops.h"

#include "codecs/codecs.h"

namespace gradgate::kernels::cpu {

size_t scratch_bytes(const CodecSpec& spec) noexcept {
  if (spec.id != CodecId::chunk_topk) return 0;
  // x, keys, and the candidates' keys and indices of one unit (loops/topk.h), with room for whole vectors at the end of
  // each.
  const size_t unit = shard_alignment(spec);
  return unit * (4 + 4 + 4 + 2) + 4 * 256;
}

std::span<const Loops* const> all_loops() noexcept {
#if defined(__x86_64__)
  static constexpr const Loops* kTables[] = {&kPortableLoops, &kAvx2Loops, &kAvx512Loops};
  const bool avx2 = __builtin_cpu_supports("avx2") != 0;
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
                      __builtin_cpu_supports("avx512vl") != 0 && __builtin_cpu_supports("avx512dq") != 0;
  return {kTables, avx512 ? 3u : avx2 ? 2u : 1u};
#else
  static constexpr const Loops* kTables[] = {&kPortableLoops};
  return kTables;
#endif
}

}  // namespace gradgate::kernels::cpu
