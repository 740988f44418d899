// Named interconnects, each with two sets of numbers. Nominal: data-sheet bandwidth of one rank in one direction and a
// start-up latency of the size commonly quoted: what the link is called. Effective: what collective libraries were
// reported to reach on it with large messages, latency per step of a ring included: closer to what it does. Neither is
// what yours does; that is measured.
#pragma once

#include <cstddef>
#include <string_view>

#include "gate/models/point_to_point.h"

namespace gradgate::gate {

struct Interconnect {
  const char* name;
  Link nominal, effective;
  const char* role;              ///< where it is found: "inside a node" or "between nodes"
  const char* source;            ///< of the nominal numbers
  const char* effective_source;  ///< of the effective ones
};

inline constexpr const char *kInsideNode = "inside a node", *kBetweenNodes = "between nodes";

inline constexpr Interconnect kInterconnects[] = {
    {"nvlink3",
     {0.5e-6, 300e9},
     {2e-6, 230e9},
     kInsideNode,
     "NVLink 3: 12 links of 25 GB/s each way per GPU (A100); 0.5 us nominal",
     "A100: ring busbw 230 GB/s (NVIDIA/nccl#527), 2.0 us per step from 2 to 8 GPUs (NVIDIA/nccl-tests#123)"},
    {"nvlink4",
     {0.5e-6, 450e9},
     {1.9e-6, 370e9},
     kInsideNode,
     "NVLink 4: 18 links of 25 GB/s each way per GPU (H100); 0.5 us nominal",
     "H100: ring busbw 370 GB/s (NVIDIA/nccl-tests#212); 1.9 us per hop, LL128 in NCCL's tuning.cc"},
    {"pcie4",
     {1e-6, 32e9},
     {2.5e-6, 20e9},
     kInsideNode,
     "PCIe 4.0 x16: 16 GT/s on 16 lanes, 32 GB/s each way; 1 us nominal",
     "8 GPUs of the RTX 4090 class: 20 GB/s; 42 us in 14 steps (NVIDIA/nccl#1530)"},
    {"pcie5",
     {1e-6, 64e9},
     {2.5e-6, 28e9},
     kInsideNode,
     "PCIe 5.0 x16: 32 GT/s on 16 lanes, 64 GB/s each way; 1 us nominal",
     "8 GPUs of the RTX 5090 class: 28 GB/s (NVIDIA/nccl#1639); 2.5 us per hop, LL128 in NCCL's tuning.cc"},
    {"ib-hdr",
     {7e-6, 25e9},
     {6.2e-6, 23.5e9},
     kBetweenNodes,
     "InfiniBand HDR: 200 Gbit/s per port; 7 us through a collective library, nominal",
     "23 to 24 GB/s per port (NVIDIA/nccl#412, nccl-tests#100); 2 ranks, 8 B: 19 us (nccl-tests#150)"},
    {"ib-ndr",
     {5e-6, 50e9},
     {8.5e-6, 47e9},
     kBetweenNodes,
     "InfiniBand NDR: 400 Gbit/s per port; 5 us through a collective library, nominal",
     "46 to 48 GB/s per port (NVIDIA/nccl-tests#290); 8.5 us per hop, LL128 in NCCL's tuning.cc"},
    {"roce-100",
     {10e-6, 12.5e9},
     {6e-6, 11.5e9},
     kBetweenNodes,
     "RoCE v2 on 100 Gbit/s Ethernet; 10 us nominal",
     "92 % of the line rate assumed; 9.4 GB/s per port observed in a busy job (NVIDIA/nccl#495)"},
    {"roce-200",
     {10e-6, 25e9},
     {10e-6, 22.5e9},
     kBetweenNodes,
     "RoCE v2 on 200 Gbit/s Ethernet; 10 us nominal",
     "22.5 GB/s by ib_write_bw (NVIDIA/nccl#700); 6 to 14 us per step reported"},
    {"roce-400",
     {10e-6, 50e9},
     {6e-6, 46e9},
     kBetweenNodes,
     "RoCE v2 on 400 Gbit/s Ethernet; 10 us nominal",
     "92 % of the line rate assumed, on a network without congestion (NVIDIA/nccl#527)"},
    {"tcp-10",
     {50e-6, 1.25e9},
     {30e-6, 1.15e9},
     kBetweenNodes,
     "TCP on 10 Gbit/s Ethernet; 50 us nominal",
     "92 % of the line rate assumed; 25 to 40 us per step with NCCL's sockets (NVIDIA/nccl-tests#82)"},
    {"tcp-25",
     {50e-6, 3.125e9},
     {30e-6, 2.9e9},
     kBetweenNodes,
     "TCP on 25 Gbit/s Ethernet; 50 us nominal",
     "92 % of the line rate assumed; 25 to 40 us per step with NCCL's sockets (NVIDIA/nccl-tests#82)"},
    {"tcp-100",
     {50e-6, 12.5e9},
     {30e-6, 5e9},
     kBetweenNodes,
     "TCP on 100 Gbit/s Ethernet; 50 us nominal",
     "4 to 6 GB/s with NCCL's sockets (NVIDIA/nccl#450); 25 to 40 us per step (NVIDIA/nccl-tests#82)"},
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
