"""By which collectives payloads travel, and over which process groups."""

import math

import pytest
import torch
import torch.distributed as dist

import gradgate
from gradgate._session import between
from gradgate.torch import _group
from models import Linear, backward, deep, equal, gate, train, wrap
from ranks import free_port


def by_exchange(codec):
    ddp = wrap(Linear(600))
    gate(ddp, mode="on", codecs=[codec])
    generator = torch.Generator().manual_seed(dist.get_rank())
    backward(ddp, torch.zeros(600))
    return backward(ddp, torch.randn(600, generator=generator))


def test_two_ranks_need_one_collective_a_bucket(pool):
    plain, gathered, two = (pool.run(2, by_exchange, "int8" + e) for e in ("", "@all_gather", "@two_shot"))
    assert equal(plain, gathered) and not equal(plain, two)


def test_more_ranks_keep_the_exchange_of_the_codec(pool):
    plain, two = (pool.run(3, by_exchange, "int8" + exchange) for exchange in ("", "@two_shot"))
    assert equal(plain, two)


def in_rounds(codec, always):
    ddp = wrap(Linear(1001))  # which no number of ranks here divides
    state = gate(ddp, mode="on", codecs=[codec])
    chosen = state._core.communicator.rounds_from
    state._core.communicator.rounds_from = 0 if always else math.inf
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = [backward(ddp, torch.randn(1001, generator=generator)) for _ in range(4)]
    return chosen, seen


@pytest.mark.parametrize("codec", ["int8", "bf16", "chunk-topk:8/1024"])
@pytest.mark.parametrize("size", [3, 4])
def test_an_all_to_all_in_rounds_gives_the_same_bits(pool, size, codec):
    rounds, at_once = (pool.run(size, in_rounds, codec, always) for always in (True, False))
    assert all(equal(seen, at_once[0][1]) for _, seen in [*rounds, *at_once])
    for results in (rounds, at_once):
        assert len({chosen for chosen, _ in results}) == 1  # the ranks measured, and agreed


def over_another_backend(name, port, codec):
    """A training over gloo by another name, without what torch's MPI backend does not do; its gradients, and those of a
    group of some of the ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # all are connected: none is left alone by what follows
    dist.destroy_process_group()
    if name != "gloo":

        def create(store, rank, size, timeout):
            return dist.ProcessGroupGloo(store, rank, size, timeout)

        if name not in dist.Backend.backend_list:
            dist.Backend.register_backend(name, create, devices=["cpu"])
        new_group, gather = dist.new_group, _group._all_gather

        def new_group_with_all(*arguments, use_local_synchronization=False, **named):
            assert not use_local_synchronization
            return new_group(*arguments, **named)

        dist.new_group, _group._all_gather = new_group_with_all, None
    try:
        dist.init_process_group(name, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
        ddp = wrap(deep())
        state = gate(ddp, mode="on", codecs=[codec])
        seen = sum(train(ddp, 5), [])
        assert state.stats()["gradgate/compressed/buckets"] > 0
        state.close()
        some = dist.new_group([0, 1])
        if name != "gloo" and size > 2 and rank < 2:
            with pytest.raises(gradgate.Error, match="2 of 3 ranks, accepted: all of them"):
                gate(wrap(Linear(4), process_group=some), mode="on")
        return seen
    finally:
        if name != "gloo":
            dist.new_group, _group._all_gather = new_group, gather


# What can be tested of MPI with a torch that has none.
@pytest.mark.parametrize("codec", ["int8", "topk:0.05"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_backend_that_makes_groups_with_all_ranks_only(pool, size, codec):
    gloo, other = (pool.run(size, over_another_backend, name, free_port(), codec) for name in ("gloo", "mpi_like"))
    assert all(equal(seen, gloo[0]) for seen in [*gloo, *other])


def test_only_two_shots_become_all_gathers_and_names_are_kept():
    codecs = ["int8", "chunk-topk:8/1024:bf16", "topk:0.01", "none", "int4@two_shot", "no-such-codec"]
    gathered = ["int8@all_gather", "chunk-topk:8/1024:bf16@all_gather", *codecs[2:]]
    assert between(2, "on", codecs) == gathered
    assert between(2, "auto", codecs) == [*gathered, "bf16@all_gather"]
    assert between(3, "auto", codecs) == codecs
