"""python -m gradgate report: a self-contained page, drawn by a browser; what it refuses."""

import json
import re
import shutil
import subprocess

import pytest

from gradgate import Error, report
from models import deep, gate, train, wrap
from ranks import gradgate


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
    {"event": "guard", "step": 128, "epoch": 3, "bucket": 0, "error_stage1": 0.01, "error_stage2": 0, "residual": 0.2},
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


def section(dom: str, name: str) -> str:
    """What was drawn in an element."""
    return dom.split(f'id="{name}"')[1].split("<h2>")[0]


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
    # Zero has no place on a logarithmic axis.
    looks = sum((r[k] or 0) > 0 for r in records if r["event"] == "guard" for k in ("error_stage1", "error_stage2", "residual"))
    assert looks >= 2 and section(dom, "error").count("<circle") == looks
    assert section(dom, "saving").count("<circle") == sum("saved_s" in r and r["saved_s"] is not None for r in records) >= 3
    predictions = sum(r["event"] == "predict" for r in records)
    assert section(dom, "predictions").count("<tr>") == predictions + 1 and predictions > 0


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


def test_files_that_cannot_be_read_or_written_are_one_line(tmp_path):
    log, missing = tmp_path / "run.jsonl", tmp_path / "missing"
    log.write_text('{"v": 1, "event": "start"}\n')
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    for arguments, words in (
        ([str(missing)], (str(missing), "No such file")),
        ([str(binary)], (str(binary), "UTF-8")),
        ([str(log), "-o", str(missing / "report.html")], (str(missing / "report.html"), "cannot write")),
    ):
        done = gradgate("report", *arguments)
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
        assert all(word in done.stderr for word in words), done.stderr
    page = tmp_path / "report.html"
    assert gradgate("report", str(log), "-o", str(page)).returncode == 0
    assert page.stat().st_mode == log.stat().st_mode  # readable by whom the umask says
    assert sorted(each.name for each in tmp_path.iterdir()) == ["binary", "report.html", "run.jsonl"]
