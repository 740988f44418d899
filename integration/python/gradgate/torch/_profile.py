"""Calibration profiles (docs/program.md) of a process group: the reader, and `torchrun -m gradgate calibrate`.

A profile is for one device, backend, number of ranks and placement, and version. Another one, or a damaged one, is
ignored and why is said in one line: the session then probes the link itself.
"""

import json
import os
import pathlib
import platform
import statistics
import time

import torch
import torch.distributed as dist

from .._native import Error, LinkProfile
from .._version import __version__
from ._group import _all_gather, sibling_group
from ._support import timeout_of

FORMAT, VERSION = "gradgate-profile", 1
COLLECTIVES = LinkProfile.COLLECTIVES
SLOWEST, FASTEST, LONGEST = 1.0, 1e15, 1e6  # bytes per second twice, seconds: what `gradgate` reads

SIZES = [1 << exponent for exponent in range(12, 23)]  # bytes of a whole vector
WARM_UPS, ROUNDS = 2, 7
# Points further off than the first are left out, up to a third of them; a fit that then has one further off than the
# second is refused.
OUTLIER, LARGEST_ERROR = 0.25, 0.5


def _device() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def key_of(group: dist.ProcessGroup) -> dict:
    """What a profile measured here is valid for. Not collective: the placement is what the launcher said."""
    size = dist.get_world_size(group)
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    per_node = min(int(local), size) if local.isdigit() and int(local) > 0 else 1
    return {
        "device": _device(),
        "backend": str(dist.get_backend(group)),
        "world_size": size,
        "ranks_per_node": per_node,
        "version": __version__,
        "topology": f"torch.distributed, {per_node} on each node",
    }


def _number(record: dict, name: str, low: float, high: float) -> float:
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}, accepted: {low:g} to {high:g}")
    return float(value)


def read(path, group: dist.ProcessGroup) -> tuple[dict | None, str]:
    """The numbers of a profile for a session, and "" or the line that says why it is ignored."""
    try:
        profile = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        if profile["format"] != FORMAT or profile["version"] != VERSION:
            found = f"{profile['format']!r} version {profile['version']!r}"
            raise ValueError(f"format is {found}, accepted: {FORMAT!r} version {VERSION}")
        key, here = profile["key"], key_of(group)
        for name, value in here.items():
            if key[name] != value:
                return None, f"gradgate: {path} is ignored: it is for {name} {key[name]!r}, here is {value!r}"
        numbers: dict[str, float] = {"ranks": here["world_size"]}
        for name in COLLECTIVES:
            line = profile["collectives"][name]
            numbers[f"{name}_alpha_s"] = _number(line, "alpha_s", 0, LONGEST)
            numbers[f"{name}_beta_bytes_per_s"] = _number(line, "beta_bytes_per_s", SLOWEST, FASTEST)
        return numbers, ""
    except KeyError as error:
        return None, f"gradgate: {path} is ignored: it has no {error.args[0]!r}"
    except OSError as error:
        return None, f"gradgate: {path} is ignored: {error.strerror or error}"
    except (ValueError, TypeError) as error:  # also JSON and UTF-8 that do not parse, and values of other types
        return None, f"gradgate: {path} is ignored: {error}"


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """T = a + b·M by least squares of relative errors, a not negative."""
    weights = [1 / (seconds * seconds) for _, seconds in points]
    total = sum(weights)
    mean_m = sum(w * m for w, (m, _) in zip(weights, points)) / total
    mean_t = sum(w * t for w, (_, t) in zip(weights, points)) / total
    spread = sum(w * (m - mean_m) ** 2 for w, (m, _) in zip(weights, points))
    slope = sum(w * (m - mean_m) * (t - mean_t) for w, (m, t) in zip(weights, points)) / spread
    if mean_t >= slope * mean_m:
        return mean_t - slope * mean_m, slope
    squares = sum(w * m * m for w, (m, _) in zip(weights, points))
    return 0.0, sum(w * m * t for w, (m, t) in zip(weights, points)) / squares


