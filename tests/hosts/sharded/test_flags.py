"""One byte that several ranks have alike; here each is a thread with a store of its own."""

import pytest
from torch.distributed import HashStore

from hosts.sharded.test_store_ranks import at_once, pair
from nanstop.errors import NanstopError
from nanstop.hosts.sharded.flags import FailureFlags


def both(store, seconds):
    def connected(rank):
        return lambda: FailureFlags(store, rank, 2, seconds=seconds)

    return at_once(connected(0), connected(1))


@pytest.fixture
def flags():
    store = HashStore()
    made = at_once(
        *(lambda rank=rank: FailureFlags(store, rank, 2, seconds=20.0) for rank in (0, 1))
    )
    yield made
    for one in made:
        one.close()


@pytest.mark.parametrize("said", [(False, False), (True, False), (False, True), (True, True)])
def test_any_rank_is_heard_by_all(flags, said):
    for _ in range(3):
        asked = [
            lambda f=f, mine=mine: f.any(mine=mine) for f, mine in zip(flags, said, strict=True)
        ]
        assert at_once(*asked) == [any(said)] * 2


def test_a_rank_that_leaves_is_missed_at_once(flags):
    first, second = flags
    second.close()
    with pytest.raises(NanstopError, match="did not learn of each other's failures"):
        first.any(mine=False)
    with pytest.raises(NanstopError, match="did not learn of each other's failures"):
        first.any(mine=False)
    with pytest.raises(NanstopError, match="this rank has left"):
        second.any(mine=False)


def test_a_rank_that_does_not_come_is_waited_for_so_long():
    store = HashStore()
    first, second = both(store, seconds=1.0)
    with pytest.raises(NanstopError, match="did not learn of each other's failures"):
        first.any(mine=True)
    second.close()


def test_ranks_that_are_not_all_watched_have_none():
    watched, _ = pair(seconds=0.2)
    assert watched.flags() is None
    with pytest.raises(NanstopError, match="rank 1 did not answer"):
        watched.gather("part", "")


def test_ranks_that_are_all_watched_have_them():
    first, second = at_once(*(one.flags for one in pair()))
    assert at_once(lambda: first.any(mine=True), lambda: second.any(mine=False)) == [True, True]
    first.close()
    second.close()
