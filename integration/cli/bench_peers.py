"""What torch needs for the same work: the peers of `gradgate bench --peers`. One process, one JSON line."""
import json
import sys
import time

try:
    import torch
except Exception as error:  # also a torch that is there and cannot be loaded
    print(json.dumps({"missing": f"torch not found: {type(error).__name__}: {error}"}))
    sys.exit(0)

path, device = sys.argv[1:3]
count, entries, rounds, threads, flush_bytes = map(int, sys.argv[3:])
on_device = device == "cuda"
if on_device and not torch.cuda.is_available():
    print(json.dumps({"missing": f"torch {torch.__version__} has no CUDA device"}))
    sys.exit(0)
torch.set_num_threads(threads)
x = torch.from_file(path, size=count, dtype=torch.float32).clone().to(device)
flush = torch.zeros(flush_bytes // 4)


def bits(values, dtype, mask):
    """The sum of the bits of all values: equal where the values are, in any order."""
    return int((values.view(dtype).to(torch.int64) & mask).sum()) if values.numel() else 0


def duration(call):
    """Seconds that a call takes, and its result: on a device between events, on the CPU with cold caches."""
    if on_device:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        result = call()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) * 1e-3, result
    flush.sum()
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


seconds = {name: [] for name in ("topk", "f16", "f16_back", "bf16", "bf16_back")}
last = {}
for number in range(rounds + 1):  # the first warms up
    def timed(name, call):
        took, last[name] = duration(call)
        if number > 0:
            seconds[name].append(took)

    timed("topk", lambda: torch.topk(x.abs(), entries, sorted=False))
    timed("f16", lambda: x.to(torch.float16))
    timed("f16_back", lambda: last["f16"].to(torch.float32))
    timed("bf16", lambda: x.to(torch.bfloat16))
    timed("bf16_back", lambda: last["bf16"].to(torch.float32))

where = torch.cuda.get_device_name() if on_device else f"{threads} thread" + "s" * (threads != 1)
print(json.dumps({
    "version": torch.__version__,
    "where": where,
    "seconds": seconds,
    "topk_bits": bits(last["topk"].values, torch.int32, 0x7FFFFFFF),
    "f16_bits": bits(last["f16"], torch.int16, 0xFFFF),
    "bf16_bits": bits(last["bf16"], torch.int16, 0xFFFF),
}))
