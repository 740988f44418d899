// Named interconnects with nominal numbers: data-sheet bandwidth of one rank in one direction, and a start-up latency
// of the size commonly reported. They describe what a link is called, not what yours does: measured bandwidth is often
// half of it.
#pragma once

#include <cstddef>
#include <string_view>

#include "gate/cost.h"

namespace gradgate::gate {

struct Interconnect {
  const char* name;
  Link link;
  const char* source;
};

inline constexpr Interconnect kInterconnects[] = {
    {"nvlink3", {0.5e-6, 300e9}, "NVLink 3: 12 links of 25 GB/s each way per GPU (A100); 0.5 us nominal"},
    {"nvlink4", {0.5e-6, 450e9}, "NVLink 4: 18 links of 25 GB/s each way per GPU (H100); 0.5 us nominal"},
    {"pcie4", {1e-6, 32e9}, "PCIe 4.0 x16: 16 GT/s on 16 lanes, 32 GB/s each way; 1 us nominal"},
    {"pcie5", {1e-6, 64e9}, "PCIe 5.0 x16: 32 GT/s on 16 lanes, 64 GB/s each way; 1 us nominal"},
    {"ib-hdr", {7e-6, 25e9}, "InfiniBand HDR: 200 Gbit/s per port; 7 us through a collective library, nominal"},
    {"ib-ndr", {5e-6, 50e9}, "InfiniBand NDR: 400 Gbit/s per port; 5 us through a collective library, nominal"},
    {"roce-100", {10e-6, 12.5e9}, "RoCE v2 on 100 Gbit/s Ethernet; 10 us nominal"},
    {"roce-200", {10e-6, 25e9}, "RoCE v2 on 200 Gbit/s Ethernet; 10 us nominal"},
    {"roce-400", {10e-6, 50e9}, "RoCE v2 on 400 Gbit/s Ethernet; 10 us nominal"},
    {"tcp-10", {50e-6, 1.25e9}, "TCP on 10 Gbit/s Ethernet; 50 us nominal"},
    {"tcp-25", {50e-6, 3.125e9}, "TCP on 25 Gbit/s Ethernet; 50 us nominal"},
    {"tcp-100", {50e-6, 12.5e9}, "TCP on 100 Gbit/s Ethernet; 50 us nominal"},
};
inline constexpr size_t kInterconnectCount = sizeof(kInterconnects) / sizeof(kInterconnects[0]);

/// Finds a link by name; null when there is none.
constexpr const Interconnect* find_interconnect(std::string_view name) noexcept {
  for (const Interconnect& entry : kInterconnects) {
    if (name == entry.name) return &entry;
  }
  return nullptr;
}

}  // namespace gradgate::gate
