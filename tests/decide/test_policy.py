"""Decisions of the policy, by example and by property."""

import copy
import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanstop.decide.policy import RAISED, REWRITTEN, Policy, decide
from nanstop.decide.remembered import Losses, PolicyState, begun, completed
from nanstop.errors import NanstopError
from nanstop.records import Atom, FailureKey, Proof
from nanstop.records.remedies import REMEDIES, safety_of

ISLAND = Atom(remedy="island", target="model.layers.2.norm", value="float32")
CLIP = Atom(remedy="clip", value="1.0")
DROP = Atom(remedy="drop_sample", target="0:3")
DROP_MICRO = Atom(remedy="drop_micro", target="0")
KEY = FailureKey(kind="+inf", phase="forward", op="aten.mul.Tensor", module="model.layers.2.norm")


def proof(*atoms, verdict="proven"):
    return Proof(incident="0000", verdict=verdict, minimal=atoms, safety=safety_of(atoms))


def act(policy, state=None, *, found=None, key=KEY, at_step=7, **facts):
    return decide(policy, state or PolicyState(), key=key, proof=found, at_step=at_step, **facts)


def test_first_failure_is_redone_under_the_proven_remedy():
    action, state = act(Policy(), found=proof(ISLAND))
    assert (action.kind, action.atoms, action.proof) == ("redo", (ISLAND,), "0000")
    assert state.adopted == ()


def test_second_failure_of_the_same_kind_adopts_without_a_new_proof():
    _, state = act(Policy(), found=proof(ISLAND))
    other_layer = dataclasses.replace(KEY, module="model.layers.9.norm", kind="nan")
    action, state = act(Policy(), state, key=other_layer)
    assert (action.kind, action.atoms) == ("adopt", (ISLAND,))
    assert state.adopted == (ISLAND,)
    assert state.occurrence(KEY).count == 2


def test_failure_at_the_first_step_adopts_at_once():
    action, state = act(Policy(), found=proof(ISLAND), at_step=0)
    assert action.kind == "adopt"
    assert state.adopted == (ISLAND,)


def test_a_failure_of_another_kind_is_counted_apart():
    _, state = act(Policy(), found=proof(ISLAND))
    backward = dataclasses.replace(KEY, phase="backward")
    action, state = act(Policy(), state, key=backward, found=proof(ISLAND))
    assert action.kind == "redo"
    assert [one.count for one in state.occurrences] == [1, 1]


@pytest.mark.parametrize("verdict", ["plausible", "none_found"])
def test_what_is_not_proven_is_not_applied(verdict):
    action, _ = act(Policy(), found=proof(ISLAND, verdict=verdict))
    assert (action.kind, action.atoms) == ("skip", ())


def test_a_remedy_that_changes_training_waits_for_allow():
    action, _ = act(Policy(), found=proof(CLIP))
    assert action.kind == "skip"
    assert 'waits to be allowed: "clip"' in action.reason
    action, _ = act(Policy(allow=("clip",)), found=proof(CLIP))
    assert (action.kind, action.atoms) == ("redo", (CLIP,))


def test_atoms_that_change_training_only_together_need_all_their_names():
    together = dataclasses.replace(proof(ISLAND), safety="changes_training")
    assert act(Policy(), found=together)[0].kind == "skip"
    assert act(Policy(allow=("island",)), found=together)[0].kind == "redo"


def test_a_dropped_sample_is_never_kept_for_later_steps():
    policy = Policy(allow=("drop_sample",))
    action, state = act(policy, found=proof(DROP), at_step=0)
    assert action.kind == "quarantine"
    assert state.adopted == ()
    action, state = act(policy, state)
    assert action.kind == "skip"


def test_a_completed_update_ends_the_row_of_skips():
    policy = Policy(max_skips_in_a_row=1)
    _, state = act(policy)
    assert act(policy, state)[0].kind == "stop"
    assert act(policy, completed(state))[0].kind == "skip"


