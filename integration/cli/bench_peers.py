"""What torch needs for the same work: the peers of `gradgate bench --peers`. One process, one JSON line."""
import json
import sys
import time

try:
    import torch
except Exception as error:  # also a torch that is there and cannot be loaded
    print(json.dumps({"missing": f"{type(error).__name__}: {error}"}))
    sys.exit(0)

path, count, entries, rounds, threads, flush_bytes = sys.argv[1], *map(int, sys.argv[2:])
torch.set_num_threads(threads)
x = torch.from_file(path, size=count, dtype=torch.float32).clone()
flush = torch.zeros(flush_bytes // 4)


def bits(values, dtype, mask):
    """The sum of the bits of all values: equal where the values are, in any order."""
    return int((values.view(dtype).to(torch.int64) & mask).sum()) if values.numel() else 0


seconds = {name: [] for name in ("topk", "f16", "f16_back", "bf16", "bf16_back")}
last = {}
for number in range(rounds + 1):  # the first warms up
    def timed(name, call):
        flush.sum()
        start = time.perf_counter()
        last[name] = call()
        if number > 0:
            seconds[name].append(time.perf_counter() - start)

    timed("topk", lambda: torch.topk(x.abs(), entries, sorted=False))
    timed("f16", lambda: x.to(torch.float16))
    timed("f16_back", lambda: last["f16"].to(torch.float32))
    timed("bf16", lambda: x.to(torch.bfloat16))
    timed("bf16_back", lambda: last["bf16"].to(torch.float32))

print(json.dumps({
    "version": torch.__version__,
    "threads": torch.get_num_threads(),
    "seconds": seconds,
    "topk_bits": bits(last["topk"].values, torch.int32, 0x7FFFFFFF),
    "f16_bits": bits(last["f16"], torch.int16, 0xFFFF),
    "bf16_bits": bits(last["bf16"], torch.int16, 0xFFFF),
}))
