"""`torchrun -m gradgate doctor --params … --step …`: should gradients be compressed on *this* process group?

A session in mode observe runs on the real group with buckets of DDP's size and normally distributed gradients; the
gate's own start-up measures the link and the codecs, and its verdict is printed. Nothing is verified on a training: the
answer is a prediction.
"""

import json
import os
import re

import torch
import torch.distributed as dist

from .._native import Error
from .._session import Session, between, param_id
from ._group import DTYPE_CODES, Communicator, sibling_group
from ._support import timeout_of

BUCKET_BYTES = 25 << 20  # DDP's default
STEPS = 101  # of mode observe, until its verdict
SCALES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}
UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_count(text: str) -> int:
    """``350M`` → 350000000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([kKMGB]?)", text)
    count = float(match[1]) * SCALES[match[2]] if match else 0
    if not 1 <= count <= 1e13:
        raise Error(1, f"--params: {text!r}, accepted: a number from 1 to 1e13 with k, M, G or B, e.g. 350M")
    return round(count)


def parse_seconds(text: str) -> float:
    """``420ms`` → 0.42."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e-?\d+)?)(ns|us|ms|s)", text)
    seconds = float(match[1]) * UNITS[match[2]] if match else 0
    if not 0 < seconds < 1e6:
        raise Error(1, f"--step: {text!r}, accepted: a positive time with ns, us, ms or s, e.g. 420ms")
    return seconds


def advise(params: int, step_s: float, dtype: torch.dtype, codecs: str, group: dist.ProcessGroup) -> list[str]:
    """Collective. Lines of advice, the same numbers on every rank."""
    size = dist.get_world_size(group)
    if size == 1:
        return ["one rank: there is nothing to send"]
    # One bucket of the trainer's size stands for all of them: times are linear in their number.
    elements = min(params, BUCKET_BYTES // dtype.itemsize)
    buckets = params / elements
    communicator = Communicator(sibling_group(group, timeout_of(group)))
    decisions: list[dict] = []
    session = None
    try:
        communicator.choose_all_to_all()
        session = Session(
            communicator.handle,
            "observe",
            ",".join(between(size, "observe", codecs.split(","))),
            0,
            timeout_of(group),
            log=lambda line: decisions.append(json.loads(line)),
        )
        session.set_layout([(DTYPE_CODES[dtype], [(param_id("doctor"), elements)])])
        generator = torch.Generator().manual_seed(dist.get_rank(group))
        gradient = torch.randn(elements, generator=generator).to(dtype)
        work = torch.empty_like(gradient)
        for _ in range(STEPS):
            work.copy_(gradient)
            session.all_reduce(0, work.data_ptr(), elements, DTYPE_CODES[dtype], float("nan"))
            if any(record["event"] == "observe" for record in decisions):
                break
        explanation = session.explain(0)
    finally:
        if session is not None:
            session.close()
        communicator.close()
    found = [record for record in decisions if record["event"] == "predict"]
    if not found or found[-1]["dense_s"] is None:
        return ["the link could not be measured: leave compression off, or run again on a quiet machine", explanation]
    return _lines(found[-1], params, step_s, dtype, size, buckets, explanation)


def _lines(record, params, step_s, dtype, size, buckets, explanation) -> list[str]:
    dense_s = record["dense_s"] * buckets
    name = str(dtype).removeprefix("torch.")
    lines = [
        f"{params} parameters, {name}, {size} ranks: dense reduction {1e3 * dense_s:.1f} ms, "
        f"computation {1e3 * step_s:.1f} ms"
    ]
    if record["chosen"] == "dense":
        return [*lines, "advice: leave it off", explanation]
    chosen_s = (record["codec_s"] + record["transfer_s"]) * buckets
    serial = (step_s + dense_s) / (step_s + chosen_s)
    hidden = max(step_s, dense_s) / max(step_s, chosen_s)
    speed = f"{min(hidden, serial):.2f} to {max(hidden, serial):.2f} times as fast (predicted)"
    lines.append(f"{record['chosen']}: {1e3 * chosen_s:.1f} ms; a step is {speed}")
    if hidden < 1.01:
        lines.append("advice: it pays only as far as communication does not hide behind the backward pass; try observe")
    else:
        lines.append(f"advice: mode auto with {record['chosen']} among the codecs")
    return [*lines, explanation]


def main(arguments) -> None:
    """The command. Uses the process group of torchrun's environment; alone it is a group of one."""
    params, step_s = parse_count(arguments.params), parse_seconds(arguments.step)
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[arguments.dtype]
    if not dist.is_torchelastic_launched() and "RANK" not in os.environ:
        raise Error(10, "run it on your process group: torchrun --nproc-per-node N -m gradgate doctor …")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        lines = advise(params, step_s, dtype, arguments.codecs, dist.group.WORLD)
        if dist.get_rank() == 0:
            print("\n".join(lines))
    finally:
        dist.destroy_process_group()
