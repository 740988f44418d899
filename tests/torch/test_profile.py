"""Calibration profiles: what `torchrun -m gradgate calibrate` writes, and what a state does with it."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch.distributed as dist

import gradgate
from gradgate.torch import _profile
from models import deep, gate, train, wrap

LINE = {"alpha_s": 1e-4, "beta_bytes_per_s": 1e8, "confidence": 1.0, "pieces": [], "errors": []}


def written(path, **changed):
    """A profile for this group, with some of its key changed."""
    key = {**_profile.key_of(dist.group.WORLD), **changed}
    collectives = {name: LINE for name in _profile.COLLECTIVES}
    profile = {"format": "gradgate-profile", "version": 1, "key": key, "collectives": collectives, "codecs": []}
    if dist.get_rank() == 0:
        _profile.write(path, profile)
    dist.barrier()
    return profile


def created(profile=None, **options):
    """What a state says when it is made, how many collectives that took, and the lines it gave after some steps."""
    said = []
    ddp = wrap(deep())
    barriers, before = [], dist.barrier

    def counted(*arguments, **named):
        barriers.append(1)
        return before(*arguments, **named)

    dist.barrier = counted
    try:
        state = gate(ddp, codecs=["int8"], say=said.append, profile=profile, **options)
        probes = len(barriers)
    finally:
        dist.barrier = before
    train(ddp, 3)
    state.close()
    return said, probes


def with_profile(path):
    written(path)
    return created(path), created()


def test_a_profile_takes_the_place_of_the_probe(pool, tmp_path):
    for (said, probes), (_, without) in pool.run(2, with_profile, str(tmp_path / "profile.json")):
        assert said == [] and probes == 0 and without > 0  # one barrier before every timed collective


def stale(path, field, value):
    written(path, **{field: value})
    return created(path)


@pytest.mark.parametrize(
    "field,value", [("device", "another"), ("world_size", 3), ("backend", "mpi"), ("version", "0.0.9")]
)
def test_a_stale_profile_is_ignored_with_one_line(pool, tmp_path, field, value):
    path = str(tmp_path / "profile.json")
    (said, probes), (others, _) = pool.run(2, stale, path, field, value)
    assert len(said) == 1 and path in said[0] and field in said[0] and repr(value) in said[0], said
    assert others == [] and probes > 0


def damaged(path, text):
    if dist.get_rank() == 0:
        pathlib.Path(path).write_bytes(text)
    dist.barrier()
    return created(path)


GOOD_KEY_ONLY = b'{"format": "gradgate-profile", "version": 1}'


@pytest.mark.parametrize(
    "text,why",
    [
        (b'{"format": "gradgate', "line 1"),
        (b"\xff\xfe", "utf-8"),
        (b"[1, 2]", "list"),
        (GOOD_KEY_ONLY, "'key'"),
        (b'{"format": "gradgate-profile", "version": 2}', "version 2"),
    ],
)
def test_a_damaged_profile_is_ignored_with_one_line(pool, tmp_path, text, why):
    path = str(tmp_path / "profile.json")
    (said, probes), _ = pool.run(2, damaged, path, text)
    assert len(said) == 1 and path in said[0] and why in said[0] and "\n" not in said[0], said
    assert probes > 0


def out_of_range(path):
    profile = written(path)
    if dist.get_rank() == 0:
        profile["collectives"]["all_gather"] = {**LINE, "beta_bytes_per_s": -1}
        _profile.write(path, profile)
    dist.barrier()
    return created(path)


def test_a_number_out_of_range_is_named(pool, tmp_path):
    (said, _), _ = pool.run(2, out_of_range, str(tmp_path / "profile.json"))
    assert len(said) == 1 and "beta_bytes_per_s is -1" in said[0], said


def on_one_rank(path):
    written(path)
    return created(path if dist.get_rank() == 0 else path + ".none")


def test_a_profile_that_one_rank_lacks_is_ignored_by_all(pool, tmp_path):
    (said, probes), (_, others) = pool.run(2, on_one_rank, str(tmp_path / "profile.json"))
    assert len(said) == 1 and "rank 1" in said[0], said
    assert probes == others > 0


def test_the_fit_finds_the_line_and_refuses_what_is_none():
    points = [(bytes_, 2 * (3 * 50e-6 + 3 / 4 * bytes_ / 1e9)) for bytes_ in _profile.SIZES]
    line = _profile.fit("all_reduce", 4, points)
    assert line["alpha_s"] == pytest.approx(50e-6) and line["beta_bytes_per_s"] == pytest.approx(1e9)
    assert line["confidence"] == pytest.approx(1)
    disturbed = [(b, t * 3) if i in (2, 7) else (b, t) for i, (b, t) in enumerate(points)]
    assert _profile.fit("all_reduce", 4, disturbed)["beta_bytes_per_s"] == pytest.approx(1e9)
    with pytest.raises(gradgate.Error, match="does not grow"):
        _profile.fit("all_gather", 4, [(bytes_, 1e-3) for bytes_ in _profile.SIZES])
    with pytest.raises(gradgate.Error, match="off at"):
        _profile.fit("all_gather", 4, [(b, t * (1 + 5 * (i % 2))) for i, (b, t) in enumerate(points)])


def measured_here(path):
    """What the command does, with times that a line fits: those of a busy machine may lie near none."""
    size, measure = dist.get_world_size(), _profile.measure
    trips = {"all_reduce": 2, "all_gather": 1, "all_to_all": 1}

    def on_a_line(group):
        assert dist.get_world_size(group) == size and list(measure(group)) == list(trips)
        sizes = _profile.SIZES
        return {name: [(m, n * (1e-4 * (size - 1) + (size - 1) / size * m / 1e8)) for m in sizes] for name, n in trips.items()}

    _profile.measure = on_a_line
    try:
        profile = _profile.calibrate(dist.group.WORLD)
    finally:
        _profile.measure = measure
    if dist.get_rank() == 0:
        _profile.write(path, profile)
    dist.barrier()
    return profile, created(path)


def test_what_calibrate_finds_is_what_a_state_takes(pool, tmp_path):
    path = tmp_path / "profile.json"
    results = pool.run(2, measured_here, str(path))
    profile = json.loads(path.read_text())
    assert list(profile) == ["format", "version", "key", "collectives", "codecs"]
    for line in profile["collectives"].values():
        assert line["alpha_s"] == pytest.approx(1e-4) and line["beta_bytes_per_s"] == pytest.approx(1e8)
    assert all(found == profile and outcome == ([], 0) for found, outcome in results)


def test_the_command_writes_a_whole_profile_or_says_why_not(tmp_path):
    path = tmp_path / "profile.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "gradgate", "calibrate", "-o", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)
    if done.returncode != 0:  # times near no line: the machine is busy
        assert "run again on a quiet machine" in done.stderr and not list(tmp_path.iterdir()), done.stderr
        return
    profile = json.loads(path.read_text())
    assert profile["key"]["world_size"] == 2 and profile["key"]["ranks_per_node"] == 2
    assert all(0 < line["beta_bytes_per_s"] < 1e15 for line in profile["collectives"].values())
    assert [each.name for each in tmp_path.iterdir()] == ["profile.json"] and "for 2 ranks" in done.stdout


def test_the_command_alone_says_how_to_run_it():
    command = [sys.executable, "-m", "gradgate", "calibrate", "-o", "profile.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ)
    assert done.returncode == 1 and "torchrun" in done.stderr and "Traceback" not in done.stderr