def test_broken_weights_are_rolled_back_or_stop_the_run():
    action, state = act(Policy(), found=proof(ISLAND), weights_broken=True)
    assert action.kind == "rollback"
    assert state.adopted == (ISLAND,)
    assert act(Policy(), weights_broken=True)[0].kind == "stop"
    assert act(Policy(on_failure="skip"), weights_broken=True)[0].kind == "stop"


@pytest.mark.parametrize("on_failure", ["repair", "skip"])
def test_an_update_of_finite_gradients_is_not_left_out(on_failure):
    policy = Policy(on_failure=on_failure)
    action, state = act(policy, harmless=True)
    assert (action.kind, state.lost, state.skips_in_a_row) == ("continue", (), 0)
    assert act(policy, harmless=True, weights_broken=True)[0].kind == "stop"
    assert act(Policy(), found=proof(ISLAND), harmless=True)[0].kind == "redo"
    assert act(Policy(on_failure="stop"), harmless=True)[0].kind == "stop"


def test_stop_needs_no_veto_but_does_not_end_one_rank_of_many():
    assert act(Policy(on_failure="stop"), can_veto=False)[0].kind == "stop"
    assert act(Policy(on_failure="stop"), world_size=2)[0].kind == "observe"


def test_a_failing_evaluation_is_only_observed():
    key = dataclasses.replace(KEY, phase="evaluate")
    assert act(Policy(), key=key, found=proof(ISLAND))[0].kind == "observe"


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"on_failure": "repiar"}, "unknown on_failure: `repiar`", "did you mean `repair`"),
        ({"on_fail": "stop"}, "unknown policy option: `on_fail`", "did you mean `on_failure`"),
        ({"allow": ("clipp",)}, "unknown remedy in allow: `clipp`", "did you mean `clip`"),
        ({"allow": "clipp"}, "unknown remedy in allow: `clipp`", "did you mean `clip`"),
        ({"max_skips_in_a_row": -1}, "max_skips_in_a_row must be a whole number", ""),
        ({"max_skips_in_a_row": True}, "max_skips_in_a_row must be a whole number", ""),
        ({"budget_seconds": float("nan")}, "budget_seconds must be a number", ""),
        ({"budget_trials": 0}, "budget_trials must be a whole number of at least 1", ""),
    ],
)
def test_a_wrong_option_is_named_with_the_nearest_right_one(options, message, hint):
    with pytest.raises(NanstopError, match=message) as caught:
        Policy(**options)
    assert caught.value.code == "NS001"
    assert hint in caught.value.hint


def test_a_policy_can_be_copied():
    policy = Policy(on_failure="skip", allow=("lr",))
    assert copy.deepcopy(policy) == pickle.loads(pickle.dumps(policy)) == policy
    assert dataclasses.replace(policy, allow=()).on_failure == "skip"


remedies = st.sampled_from(sorted(REMEDIES))
atom_sets = st.lists(
    st.builds(Atom, remedy=remedies, target=st.sampled_from(["", "a"])), max_size=3
)
policies = st.builds(
    Policy,
    on_failure=st.sampled_from(["repair", "skip", "stop", "observe"]),
    allow=st.lists(remedies, max_size=3).map(tuple),
    max_skips_in_a_row=st.integers(0, 4),
)
keys = st.builds(
    FailureKey,
    kind=st.sampled_from(["nan", "+inf", "exception"]),
    phase=st.sampled_from(["forward", "backward", "optimizer", "evaluate"]),
    module=st.sampled_from(["layers.0.mlp", "layers.1.mlp", "head"]),
)
failures = st.fixed_dictionaries(
    {
        "key": keys,
        "proof": st.none()
        | st.builds(
            lambda atoms, verdict: proof(*atoms, verdict=verdict),
            atom_sets,
            st.sampled_from(["proven", "isolated", "plausible", "none_found"]),
        ),
        "at_step": st.integers(0, 3),
        "world_size": st.sampled_from([1, 1, 1, 2]),
        "can_veto": st.sampled_from([True, True, True, False]),
        "weights_broken": st.sampled_from([False, False, True]),
    }
)
ACTS = {"redo", "adopt", "skip", "rollback", "quarantine", "stop"}


