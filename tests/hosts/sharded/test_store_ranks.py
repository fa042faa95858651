"""Ranks, here threads of one process, that agree through a store."""

import threading

import pytest
from torch.distributed import HashStore

from nanstop.decide.agreement import ONE_RANK, on_every_rank
from nanstop.errors import NanstopError
from nanstop.hosts.sharded.store_ranks import StoreRanks


def at_once(*work):
    """What each of some calls returns, or the message of its ``NanstopError``, made at once."""
    said = [None] * len(work)

    def run(at):
        try:
            said[at] = work[at]()
        except (NanstopError, ValueError) as error:
            said[at] = getattr(error, "message", str(error))

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return said


def pair(seconds=20.0, store=None):
    store = store or HashStore()
    return [StoreRanks(store, rank, 2, seconds=seconds) for rank in range(2)]


def test_each_hears_what_each_says():
    first, second = pair()
    for question in ("part", "conclusion", "redo"):
        answers = at_once(
            lambda q=question: first.gather(q, "a"), lambda q=question: second.gather(q, "b")
        )
        assert answers == [("a", "b"), ("a", "b")]


def test_one_that_does_not_come_leaves_the_others_alone():
    first, second = pair(seconds=0.2)
    with pytest.raises(NanstopError, match=r"rank 1 did not answer within 0\.2 s"):
        first.gather("part", "")
    with pytest.raises(NanstopError, match=r"rank 1 did not answer within 0\.2 s"):
        second.gather("part", "")  # too late: the others have gone on
    with pytest.raises(NanstopError, match="did not answer"):
        first.gather("redo", "")


def test_one_that_leaves_is_not_waited_for():
    first, second = pair(seconds=60.0)
    second.leave("rank 1 could not look at the failure")
    with pytest.raises(NanstopError, match="rank 1 could not look"):
        first.gather("part", "")


def test_ranks_at_different_places():
    first, second = pair()
    told = "the ranks are not at the same place: rank 0 is at `redo`, rank 1 is at `left`"
    answers = at_once(lambda: first.gather("redo", ""), lambda: second.gather("left", ""))
    assert answers == [told, told]


def test_a_store_that_is_gone():
    class Gone(HashStore):
        def set(self, *_):
            raise RuntimeError("connection reset")

    first, _ = pair(store=Gone())
    with pytest.raises(NanstopError, match="cannot reach each other"):
        first.gather("part", "")


def test_a_store_that_is_frozen(monkeypatch):
    monkeypatch.setattr("nanstop.hosts.sharded.board._MARGIN_SECONDS", 0.2)
    thawed = threading.Event()

    class Frozen(HashStore):
        def set(self, *_):
            thawed.wait(20)

        def compare_set(self, *_):
            thawed.wait(20)

    first, _ = pair(seconds=0.1, store=Frozen())
    with pytest.raises(NanstopError, match="does not answer"):
        first.gather("part", "")
    thawed.set()


def test_what_one_rank_raises_is_raised_by_all():
    first, second = pair()

    def fails():
        raise ValueError("no memory")

    answers = at_once(
        lambda: on_every_rank(first, "run", lambda: "done"),
        lambda: on_every_rank(second, "run", fails),
    )
    assert answers == ["rank 1: ValueError: no memory", "no memory"]
    answers = at_once(
        lambda: on_every_rank(first, "run", lambda: "done"),
        lambda: on_every_rank(second, "run", lambda: "too"),
    )
    assert answers == ["done", "too"]


def test_one_process_asks_nobody():
    assert ONE_RANK.gather("part", "mine") == ("mine",)
    assert on_every_rank(ONE_RANK, "run", lambda: "done") == "done"
