"""Two copies in one process that say to each other what two ranks do."""

import json
from datetime import timedelta

import pytest
import torch
from torch import distributed, nn

from nanstop.hosts.sharded.alike.drift import Drift, is_due
from nanstop.hosts.sharded.board import Board
from nanstop.numerics.checksums import Checksums
from versions import needs


@pytest.fixture
def store():
    """A group of one, which DistributedDataParallel wants, and the store of two that meet."""
    group, met = distributed.HashStore(), distributed.HashStore()
    distributed.init_process_group("gloo", store=group, rank=0, world_size=1)
    met.set_timeout(timedelta(seconds=5))
    yield met
    distributed.destroy_process_group()


def copy():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    return nn.parallel.DistributedDataParallel(net)


def pair(store, size=2):
    drifts = [Drift(Board(store), rank, size) for rank in range(2)]
    return [copy(), copy()], drifts


def exchange(models):
    """Make the gradients of two copies the mean of both."""
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        mean = (one.grad + other.grad) / 2
        one.grad, other.grad = mean.clone(), mean.clone()


def trained(models, drifts, num, between=lambda step, models: None):
    """Return what was told, by step and rank, in ``num`` steps of two copies on the same data."""
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in models]
    told = []
    for step in range(num):
        for optimizer, model in zip(optimizers, models, strict=True):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
        exchange(models)
        between(step, models)
        with torch.no_grad():
            for rank, (drift, model) in enumerate(zip(drifts, models, strict=True)):
                found = drift.compare(model, step)
                told += [(step, rank, found)] if found is not None else []
        for rank, (drift, model) in enumerate(zip(drifts, models, strict=True)):
            drift.updating(model, optimizers[rank], ())
            optimizers[rank].step()
    return told


def flipped(weight, place, bit):
    weight.detach().view(-1).view(torch.int32)[place] ^= 1 << bit


def test_due():
    early = [number for number in range(512) if is_due(number)]
    assert early == [0, 1, 2, 4, 8, 64]
    assert [number for number in range(512, 2049) if is_due(number)] == [512, 1024, 1536, 2048]


def test_copies_that_are_alike_leave_next_to_nothing(store):
    models, drifts = pair(store)
    assert trained(models, drifts, 70) == []
    assert store.num_keys() <= 10


def test_a_comparison_by_itself_reads_the_weights_alone(store, monkeypatch):
    read, of = [], Checksums.of

    def counted(sums, tensor):
        read[-1] += tensor.numel()
        return of(sums, tensor)

    monkeypatch.setattr(Checksums, "of", counted)
    models, drifts = pair(store)
    num = sum(p.numel() for p in models[0].parameters())
    assert trained(models, drifts, 70, lambda *_: read.append(0)) == []
    of_all = {0: 3, 1: 4}  # weights, gradients twice, momentum
    of_weights = dict.fromkeys((2, 4, 8, 64), 1)
    assert read == [2 * num * (of_all | of_weights).get(at, 0) for at in range(70)]


@pytest.mark.parametrize("bit", [0, 22, 31])
def test_one_bit_of_one_weight(store, bit):
    def flip(step, models):
        if step == 3:
            flipped(models[1].module[1].weight, 4, bit)

    models, drifts = pair(store)
    ((step, rank, facts),) = trained(models, drifts, 20, flip)
    assert (step, rank, facts.weight, facts.ranks) == (7, 0, "1.weight", (1,))
    assert (facts.step, facts.last_equal, facts.num_compared) == (4, 2, 4)
    assert (facts.arrived_equal, facts.consumed_equal, facts.looked_at) == (True, True, 5)
    assert facts.num_differ == 1
    assert facts.largest is not None


def test_it_is_told_once_and_then_nothing_is_written(store):
    models, drifts = pair(store)
    first = trained(models, drifts, 8, lambda step, models: flipped(models[1].module[0].bias, 0, 3))
    left = store.num_keys()
    assert len(first) == 1
    assert trained(models, drifts, 40) == []
    assert store.num_keys() == left


def test_a_rank_that_is_not_there_is_no_difference(store):
    models, drifts = pair(store, size=3)
    flip = lambda step, models: flipped(models[1].module[0].bias, 0, 3)  # noqa: E731
    assert trained(models, drifts, 20, flip) == []


def test_copies_of_other_backwards_are_not_compared(store):
    models, drifts = pair(store)
    drifts[0].compare(models[0], 0)  # one that the other rank has not seen
    assert trained(models, drifts, 20) == []


@needs("torch", "2.4", "a store that is gone raises")
def test_a_store_that_is_gone(store, caplog):
    models, drifts = pair(distributed.PrefixStore("x", store))
    drifts[0]._board._store = None
    assert trained(models, drifts, 4) == []
    assert caplog.text.count("copies are no longer compared") == 1


def test_what_is_told_is_json(store):
    models, drifts = pair(store)
    flip = lambda step, models: flipped(models[1].module[0].bias, 0, 3)  # noqa: E731
    trained(models, drifts, 3, flip)
    assert json.loads(store.get("0/told/1"))["copy"]["names"][0] == "0.weight"
