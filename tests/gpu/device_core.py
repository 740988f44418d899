"""What the hook does with buckets in device memory, with fake buckets: real device pointers and streams, NCCL ranks, no torch.cuda.

Two processes train on small integers: sums are exact, so the conservation law holds with ==. Run without arguments; exit 77 where there is no
device, no NCCL or no torch.
"""

import ctypes
import os
import socket
import subprocess
import sys

RANKS, COUNTS, TIMEOUT_S = 2, (3000, 4096), 60


class DeviceBucket:
    """Looks like a flat CUDA tensor as far as the core looks."""

    is_sparse = False

    def __init__(self, cuda, count: int):
        self._cuda, self._count = cuda, count
        self._pointer = ctypes.c_void_p()
        assert cuda.cudaMalloc(ctypes.byref(self._pointer), ctypes.c_size_t(4 * count)) == 0

    def data_ptr(self) -> int:
        return self._pointer.value

    def numel(self) -> int:
        return self._count

    def put(self, values) -> None:
        assert self._cuda.cudaMemcpy(self._pointer, ctypes.c_void_p(values.data_ptr()), ctypes.c_size_t(4 * self._count), 1) == 0

    def get(self):
        import torch

        values = torch.empty(self._count)
        assert self._cuda.cudaMemcpy(ctypes.c_void_p(values.data_ptr()), self._pointer, ctypes.c_size_t(4 * self._count), 2) == 0
        return values


def gradient(rank: int, step: int, bucket: int):
    import torch

    generator = torch.Generator().manual_seed(1000 * step + 10 * bucket + rank)
    return torch.randint(-8, 9, (COUNTS[bucket],), generator=generator).float()


def train(rank: int) -> None:
    import torch
    import torch.distributed as dist
    from gradgate.torch._core import Arrival, BucketKey
    from gradgate.torch._device import DeviceCore

    cuda = ctypes.CDLL("libcudart.so.13")
    stream = ctypes.c_void_p()
    assert cuda.cudaStreamCreateWithFlags(ctypes.byref(stream), 1) == 0
    dist.init_process_group("gloo")
    keys = [BucketKey(0, ((7, 1000), (8, 2000)), False), BucketKey(0, ((9, COUNTS[1]),), True)]
    options = {"mode": "on", "codecs": "chunk-topk:8/1024", "seed": 5, "timeout_s": TIMEOUT_S, "link": None, "error_budget": 0.1, "profile": None}
    buckets = [DeviceBucket(cuda, count) for count in COUNTS]

    def step(core, number: int) -> list:
        """The averages of both buckets."""
        finished = []
        for index, (key, bucket) in enumerate(zip(keys, buckets)):
            bucket.put(gradient(rank, number, index))
            core.arrive(Arrival(key, bucket, index, 0.0, None, False, finished.append, stream=stream.value))
        for result in finished:
            if isinstance(result, BaseException):
                raise result
        assert finished == buckets
        core.join(stream.value)
        assert cuda.cudaStreamSynchronize(stream) == 0
        return [bucket.get() for bucket in buckets]

    core = DeviceCore(dist.group.WORLD, options, 0, None, None, None)
    results = [step(core, number) for number in range(4)]
    state = core.save()
    results += [step(core, number) for number in range(4, 6)]
    stats = core.stats()
    assert stats["steps"] == 6 and stats["compressed_buckets"] == 10, stats  # the first step announces the layout, dense
    assert 0 < stats["wire_bytes"] < stats["dense_bytes"], stats

    for index, count in enumerate(COUNTS):
        # N * sum of averages + sum of residuals = sum of all gradients.
        sent = sum(gradient(r, number, index) for r in range(RANKS) for number in range(6))
        kept = core.residuals()
        left = torch.cat([kept[7], kept[8]]) if index == 0 else kept[9]
        dist.all_reduce(left)
        assert left.numel() == count
        received = RANKS * sum(result[index] for result in results) + left
        assert torch.equal(received, sent), (index, (received - sent).abs().max())
        for result in results:  # bit-identical replicas
            others = [torch.empty(count) for _ in range(RANKS)]
            dist.all_gather(others, result[index])
            assert all(torch.equal(other, result[index]) for other in others)
    core.close()

    resumed = DeviceCore(dist.group.WORLD, options, 0, None, None, None)
    step(resumed, 99)  # announces the layout
    resumed.load(state, "")
    for number, expected in zip(range(4, 6), results[4:]):
        for got, value in zip(step(resumed, number), expected):
            assert torch.equal(got, value), number
    resumed.flush()
    step(resumed, 6)
    assert all(not values.any() for values in resumed.residuals().values()), "a flush sends everything"
    resumed.close()
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> int:
    try:
        import torch  # noqa: F401
        from gradgate import _native

        text = ctypes.create_string_buffer(512)
        if _native.library().gg_nccl_make_id(ctypes.create_string_buffer(128), text, len(text)) != 0:
            print(f"skipped: {text.value.decode()}")
            return 77
        devices = ctypes.c_int()
        if ctypes.CDLL("libcudart.so.13").cudaGetDeviceCount(ctypes.byref(devices)) != 0 or devices.value == 0:
            print("skipped: no CUDA device")
            return 77
    except (ImportError, OSError) as error:
        print(f"skipped: {error}")
        return 77
    environment = {**os.environ, "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [subprocess.Popen([sys.executable, __file__, str(rank)], env={**environment, "RANK": str(rank)}) for rank in range(RANKS)]
    try:
        codes = [rank.wait(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    print("exit codes of the ranks:", codes)
    return 0 if codes == [0] * RANKS else 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(int(sys.argv[1]))
    else:
        sys.exit(main())
