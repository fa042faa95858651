"""The search of a bisect: exact, cheap and honest, for scripted trials of every kind."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanstop.commands.bisect.search import bisect

FORTY = tuple(f"key{number}" for number in range(40))


class Trials:
    """Trials that end as ``judgement(keys, attempt)`` says, one list for each batch."""

    def __init__(self, judgement):
        self.judgement, self.batches = judgement, []

    def __call__(self, requests):
        self.batches.append([(one.keys, one.attempt) for one in requests])
        return [self.judgement(one.keys, one.attempt) for one in requests]

    @property
    def asked(self):
        return list(itertools.chain.from_iterable(self.batches))


def fails_with(*interactions):
    sets = [frozenset(one) for one in interactions]
    return Trials(lambda keys, _: "fails" if any(needed <= keys for needed in sets) else "passes")


def test_every_interaction_of_three_among_forty_takes_at_most_thirty_trials():
    for needed in itertools.combinations(FORTY, 3):
        trials = fails_with(needed)
        found = bisect(FORTY, trials)
        assert (found.status, found.minimal, found.flaky) == ("found", needed, ())
        assert len(found.sufficient_fix) == 1
        assert found.sufficient_fix[0] in needed
        assert found.num_trials == len(trials.asked) <= 30


@given(st.integers(1, 60), st.integers(1, 5), st.data())
def test_one_interaction_is_found_in_the_promised_number_of_trials(count, width, data):
    keys = FORTY[:count] if count <= 40 else tuple(f"k{n}" for n in range(count))
    needed = data.draw(st.frozensets(st.sampled_from(keys), min_size=1, max_size=5))
    found = bisect(keys, fails_with(needed), width=width)
    assert set(found.minimal) == needed
    assert found.status == "found"
    if width == 1:
        k = len(needed)
        assert found.num_trials <= k * math.ceil(math.log2(count + 1)) + 2 * k + 5


@given(
    st.lists(st.frozensets(st.sampled_from(FORTY[:14]), min_size=1), min_size=1, max_size=4),
    st.integers(1, 4),
)
def test_both_answers_are_minimal_where_several_interactions_fail(hidden, width):
    keys = FORTY[:14]
    found = bisect(keys, fails_with(*hidden), width=width)
    smallest = [one for one in hidden if not any(other < one for other in hidden)]
    assert found.status == "found"
    assert frozenset(found.minimal) in smallest
    fix = set(found.sufficient_fix)
    assert all(one & fix for one in hidden)
    assert not any(all(one & (fix - {key}) for one in hidden) for key in fix)


@given(st.integers(1, 7), st.integers(1, 3), st.data())
@settings(max_examples=150)
def test_whatever_the_trials_say_each_answer_was_seen_and_so_was_it_without_each_member(
    count, width, data
):
    keys = FORTY[:count]
    judgements = {frozenset(keys): "fails", frozenset(): "passes"}
    words = st.sampled_from(["fails", "passes", "unresolved"])

    def judgement(taken, _):
        if taken not in judgements:
            judgements[taken] = data.draw(words)
        return judgements[taken]

    trials = Trials(judgement)
    found = bisect(keys, trials, width=width)
    seen = {taken for taken, _ in trials.asked}
    minimal, fix = frozenset(found.minimal), frozenset(found.sufficient_fix)
    assert found.status == "found"
    assert judgements[minimal] == "fails"
    assert judgements[frozenset(keys) - fix] == "passes"
    for key in minimal:
        assert minimal - {key} in seen
        assert judgements[minimal - {key}] != "fails"
    for key in fix:
        assert frozenset(keys) - (fix - {key}) in seen
        assert judgements[frozenset(keys) - (fix - {key})] != "passes"


def test_no_trial_is_run_a_third_time_and_only_answers_a_second_time():
    trials = fails_with({"key3", "key9"})
    found = bisect(FORTY, trials)
    repeated = [keys for keys, attempt in trials.asked if attempt == 1]
    assert repeated == [frozenset(found.minimal), frozenset(FORTY) - set(found.sufficient_fix)]
    assert len(set(trials.asked)) == len(trials.asked)
    assert max(attempt for _, attempt in trials.asked) == 1


def test_a_key_that_another_needs_is_no_part_of_the_answer_unless_the_answer_needs_it():
    def judgement(keys, _):
        if "lora_r" in keys and "use_peft" not in keys:
            return "unresolved"
        return "fails" if {"bf16", cause} <= keys else "passes"

    keys = ("lora_r", "bf16", "lr", "use_peft", "beta")
    cause = "lr"
    found = bisect(keys, Trials(judgement))
    assert (found.minimal, found.inseparable) == (("bf16", "lr"), ())
    cause = "lora_r"
    found = bisect(keys, Trials(judgement))
    assert found.minimal == ("lora_r", "bf16", "use_peft")
    assert found.inseparable == ("use_peft",)
    assert found.sufficient_fix == ("lora_r",)


def test_keys_that_are_valid_only_with_each_other_leave_the_answer_together():
    def judgement(keys, _):
        if len({"bf16", "fp16"} & keys) == 1:
            return "unresolved"
        return "fails" if "lr" in keys else "passes"

    for keys in itertools.permutations(("lr", "bf16", "fp16", "beta")):
        found = bisect(keys, Trials(judgement))
        assert (found.minimal, found.sufficient_fix) == (("lr",), ("lr",))


def test_a_batch_is_as_wide_as_asked_and_the_search_takes_fewer_of_them():
    narrow, wide = fails_with({"key7", "key30"}), fails_with({"key7", "key30"})
    assert bisect(FORTY, narrow).minimal == bisect(FORTY, wide, width=4).minimal
    assert max(map(len, wide.batches)) == 4
    assert len(wide.batches) < 0.7 * len(narrow.batches)


@pytest.mark.parametrize(
    ("always", "status", "num_trials"),
    [("passes", "bad_passes", 3), ("fails", "good_fails", 3), ("unresolved", "bad_passes", 3)],
)
def test_ends_that_do_not_differ_are_run_twice_and_said(always, status, num_trials):
    found = bisect(FORTY, Trials(lambda *_: always))
    assert (found.status, found.minimal, found.num_trials) == (status, (), num_trials)


@pytest.mark.parametrize("width", [1, 4])
def test_ends_that_are_swapped_are_said_to_be(width):
    trials = Trials(lambda keys, _: "passes" if keys else "fails")
    found = bisect(FORTY, trials, width=width)
    assert (found.status, found.minimal, found.num_trials) == ("swapped", (), 4)


def test_a_good_end_that_ends_otherwise_the_second_time_is_flaky_not_failing():
    def judgement(keys, attempt):
        return "fails" if keys or attempt == 0 else "passes"

    found = bisect(FORTY, Trials(judgement))
    assert (found.status, found.flaky) == ("flaky", ((),))


def test_an_answer_that_does_not_hold_a_second_time_is_reported_as_flaky():
    def judgement(keys, attempt):
        return "fails" if {"key3", "key9"} <= keys and not attempt else "passes"

    found = bisect(FORTY, Trials(judgement))
    assert found.status == "flaky"
    assert ("key3", "key9") in found.flaky


def test_a_contradiction_is_run_again_and_a_flaky_trial_decides_nothing():
    """The lone wrong answer: without the second run twenty keys would be taken for needed."""
    first_half = frozenset(FORTY[:20])

    def judgement(keys, attempt):
        if keys == first_half and attempt == 0:
            return "fails"
        return "fails" if "key30" in keys else "passes"

    found = bisect(FORTY, trials := Trials(judgement))
    assert found.flaky == (FORTY[:20],)
    twice = {keys for keys, attempt in trials.asked if attempt == 1}
    assert {frozenset(), frozenset(FORTY), frozenset({"key30"})} <= twice
    assert found.minimal == ("key30",)
    assert found.status == "found"


@pytest.mark.parametrize("limit", range(1, 23))
def test_a_limit_ends_the_search_with_the_smallest_set_seen_to_fail(limit):
    trials = fails_with({"key3", "key9", "key30"})
    found = bisect(FORTY, trials, limit=limit)
    assert found.num_trials == len(trials.asked) <= limit
    assert found.status == "limit"
    smallest = min((keys for keys, _ in trials.asked if {"key3", "key9", "key30"} <= keys), key=len)
    assert set(found.minimal) == smallest
    full = bisect(FORTY, again := fails_with({"key3", "key9", "key30"}))
    assert again.asked[:limit] == trials.asked
    assert full.status == "found"


def test_one_key():
    found = bisect(("only",), trials := fails_with({"only"}))
    assert (found.minimal, found.sufficient_fix, found.status) == (("only",), ("only",), "found")
    assert found.num_trials == len(trials.asked) == 4
