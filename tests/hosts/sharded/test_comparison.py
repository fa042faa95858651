"""What copies side by side say of their difference, as records."""

from dataclasses import replace

import pytest

from nanstop.hosts.sharded.alike.comparison import parted
from nanstop.hosts.sharded.alike.copies import Copy, Told

EQUAL = Copy(
    number=2,
    step=2,
    names=("a", "b"),
    exchanged=(True, True),
    weights=(11, 12),
    arrived=(21, 22),
    consumed=(31, 32),
    states=(("exp_avg of a", 41),),
    options=(("lr", 0.1), ("betas", 0.9), ("betas", 0.99)),
    num_updates=2,
)
NOW = replace(EQUAL, number=3, step=3, weights=(13, 14), num_updates=3)


def facts(*weights, before=EQUAL, now=NOW):
    """What ranks with these checksums of `b` come to."""
    told = [Told(copy=replace(now, weights=(13, one)), before=before) for one in weights]
    return parted(told)


def test_copies_that_are_alike_are_no_finding():
    assert facts(14, 14, 14) is None


@pytest.mark.parametrize(
    ("weights", "ranks"),
    [
        ((14, 15), (1,)),
        ((14, 14, 15, 14), (2,)),
        ((15, 14, 14, 14), (0,)),
        ((14, 15, 16, 17), (1, 2, 3)),
        ((14, 15, 15, 14), (1, 2)),
    ],
)
def test_the_ranks_that_have_another_copy_than_most(weights, ranks):
    assert facts(*weights).ranks == ranks


def test_what_was_the_same_in_the_update_that_parted_them():
    found = facts(14, 15)
    assert (found.weight, found.step, found.last_equal, found.is_that_update) == ("b", 3, 2, True)
    assert (found.arrived_equal, found.consumed_equal, found.num_updates) == (True, True, (1, 1))
    assert (found.option, found.state) == ("", "")


def test_an_update_later_than_that_is_said_to_be():
    later = replace(NOW, number=8, step=8, consumed=(31, None))
    found = facts(14, 15, now=later)
    assert (found.is_that_update, found.last_equal, found.consumed_equal) == (False, 2, None)


def test_updates_of_gradients_that_were_not_exchanged():
    found = facts(14, 15, now=replace(NOW, num_updates=5, num_local=2))
    assert (found.is_that_update, found.num_updates, found.num_local) == (False, (3, 3), 2)


def test_copies_that_never_were_alike():
    found = facts(14, 15, before=None)
    assert (found.last_equal, found.num_updates, found.is_that_update) == (None, (), False)


def test_gradients_options_and_state_that_differ():
    other = replace(
        EQUAL,
        consumed=(31, 39),
        states=(("exp_avg of a", 42),),
        options=(("lr", 0.1), ("betas", 0.9), ("betas", 0.95)),
    )
    one, two = Told(copy=NOW, before=EQUAL), Told(copy=replace(NOW, weights=(13, 9)), before=other)
    found = parted([one, two])
    assert (found.option, found.options) == ("betas", (0.99, 0.95))
    assert found.state == "exp_avg of a"
    assert (found.arrived_equal, found.consumed_equal) == (True, False)


def test_a_rank_that_has_come_to_no_update_says_nothing_of_gradients():
    idle = replace(EQUAL, consumed=(), states=(), options=())
    stood = replace(NOW, weights=(13, 9), num_updates=2)
    found = parted([Told(copy=NOW, before=EQUAL), Told(copy=stood, before=idle)])
    assert (found.consumed_equal, found.num_updates, found.option) == (None, (1, 0), "")


@pytest.mark.parametrize("arrived", [(21, 23), (0, 0), (None, None)])
def test_without_an_exchanged_gradient_in_common_nothing_is_said(arrived):
    one = replace(NOW, exchanged=(False, True), arrived=(21, arrived[0]))
    two = replace(NOW, exchanged=(False, True), arrived=(21, arrived[1]), weights=(13, 9))
    assert parted([Told(copy=one), Told(copy=two)]) is None