def replay(policy, run):
    """The decisions of a whole run: pairs of (failure, action, state before, state after)."""
    state = PolicyState()
    for failure in run:
        action, after = decide(policy, state, **failure)
        yield failure, action, state, after
        state = after


@given(policies, st.lists(failures, max_size=12))
def test_what_changes_training_is_applied_only_where_allowed(policy, run):
    for _, action, _, after in replay(policy, run):
        for atom in (*action.atoms, *after.adopted):
            assert safety_of((atom,)) == "safe" or atom.remedy in policy.allow


@given(policies, st.lists(failures, max_size=12))
def test_observing_never_acts(policy, run):
    for failure, action, _, _ in replay(policy, run):
        if policy.on_failure == "observe" or failure["world_size"] > 1:
            assert action.kind == "observe"
            assert action.atoms == ()
        if not failure["can_veto"]:
            assert action.kind in {"observe", "stop"}


@given(policies, st.lists(failures, max_size=12))
def test_counts_only_grow_and_adopted_remedies_stay(policy, run):
    for failure, _, before, after in replay(policy, run):
        grown = {one.folded: one.count for one in after.occurrences}
        assert sum(grown.values()) == sum(one.count for one in before.occurrences) + 1
        assert grown[failure["key"].folded] == before.occurrence(failure["key"]).count + 1
        assert after.adopted[: len(before.adopted)] == before.adopted


@given(policies, st.lists(failures, max_size=12))
def test_skips_in_a_row_are_bounded(policy, run):
    skips = 0
    for _, action, _, _ in replay(policy, run):
        skips = (
            skips + 1 if action.kind == "skip" else 0 if action.kind in ACTS - {"stop"} else skips
        )
        assert skips <= policy.max_skips_in_a_row
        if action.kind == "stop":
            break


@given(st.integers(0, 5))
def test_the_run_stops_after_that_many_skips(limit):
    unproven = {"key": KEY, "proof": None, "at_step": 5}
    kinds = [
        action.kind
        for _, action, _, _ in replay(Policy(max_skips_in_a_row=limit), [unproven] * (limit + 1))
    ]
    assert kinds == ["skip"] * limit + ["stop"]


def test_what_does_not_come_back_is_run_again_as_it_is():
    key = FailureKey(kind="nan", phase="forward")
    nothing = Proof(incident="0000", verdict="none_found", minimal=())
    state = PolicyState(lost=(Losses(optimizer=0, num=2, in_a_row=2),))
    action, after = decide(Policy(), state, key=key, proof=nothing, at_step=3, replays_clean=True)
    assert (action.kind, action.atoms, after.losses(0).in_a_row) == ("redo", (), 0)
    action, _ = decide(
        Policy(on_failure="skip"), state, key=key, proof=nothing, at_step=3, replays_clean=True
    )
    assert action.kind == "skip"


def test_gradients_that_a_script_writes_to_are_not_made_anew():
    written = {"at_step": 3, "no_redo": REWRITTEN}
    action, state = act(Policy(), found=proof(ISLAND), **written)
    assert (action.kind, action.atoms, state.adopted) == ("adopt", (ISLAND,), (ISLAND,))
    assert state.losses(0).num == 1  # this update is left out all the same
    dropped = proof(DROP, verdict="isolated")
    action, state = act(Policy(allow=("drop_sample",)), found=dropped, **written)
    assert (action.kind, state.losses(0).num) == ("skip", 1)
    assert "those made anew would lack" in action.reason
    assert "waits to be allowed" in act(Policy(), found=dropped, **written)[0].reason
    assert act(Policy(), found=None, replays_clean=True, **written)[0].kind == "skip"


