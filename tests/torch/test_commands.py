"""python -m gradgate: env, doctor under torchrun, and what each says where it cannot run. The report: test_report.py."""

import os
import subprocess
import sys

import pytest
import torch

from gradgate import Error
from gradgate.torch import doctor
from ranks import gradgate


def test_env_names_versions_and_the_library():
    done = gradgate("env")
    assert done.returncode == 0
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert lines["gradgate"] == "0.1.0" and lines["library"].startswith("0.1.0 at ")
    assert lines["torch"] == torch.__version__.split("+")[0] or lines["torch"] == torch.__version__


def test_doctor_advises_on_the_real_group():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "gradgate"]
    command += ["doctor", "--params", "1M", "--step", "10ms"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "1000000 parameters, float32, 2 ranks" in done.stdout and "advice: " in done.stdout, done.stdout
    assert "all_gather" in done.stdout and "two_shot" not in done.stdout, done.stdout  # as a GateState of two ranks sends


def test_doctor_refuses_what_it_cannot_read():
    assert doctor.parse_count("350M") == 350_000_000 and doctor.parse_seconds("420ms") == pytest.approx(0.42)
    for bad in ("", "M", "-1", "1.5X", "0", "nan"):
        with pytest.raises(Error, match="--params"):
            doctor.parse_count(bad)
    for bad in ("", "5", "-1ms", "0s", "3 ms", "1h"):
        with pytest.raises(Error, match="--step"):
            doctor.parse_seconds(bad)
    done = gradgate("doctor", "--params", "1M", "--step", "1ms")
    assert done.returncode == 1 and "torchrun" in done.stderr


@pytest.mark.parametrize("command", [["doctor", "--params", "1M", "--step", "1ms"], ["calibrate", "-o", "p.json"]])
def test_without_torch_a_command_is_one_line(tmp_path, command):
    # As where torch was never installed: nothing is found by its name.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
        "sys.meta_path.insert(0, NoTorch())\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    done = gradgate(*command, PYTHONPATH=path)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "torch 2.1 or newer, which is not installed" in done.stderr
    assert gradgate("env", PYTHONPATH=path).returncode == 0
