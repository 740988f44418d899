#!/usr/bin/env python3
"""gpu_traffic_table.py CALLS PROFILE: the Markdown table of tools/gpu-traffic.

CALLS has a line per call: spec, dtype, operation, elements, floor in bytes, launches before it. PROFILE is the emulator's, a
JSON object per launch.
"""
import json
import sys


def main() -> int:
    calls = [line.rstrip("\n").split("\t") for line in open(sys.argv[1], encoding="utf-8")]
    launches = [json.loads(line) for line in open(sys.argv[2], encoding="utf-8")]
    print("| codec | gradient | call | launches | moved, B/element | moved ÷ floor | read, write efficiency | bank conflicts ÷ access | lane instructions/element |")
    print("|---|---|---|---|---|---|---|---|---|")
    for call, following in zip(calls, calls[1:]):
        spec, dtype, what, count, floor, first = call
        if what == "end":
            continue
        ran = launches[int(first):int(following[5])]
        if not ran:
            print(f"gpu_traffic: no launch recorded for {spec} {what}", file=sys.stderr)
            return 1
        total = {key: sum(launch[key] for launch in ran) for key in
                 ("gld_bytes", "gst_bytes", "gld_sectors", "gst_sectors", "cold_read_sectors", "cold_write_sectors", "lane_inst",
                  "bank_conflict_extra_wavefronts", "shared_loads", "shared_stores")}
        moved = 32 * (total["cold_read_sectors"] + total["cold_write_sectors"])
        reads = total["gld_bytes"] / (32 * total["gld_sectors"]) if total["gld_sectors"] else 1
        writes = total["gst_bytes"] / (32 * total["gst_sectors"]) if total["gst_sectors"] else 1
        shared = total["shared_loads"] + total["shared_stores"]
        conflicts = f"{total['bank_conflict_extra_wavefronts'] / shared:.3f}" if shared else "–"
        print(f"| `{spec}` | {dtype} | {what} | {len(ran)} | {moved / int(count):.3f} | {moved / float(floor):.3f} | "
              f"{reads:.0%}, {writes:.0%} | {conflicts} | {total['lane_inst'] / int(count):.1f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
