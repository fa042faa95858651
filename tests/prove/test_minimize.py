"""Minimality: for every monotone question the answer is minimal and cheap;
for every other one it is verified.
"""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from nanstop.prove.minimize import minimize


class Counted:
    def __init__(self, passes):
        self.passes, self.asked = passes, []

    def __call__(self, subset):
        self.asked.append(subset)
        return self.passes(frozenset(subset))


@st.composite
def monotone(draw):
    """(atoms, predicate): a set passes when it holds all of at least one of some hidden sets."""
    atoms = tuple(range(draw(st.integers(1, 24))))
    hidden = draw(
        st.lists(st.frozensets(st.sampled_from(atoms), min_size=1), min_size=1, max_size=4)
    )
    return atoms, hidden


@given(monotone())
def test_minimal_when_supersets_pass(case):
    atoms, hidden = case
    ask = Counted(lambda subset: any(needed <= subset for needed in hidden))
    found = minimize(atoms, ask)
    assert frozenset(found) in hidden
    assert not any(other < frozenset(found) for other in hidden)
    assert found == tuple(sorted(found))


@given(monotone())
def test_each_subset_is_asked_once(case):
    atoms, hidden = case
    ask = Counted(lambda subset: any(needed <= subset for needed in hidden))
    minimize(atoms, ask)
    assert len(ask.asked) == len(set(map(frozenset, ask.asked)))


@settings(deadline=None)
@given(st.integers(2, 256), st.data())
def test_number_of_questions(count, data):
    needed = data.draw(st.frozensets(st.integers(0, count - 1), min_size=1, max_size=4))
    ask = Counted(lambda subset: needed <= subset)
    assert frozenset(minimize(range(count), ask)) == needed
    k = len(needed)
    assert len(ask.asked) <= 2 * k * (math.log2(count / k) + 1) + 2 * k + 2


@given(st.integers(1, 7), st.data())
def test_verified_by_ablation_for_any_predicate(count, data):
    atoms = tuple(range(count))
    answers: dict[frozenset, bool] = {frozenset(atoms): True}

    def passes(subset):
        if subset not in answers:
            answers[subset] = data.draw(st.booleans())
        return answers[subset]

    found = frozenset(minimize(atoms, Counted(passes)))
    assert passes(found)
    assert not any(passes(found - {atom}) for atom in found)


def test_earlier_atoms_are_preferred():
    assert minimize("abcd", lambda subset: "b" in subset or "c" in subset) == ("b",)


def test_nothing_needed():
    assert minimize("ab", lambda subset: True) == ()
    assert minimize((), lambda subset: False) == ()
