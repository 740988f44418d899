"""python -m gradgate: env, report (drawn by a browser), doctor under torchrun."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

from gradgate import Error, report
from gradgate.torch import doctor
from models import deep, gate, train, wrap


def gradgate(*arguments, timeout=60):
    command = [sys.executable, "-m", "gradgate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=os.environ)


def test_env_names_versions_and_the_library():
    done = gradgate("env")
    assert done.returncode == 0
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert lines["gradgate"] == "0.1.0" and lines["library"].startswith("0.1.0 at ")
    assert lines["torch"] == torch.__version__.split("+")[0] or lines["torch"] == torch.__version__


def logged(path, steps):
    ddp = wrap(deep())
    gate(ddp, mode="auto", codecs=["int8", "chunk-topk:8/1024"], log=path, link=(50e-6, 1e6))
    train(ddp, steps)


def browser():
    found = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")]
    return next(filter(None, found), None)


# What a run of this length need not come to: a verdict and two accounts.
LATER = (
    {"event": "verify", "step": 92, "epoch": 3, "what": "challenge", "verdict": "win", "plan_step_s": 0.008}
    | {"base_step_s": 0.012, "pairs": 4, "wins": 4, "losses": 0, "p": 0.0625, "speedup": 1.5, "saved_s": 0.1},
    {"event": "account", "step": 156, "epoch": 3, "saved_s": 0.2},
    {"event": "account", "step": 220, "epoch": 3, "saved_s": 0.35},
)


@pytest.fixture(scope="module")
def page(tmp_path_factory, pool):
    folder = tmp_path_factory.mktemp("report")
    pool.run(2, logged, str(folder / "run.jsonl"), 60)
    with (folder / "run.jsonl").open("a") as log:
        log.writelines(json.dumps({"v": 1, **record}) + "\n" for record in LATER)
    done = gradgate("report", str(folder / "run.jsonl"), "-o", str(folder / "report.html"))
    assert done.returncode == 0 and "records" in done.stdout, done.stderr
    return folder


def test_the_page_is_self_contained(page):
    html = (page / "report.html").read_text()
    assert not re.findall(r'(?:src|href)\s*=\s*"', html) and report.PLACE not in html
    embedded = re.search(r'<script type="application/json" id="records">(.*?)</script>', html, re.S)[1]
    assert json.loads(embedded) == report.read_log(page / "run.jsonl")


def test_a_browser_draws_it(page):
    if browser() is None:
        pytest.skip("no Chromium")
    command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={page / 'profile'}"]
    command += ["--virtual-time-budget=4000", "--dump-dom", f"file://{page / 'report.html'}"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    records = report.read_log(page / "run.jsonl")
    assert "2 ranks, mode auto" in dom
    assert dom.count('class="event"') == sum(r["event"] not in ("start", "link", "defer") for r in records)
    assert 'class="decision"' in dom and "<polyline" in dom
    predictions = sum(r["event"] == "predict" for r in records)
    assert dom.split('id="predictions"')[1].split("</table>")[0].count("<tr>") == predictions + 1


def test_lines_that_are_no_records_are_named(tmp_path):
    log = tmp_path / "bad.jsonl"
    for bad, words in (("{", "line 2"), ('{"v": 2, "event": "x"}', "line 2"), ("", None)):
        log.write_text('{"v": 1, "event": "start"}\n' + bad + "\n")
        if words is None:
            assert len(report.read_log(log)) == 1
        else:
            with pytest.raises(Error, match=words):
                report.read_log(log)
    log.write_text("")
    done = gradgate("report", str(log))
    assert done.returncode == 1 and "no records" in done.stderr and "Traceback" not in done.stderr


def test_doctor_advises_on_the_real_group():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "gradgate"]
    command += ["doctor", "--params", "1M", "--step", "10ms"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "1000000 parameters, float32, 2 ranks" in done.stdout and "advice: " in done.stdout, done.stdout


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
