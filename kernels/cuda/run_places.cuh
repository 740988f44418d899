// Marked elements of a warp in index order: where each of them goes in a list.
#pragma once

#include "kernels/cuda/group.cuh"

namespace gradgate::kernels::cuda {
namespace {

// A run is four neighbours of a lane, and runs of all lanes come one after the other, eight of them. Bit 4 r + s of a
// lane's mask marks element s of its run r.
struct RunPlaces {
  static constexpr unsigned kRuns = 8;

  uint32_t before[2], all[2];  ///< a byte for each run, even ones and odd ones: in lower lanes, in all
  uint32_t total;

  __device__ explicit RunPlaces(uint32_t mask) {
    uint32_t two = mask - (mask >> 1 & 0x55555555u);
    two = (two & 0x33333333u) + (two >> 2 & 0x33333333u);
    total = 0;
#pragma unroll
    for (unsigned w = 0; w < 2; ++w) {
      const uint32_t own = two >> (4 * w) & 0x0f0f0f0fu;
      const uint32_t upto = sum_up_to(own);  // at most 128: no byte runs over
      before[w] = upto - own;
      all[w] = __shfl_sync(kFull, upto, 31);
      const uint32_t pairs = (all[w] & 0x00ff00ffu) + (all[w] >> 8 & 0x00ff00ffu);
      total += (pairs & 0xffffu) + (pairs >> 16);
    }
  }

  /// Calls f(4 · run + element, place) for each marked element of the lane.
  template <class F>
  __device__ __forceinline__ void for_marked(uint32_t mask, const F& f) const {
    uint32_t runs = 0;  // marked elements of the runs so far
#pragma unroll
    for (unsigned r = 0; r < kRuns; ++r) {
      const unsigned w = r % 2, byte = r / 2 * 8;
      if ((mask >> (4 * r) & 15u) != 0) {
        uint32_t to = runs + (before[w] >> byte & 0xffu);
#pragma unroll
        for (unsigned s = 0; s < 4; ++s) {
          if ((mask >> (4 * r + s) & 1u) != 0) f(4 * r + s, to++);
        }
      }
      runs += all[w] >> byte & 0xffu;
    }
  }
};

}  // namespace
}  // namespace gradgate::kernels::cuda
