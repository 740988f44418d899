"""The examples under torchrun, in short."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def torchrun(*arguments, ranks=2, timeout=150, cwd=ROOT) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout, env=env)
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


def applied(diff: list[str], source: str) -> str:
    """An example with the added lines of a diff of README.md, each behind the line that it follows there."""
    lines, at = source.split("\n"), source.split("\n").index("import torch")
    for line in diff:
        mark, text = line[:1], line[1:]
        if mark == "+":
            indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
            lines.insert(at + 1, indent + text)
            at += 1
        else:  # stands in the example as in the README
            at = [each.strip() for each in lines].index(text.strip(), at)
    return "\n".join(lines)


# The plain examples, and the lines that the README adds to them.
@pytest.mark.parametrize("name,arguments", [("digits", []), ("bytes_lm", ["--width", "32", "--layers", "1", "--length", "32"])])
def test_the_readme_adds_to_an_example_what_it_shows(tmp_path, name, arguments):
    readme = (ROOT / "README.md").read_text()
    place = readme.index(f"[examples/torch/train_{name}.py]")
    diff = re.search(r"```diff\n(.*?)\n```", readme[place:], re.S)[1].split("\n")
    added = [line[1:] for line in diff if line.startswith("+")]
    assert len(added) == 3 and added[0] == "import gradgate.torch"
    source = (ROOT / f"examples/torch/train_{name}.py").read_text()
    script = tmp_path / "train.py"
    script.write_text(applied(diff, source).replace("\nimport gradgate.torch\n\n\n", "\n\n\n"))
    out = torchrun(str(script), "--steps", "25", *arguments, cwd=tmp_path)
    assert "gate none" in out  # not the example's own
    if "log=" in added[1]:
        assert '"event":"start"' in (tmp_path / "run.jsonl").read_text()