def test_of_an_exception_of_the_script_nothing_is_left_out():
    raised = {"at_step": 3, "no_redo": RAISED, "is_past": True}
    action, state = act(Policy(), found=proof(ISLAND), **raised)
    assert (action.kind, action.atoms, state.adopted) == ("adopt", (ISLAND,), (ISLAND,))
    assert action.reason == f"{RAISED}; from now on the proven remedy is in force"
    action, state = act(Policy(), found=proof(verdict="none_found"), **raised)
    assert (action.kind, action.atoms, state.lost) == ("continue", (), ())
    assert action.reason == f"{RAISED}; no remedy was found"
    assert act(Policy(on_failure="skip"), found=None, **raised)[0].reason == RAISED


def test_an_update_that_was_held_back_is_made_anew_or_left_out():
    kept = {"at_step": 0, "update_pending": True}
    action, state = act(Policy(), found=proof(ISLAND), **kept)
    assert (action.kind, action.atoms, state.adopted) == ("rollback", (ISLAND,), (ISLAND,))
    assert act(Policy(), found=proof(CLIP), **kept)[0].kind == "skip"
    assert act(Policy(on_failure="skip"), found=proof(ISLAND), **kept)[0].kind == "skip"
    assert act(Policy(on_failure="stop"), found=proof(ISLAND), **kept)[0].kind == "stop"
    assert act(Policy(on_failure="observe"), found=proof(ISLAND), **kept)[0].kind == "observe"


def lost(policy, pattern, *, optimizer=1):
    """What is decided where an update is lost (True) or applied (False), one after another."""
    state, kinds = PolicyState(), []
    for step, fails in enumerate(pattern):
        if not fails:
            state = completed(state)
            continue
        action, state = act(policy, state, at_step=step, optimizer=optimizer)
        kinds.append(action.kind)
    return kinds


def test_a_tenth_of_an_optimizers_updates_is_too_much():
    every_eleventh = [step % 11 == 0 for step in range(2000)]
    assert set(lost(Policy(), every_eleventh)) == {"skip"}
    every_ninth = [step % 9 == 0 for step in range(2000)]
    assert lost(Policy(), every_ninth)[:34] == ["skip"] * 32 + ["stop"] * 2


def test_one_optimizer_that_loses_all_does_not_hide_behind_another():
    state, kinds = PolicyState(), []
    for step in range(40):
        action, state = act(Policy(), state, at_step=step, optimizer=1)
        kinds.append(action.kind)
        state = completed(state)  # the other one's
    assert kinds == ["skip"] * 32 + ["stop"] * 8


def test_losses_of_several_optimizers_are_not_added_up():
    state = PolicyState()
    for step in range(400):
        if step % 12 == 0:
            for optimizer in range(8):
                action, state = act(Policy(), state, at_step=step, optimizer=optimizer)
                assert action.kind == "skip"
        state = completed(state)


def test_an_exception_is_the_scripts_own_after_a_few():
    key = dataclasses.replace(KEY, kind="exception")
    state, kinds = PolicyState(), []
    for step in range(5):
        action, state = act(Policy(), state, key=key, at_step=step)
        kinds.append(action.kind)
    assert kinds == ["skip"] * 3 + ["stop"] * 2


def test_another_training_starts_with_nothing_lost():
    _, state = act(Policy(max_skips_in_a_row=1), found=proof(CLIP))
    again = begun(state)
    assert again.lost == ()
    assert again.occurrences == state.occurrences


def test_an_optimizer_that_takes_turns_with_another_ends_no_row_of_its_skips():
    state, kinds = PolicyState(), []
    for step in range(4):
        action, state = act(Policy(max_skips_in_a_row=3), state, at_step=step, optimizer=1)
        kinds.append(action.kind)
        state = completed(state, 2)
    assert kinds == ["skip"] * 3 + ["stop"]
    assert state.losses(1) == Losses(optimizer=1, num=3, in_a_row=3)
    assert completed(state, 1).losses(1) == Losses(optimizer=1, num=3)


@pytest.mark.parametrize(("atom", "what"), [(DROP, "sample"), (DROP_MICRO, "micro-batch")])
def test_what_is_left_out_is_called_what_it_is(atom, what):
    policy = Policy(allow=("drop_sample", "drop_micro"))
    action, _ = act(policy, found=proof(atom, verdict="isolated"))
    assert action.reason == f"the {what} is left out of this step"
