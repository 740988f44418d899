"""Where nothing is compressed, the hook is torch.equal to DDP without one."""

import pytest
import torch

from models import deep, equal, gate, train, weights, wrap


def compare(mode, options, set_to_none, steps, bucket_mb=0.002, dtype=torch.float32):
    plain = wrap(deep(dtype=dtype), bucket_mb, **options)
    expected = train(plain, steps, set_to_none=set_to_none, dtype=dtype)
    gated = wrap(deep(dtype=dtype), bucket_mb, **options)
    state = gate(gated, mode=mode, codecs=["int8", "chunk-topk:8/1024"])
    seen = train(gated, steps, set_to_none=set_to_none, dtype=dtype)
    for step, (a, b) in enumerate(zip(expected, seen)):
        assert equal(a, b), f"{mode}: step {step}, by {max((x - y).abs().max() for x, y in zip(a, b))}"
    assert equal(weights(plain), weights(gated))
    assert state.steps == steps
    phase = state.phase()
    state.close()
    return phase


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", ["off", "observe", "auto"])
def test_gradients_and_weights_equal_ddp_without_a_hook(pool, size, mode):
    phases = pool.run(size, compare, mode, {}, True, 8)
    assert len(set(phases)) == 1
    if size > 1:
        assert phases[0] == {"off": "fixed", "observe": "observe", "auto": "startup"}[mode]


@pytest.mark.parametrize("mode", ["off", "auto"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_live_in_the_bucket_are_divided_as_ddp_does(pool, mode, set_to_none):
    pool.run(3, compare, mode, {"gradient_as_bucket_view": True}, set_to_none, 5)


@pytest.mark.parametrize("options", [{"static_graph": True}, {"find_unused_parameters": True}])
def test_static_graph_and_search_for_unused_parameters(pool, options):
    pool.run(2, compare, "auto", options, True, 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_gradient_dtypes(pool, dtype):
    pool.run(3, compare, "auto", {}, True, 4, 0.002, dtype)
