"""Checkpoints: exact resume, refusals, pickling."""

import io
import pickle

import pytest
import torch
import torch.distributed as dist

import gradgate
import gradgate.torch as gg
from models import batch, deep, equal, gate, train, weights, wrap

OPTIONS = {"mode": "on", "codecs": ["chunk-topk:16/1024"], "seed": 7}


def start(options=OPTIONS, bucket_mb=0.002, **ddp_options):
    ddp = wrap(deep(), bucket_mb, **ddp_options)
    return ddp, gate(ddp, **options)


def sgd(ddp, steps, first):
    for step in range(first, first + steps):
        ddp.zero_grad()
        ddp(batch(step)).square().mean().backward()
        with torch.no_grad():
            for p in ddp.parameters():
                p -= 0.05 * p.grad


def first_part(options, steps, ddp_options):
    ddp, state = start(options, **ddp_options)
    sgd(ddp, steps, 0)
    buffer = io.BytesIO()
    torch.save({"model": ddp.module.state_dict(), "gate": state.state_dict()}, buffer)
    sgd(ddp, 4, steps)
    return buffer.getvalue(), weights(ddp), state.steps


def second_part(options, steps, checkpoints, ddp_options):
    ddp, state = start(options, **ddp_options)
    checkpoint = torch.load(io.BytesIO(checkpoints[dist.get_rank()]), weights_only=True)
    ddp.module.load_state_dict(checkpoint["model"])
    state.load_state_dict(checkpoint["gate"])
    sgd(ddp, 4, steps)
    return weights(ddp), state.steps


# EF-5.
@pytest.mark.parametrize(
    "steps,ddp_options",
    [
        (2, {}),
        (3, {}),
        (5, {"static_graph": True}),
        (3, {"find_unused_parameters": True}),
        (3, {"gradient_as_bucket_view": True}),
    ],
)
@pytest.mark.parametrize("mode,codec", [("on", "chunk-topk:16/1024"), ("on", "int8:sr:ef"), ("auto", "int8")])
def test_resume_is_exact(pool, steps, ddp_options, mode, codec):
    options = {**OPTIONS, "mode": mode, "codecs": [codec]}
    whole = pool.run(2, first_part, options, steps, ddp_options)
    resumed = pool.run(2, second_part, options, steps, [checkpoint for checkpoint, _, _ in whole], ddp_options)
    for (_, expected, total), (seen, resumed_total) in zip(whole, resumed):
        assert equal(expected, seen) and total == resumed_total == steps + 4


def refusal(checkpoints, change):
    rank = dist.get_rank()
    options = {**OPTIONS, **({"seed": 8} if change == "seed" else {})}
    ddp, state = start(options)
    which = {"rank": 0}.get(change, min(rank, len(checkpoints) - 1))
    loaded = torch.load(io.BytesIO(checkpoints[which]), weights_only=True)["gate"]
    if change == "name":
        loaded["names"] = ["other" if name == "0.weight" else name for name in loaded["names"]]
    if change == "version":
        loaded["version"] = 99
    if change == "damage":
        loaded["session"][100] ^= 1
    with pytest.raises(gradgate.Error) as caught:
        state.load_state_dict(loaded)
    # Nothing was taken over: training goes on from zero.
    assert state.steps == 0 and all(not value.any() for value in state.residuals().values())
    sgd(ddp, 3, 0)
    return str(caught.value)


# EF-7; and EF-5: the state of another rank.
@pytest.mark.parametrize(
    "size,change,words",
    [
        (1, "ranks", "world_size 2, this process has 1"),
        (3, "ranks", "world_size 2, this process has 3"),
        (2, "name", "parameter '0.weight' is in the module only"),
        (2, "version", "version 99"),
        (2, "rank", "the state is of rank 0, this process has 1"),
        (2, "seed", "seed"),
        (2, "damage", "checksum"),
    ],
)
def test_a_foreign_state_is_refused_as_a_whole(pool, size, change, words):
    checkpoints = [checkpoint for checkpoint, _, _ in pool.run(2, first_part, OPTIONS, 3, {})]
    for text in pool.run(size, refusal, checkpoints, change):
        assert words in text, text


def other_buckets(checkpoints):
    ddp, state = start(bucket_mb=25)
    state.load_state_dict(torch.load(io.BytesIO(checkpoints[dist.get_rank()]), weights_only=True)["gate"])
    before = state.residuals()
    sgd(ddp, 6, 3)
    assert state.steps == 9 and len(state.explain()) == 1 and set(before) == set(state.residuals())
    assert state.stats()["gradgate/dropped_residuals"] == 0
    return weights(ddp)


def test_a_state_of_other_buckets_keeps_its_residuals(pool):
    checkpoints = [checkpoint for checkpoint, _, _ in pool.run(2, first_part, OPTIONS, 3, {})]
    first, second = pool.run(2, other_buckets, checkpoints)
    assert equal(first, second)


def pickled():
    ddp, state = start()
    sgd(ddp, 4, 0)
    copy = pickle.loads(pickle.dumps(state))
    with pytest.raises(gradgate.Error, match="attach"):
        gg.gated_hook(copy, _Bucket())
    assert copy.state_dict()["steps"] == 4
    residuals = state.residuals()
    state.close()
    copy.attach(ddp)
    assert copy.options == state.options and equal(copy.residuals().values(), residuals.values())
    return copy.steps


class _Bucket:
    def index(self):
        return 0

    def buffer(self):
        return torch.zeros(1)


def test_pickling_keeps_the_state_and_attaches_again(pool):
    assert pool.run(2, pickled) == [4, 4]


def start_late(start_step, options):
    plain = wrap(deep(), **options)
    expected = train(plain, start_step)
    ddp = wrap(deep(), **options)
    state = gate(ddp, start_step=start_step, **OPTIONS)
    assert equal(sum(expected, []), sum(train(ddp, start_step), []))
    assert state.stats()["gradgate/compressed/buckets"] == 0
    train(ddp, 4, first=start_step)
    assert state.steps == start_step + 4 and state.stats()["gradgate/compressed/buckets"] > 0


# DDP-4.
@pytest.mark.parametrize("options", [{}, {"static_graph": True}])
@pytest.mark.parametrize("start_step", [0, 1, 2, 3])
def test_compression_may_start_late(pool, start_step, options):
    pool.run(2, start_late, start_step, options)
