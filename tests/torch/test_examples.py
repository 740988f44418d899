"""The examples under torchrun, in short."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def torchrun(*arguments, ranks=2, timeout=150) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("gate", [[], ["--gate", "on", "--codecs", "int8"]])
def test_digits_are_learnt(gate):
    out = torchrun("examples/torch/train_digits.py", "--steps", "120", *gate)
    accuracy = float(re.search(r"([\d.]+)% of test images", out)[1])
    assert accuracy > 90, out
    assert ("int8" in out) == bool(gate)


def test_the_bytes_model_learns_and_logs(tmp_path):
    log = tmp_path / "run.jsonl"
    small = ["--width", "32", "--layers", "1", "--length", "32", "--steps", "60"]
    out = torchrun("examples/torch/train_bytes_lm.py", *small, "--gate", "auto", "--decisions", str(log))
    assert float(re.search(r": loss ([\d.]+)\n", out)[1]) < 4.5, out  # 256 equally likely bytes: 5.55
    assert '"event":"start"' in log.read_text()
