"""Collectives of a step, made together and answered; the ranks are threads that agree through a
store, over a process group of one.
"""

import warnings
from threading import Thread

import pytest
import torch
from torch import distributed, nn

from fnstep import FnStep
from nanstop.errors import NanstopError
from nanstop.hosts.sharded.store_ranks import StoreRanks
from nanstop.replay.collectives import Collectives, other
from nanstop.replay.rerun import attempt, communicates


@pytest.fixture(autouse=True)
def group(tmp_path, monkeypatch):
    # Both of which an undone run sets and puts back, here two at once.
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
    torch.compiler.set_stance("default")


def step(loss):
    torch.manual_seed(0)
    return FnStep(nn.Linear(4, 1), loss, [{"x": torch.ones(2, 4)}], world_size=2)


def reads(model, batch):
    brought = batch["x"].sum()
    distributed.all_reduce(brought)
    return model(batch["x"]).mean() * brought


def looks(model, batch):
    distributed.all_reduce(batch["x"].sum())
    return model(batch["x"]).mean()


def alone(model, batch):
    return model(batch["x"]).mean()


def together(*steps):
    """The attempt of each step, all at once."""
    store, runs = distributed.HashStore(), [None] * len(steps)

    def run(rank):
        ranks = StoreRanks(store, rank, len(steps), seconds=20)
        with steps[rank].collectives.together(ranks):
            runs[rank] = attempt(steps[rank], 0)
        ranks.gather("end", "")

    threads = [Thread(target=run, args=(rank,)) for rank in range(len(steps))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return runs


@pytest.mark.parametrize("loss", [reads, looks])
def test_what_was_made_together_is_answered(loss):
    first, second = step(loss), step(loss)
    made, _ = together(first, second)
    assert not made.failed
    assert attempt(first, 0).digest == made.digest
    assert communicates(first) == ""


def test_whether_a_loss_reads_it():
    digests = {}
    for loss in (reads, looks):
        one = step(loss)
        made, _ = together(one, step(loss))
        with one.collectives.changed(other):
            digests[loss] = attempt(one, 0).digest == made.digest
    assert digests == {reads: False, looks: True}


def test_one_alone_is_stopped_before_it_begins():
    one = step(reads)
    assert communicates(one).startswith("c10d.allreduce_")
    assert "needs the other processes" in str(attempt(one, 0).error)


def test_ranks_that_do_not_come_to_the_same():
    first, second = step(reads), step(alone)
    stays, goes_on = together(first, second)
    assert "rank 1 has ended its micro-batch" in str(stays.error)
    assert not goes_on.failed


def test_what_nobody_reads_is_answered_where_ranks_come_apart():
    first, second = step(looks), step(looks)
    made, _ = together(first, second)
    first.collectives.unread = second.collectives.unread = True
    second.batches[0]["x"] = torch.ones(1, 4)
    again, _ = together(first, step(alone))
    assert again.digest == made.digest


def test_an_update_that_is_made_again_alone_waits_for_nobody():
    brought = torch.ones(2)
    with Collectives().of_update(world_size=1):
        distributed.all_reduce(brought)
    again = Collectives().of_update(world_size=2)
    with pytest.raises(NanstopError, match="needs the other processes"), again:
        distributed.all_reduce(brought)