def fit(name: str, ranks: int, points: list[tuple[float, float]]) -> dict:
    """α and β of a collective's ring formula from (bytes, seconds). Raises Error where no line describes them."""
    kept = list(points)
    while True:
        fixed, slope = _line(kept)
        worst = max(kept, key=lambda point: abs((fixed + slope * point[0]) / point[1] - 1))
        error = (fixed + slope * worst[0]) / worst[1] - 1
        if abs(error) <= OUTLIER or len(points) - len(kept) >= len(points) // 3:
            break
        kept.remove(worst)
    if not slope > 0:
        raise Error(13, f"calibrate: the time of {name} does not grow with size; run again on a quiet machine")
    if abs(error) > LARGEST_ERROR:
        text = f"a line is {error:+.0%} off at {worst[0]} B, accepted: {LARGEST_ERROR:.0%}"
        raise Error(13, f"calibrate: {name}: {text}; run again on a quiet machine")
    trips = 2 if name == "all_reduce" else 1
    # The share of the relative deviations from the best constant that the line explains.
    missed = sum(((fixed + slope * m) / t - 1) ** 2 for m, t in kept)
    constant = sum(1 / t for _, t in kept) / sum(1 / t**2 for _, t in kept)
    varied = sum((constant / t - 1) ** 2 for _, t in kept)
    return {
        "alpha_s": fixed / (trips * (ranks - 1)),
        "beta_bytes_per_s": trips * (ranks - 1) / ranks / slope,
        "confidence": max(0.0, 1 - missed / varied) if varied > 0 else 0.0,
        "pieces": [],
        "errors": [{"bytes": m, "relative": (fixed + slope * m) / t - 1} for m, t in points],
    }


def measure(group: dist.ProcessGroup) -> dict:
    """Collective. Points of every collective: a barrier, then the operation; the slowest rank, the median over rounds
    in which sizes take turns. The same numbers on every rank."""
    size = dist.get_world_size(group)
    sizes = [max(bytes_ // (4 * size), 1) * 4 * size for bytes_ in SIZES]  # a whole number of floats for every rank
    send, recv = torch.zeros(sizes[-1] // 4), torch.zeros(sizes[-1] // 4)
    operations = {
        "all_reduce": lambda n: dist.all_reduce(recv[:n], group=group),
        "all_gather": lambda n: _all_gather(recv[:n], send[: n // size], group=group),
        "all_to_all": lambda n: dist.all_to_all_single(recv[:n], send[:n], group=group),
    }
    assert tuple(operations) == COLLECTIVES
    seconds = torch.zeros(len(operations), len(sizes), WARM_UPS + ROUNDS, dtype=torch.float64)
    for round_ in range(WARM_UPS + ROUNDS):
        for s, bytes_ in enumerate(sizes):
            for o, operation in enumerate(operations.values()):
                dist.barrier(group=group)
                begin = time.perf_counter()
                operation(bytes_ // 4)
                seconds[o, s, round_] = time.perf_counter() - begin
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    median = [[statistics.median(times[WARM_UPS:]) for times in rows] for rows in seconds.tolist()]
    return {name: list(zip(sizes, row)) for name, row in zip(operations, median)}


def write(path, profile: dict) -> None:
    """The whole file or nothing."""
    target = pathlib.Path(path)
    draft = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        draft.write_text(json.dumps(profile, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        draft.replace(target)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise Error(12, f"calibrate: cannot write {path}: {error.strerror or error}") from None


def calibrate(group: dist.ProcessGroup) -> dict:
    """Collective. The profile of a gloo group of two ranks or more."""
    size = dist.get_world_size(group)
    if size < 2:
        raise Error(1, f"calibrate: {size} rank, accepted: 2 or more")
    points = measure(sibling_group(group, timeout_of(group)))
    collectives = {name: fit(name, size, points[name]) for name in COLLECTIVES}
    return {"format": FORMAT, "version": VERSION, "key": key_of(group), "collectives": collectives, "codecs": []}


def main(arguments) -> None:
    """The command. Uses the process group of torchrun's environment."""
    if not dist.is_torchelastic_launched() and "RANK" not in os.environ:
        raise Error(10, "run it on your process group: torchrun --nproc-per-node N -m gradgate calibrate -o FILE")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        profile = calibrate(dist.group.WORLD)
        if dist.get_rank() == 0:
            write(arguments.output, profile)
            for name in COLLECTIVES:
                line = profile["collectives"][name]
                error = statistics.median(abs(error["relative"]) for error in line["errors"])
                alpha, beta = 1e6 * line["alpha_s"], line["beta_bytes_per_s"] / 1e6
                print(f"{name}: alpha {alpha:.0f} us, beta {beta:.1f} MB/s, typically {error:.0%} off")
            print(f"{arguments.output}: for {profile['key']['world_size']} ranks")
    finally:
        dist.destroy_process_group()
