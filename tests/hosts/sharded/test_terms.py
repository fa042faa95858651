"""Whether ranks are watched under the same policy, on a board that some of them write on."""

from nanstop.errors import NanstopError
from nanstop.hosts.sharded.alike.terms import Terms


class Shared:
    """A board in this process."""

    def __init__(self):
        self.texts, self.counts, self.num_asked = {}, {}, 0

    def agrees(self, place, mine):
        self.num_asked += 1
        return self.texts.setdefault(place, mine) == mine

    def add(self, counter, num=1):
        self.num_asked += 1
        self.counts[counter] = self.counts.get(counter, 0) + num
        return (self.counts[counter],)


class Gone:
    def agrees(self, place, mine):
        raise NanstopError("the ranks cannot reach each other")


def after(said):
    """What each rank knows after six backwards; ``said``: what it says at each of them."""
    board = Shared()
    ranks = [Terms(board, len(said)) for _ in said]
    for number in range(6):
        for terms, words in zip(ranks, said, strict=True):
            terms.compare(words[number])
    return [one.are_alike for one in ranks], board.num_asked / len(said)


def test_ranks_of_one_policy_know_so():
    assert after([["a"] * 6] * 3) == ([True] * 3, 3)


def test_ranks_of_other_policies_do_not():
    alike, _ = after([["a"] * 6, ["b"] * 6])
    assert alike == [False, False]


def test_a_rank_that_is_not_watched_says_nothing():
    alike, _ = after([["a"] * 6, [None] * 6])
    assert alike == [False, False]


def test_a_rank_that_begins_later_makes_no_difference_between_them():
    alike, _ = after([["a"] * 6, [None, *["a"] * 5]])
    assert alike == [False, False]


def test_a_store_that_is_gone():
    terms = Terms(Gone(), 2)
    for _ in range(6):
        terms.compare("a")
    assert not terms.are_alike
