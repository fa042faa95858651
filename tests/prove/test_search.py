"""Verdicts over scripted trials:
what is proven, what only plausible, what is preferred, and what ends a search.
"""

from dataclasses import replace

import pytest
import torch

from nanstop.prove.bench import Budget
from nanstop.prove.search import prove
from nanstop.records import Atom, FailureKey, Reference, Trial
from nanstop.records.remedies import safety_of

KEY = FailureKey(kind="+inf", phase="forward", op="aten.mul.Tensor", module="model.layers.0.norm")
BASELINE = Trial(atoms=(), outcome="same_failure", key=KEY, micro=2, seconds=1.0, peak_bytes=2**22)
REFERENCE = Reference(outcome="pass", loss=1.0, loss_tolerance=1e-3, cosine_tolerance=1e-3)
BROKEN = Reference(outcome="same_failure")
A, B, C = (Atom(remedy="island", target=name, value="float32") for name in "abc")
AUTOCAST = Atom(remedy="outer_autocast", value="float16")
BF16 = Atom(remedy="bf16")
DROP = Atom(remedy="drop_sample", target="2:0")
CLOSE = {"loss": 1.0, "loss_gap": 1e-5, "grad_cosine": 0.99999}
FAR = {"loss": 1.0, "loss_gap": 0.1, "grad_cosine": 0.9}


class Script:
    """A trial function: the outcome of each set of atoms is written down;
    anything else fails as before.
    """

    def __init__(self, outcomes, by_micro=None, seconds=1.5):
        self.outcomes = {frozenset(atoms): fields for atoms, fields in outcomes.items()}
        self.by_micro = by_micro or {}
        self.seconds = seconds
        self.calls = []

    def __call__(self, atoms, micro):
        self.calls.append((atoms, micro))
        fields = self.outcomes.get(frozenset(atoms), {"outcome": "same_failure", "key": KEY})
        if micro is not None:
            fields = self.by_micro.get(micro, fields)
        if isinstance(fields, BaseException):
            raise fields
        known = {"outcome": "pass", "micro": 2 if micro is None else micro} | fields
        return Trial(atoms=atoms, seconds=self.seconds, peak_bytes=2**23, **known)


def run(trial, candidates, *, reference=REFERENCE, **options):
    return prove(BASELINE, candidates, trial, reference=reference, safety_of=safety_of, **options)


def test_cost_is_not_told_of_a_device_without_memory_figures():
    quiet = replace(BASELINE, peak_bytes=None)
    proof = prove(quiet, [(A,)], Script({(A,): CLOSE}), reference=REFERENCE, safety_of=safety_of)
    assert (proof.verdict, proof.cost) == ("proven", "")


def test_proven():
    proof = run(Script({(A,): CLOSE}), [(A,)], confirm=(0, 1))
    assert (proof.verdict, proof.minimal, proof.safety) == ("proven", (A,), "safe")
    assert [trial.micro for trial in proof.passing] == [2, 0, 1, 2, 2, 2]
    assert [trial.outcome for trial in proof.ablations] == ["same_failure"] * 4
    assert proof.cost == "+50.0 % time, +4.0 MiB"
    assert proof.next_experiment == ""


def test_needless_atom_is_dropped():
    proof = run(Script({(A, B): CLOSE, (A,): CLOSE}), [(A, B)])
    assert proof.verdict == "proven"
    assert proof.minimal == (A,)


def test_what_only_adds_to_a_cure_that_holds_is_not_run():
    script = Script({(A,): CLOSE, (A, B): CLOSE, (C,): FAR, (B, C): CLOSE})
    proof = run(script, [(A,), (A, B), (C,), (B, C)])
    assert (proof.verdict, proof.minimal) == ("proven", (A,))
    tried = [set(atoms) for atoms, micro in script.calls]
    assert {A, B} not in tried
    assert {B, C} in tried  # it adds to one that is finite and bent


def test_every_atom_is_ablated():
    proof = run(Script({(A, B, AUTOCAST): CLOSE}), [(A, B, AUTOCAST)])
    assert proof.minimal == (A, B, AUTOCAST)
    assert [set(trial.atoms) for trial in proof.ablations] == [{B, AUTOCAST}, {A, AUTOCAST}, {A, B}]
    assert all(trial.outcome == "same_failure" for trial in proof.ablations)


def test_an_atom_needed_only_for_agreement_stays():
    proof = run(Script({(A, B): CLOSE, (A,): FAR}), [(A, B)])
    assert (proof.verdict, proof.minimal) == ("proven", (A, B))


def test_finite_is_not_fixed():
    proof = run(Script({(B,): FAR, (A,): CLOSE}), [(B,), (A,)])
    assert (proof.verdict, proof.minimal) == ("proven", (A,))
    (other,) = proof.alternatives
    assert (other.atoms, other.loss_gap, other.passed, other.runs) == ((B,), 0.1, 1, 1)


def test_bent_alone_is_plausible():
    proof = run(Script({(B,): FAR}), [(B,)])
    assert proof.verdict == "plausible"
    assert proof.next_experiment == "finite, but 100 times as far from float32 as is allowed"


def test_unmeasured_distance_is_plausible():
    proof = run(Script({(B,): {"loss": 1.0}}), [(B,)])
    assert proof.verdict == "plausible"
    assert "not measured" in proof.next_experiment


def test_broken_causality_is_no_cure():
    proof = run(Script({(A,): CLOSE | {"causal": False}}), [(A,)])
    assert proof.verdict == "none_found"


def test_safe_before_changes_training():
    exact = {"loss_gap": 0.0, "grad_cosine": 1.0}
    proof = run(Script({(BF16,): exact, (A, AUTOCAST): CLOSE}), [(BF16,), (A, AUTOCAST)])
    assert proof.minimal == (A, AUTOCAST)
    assert [(other.atoms, other.safety) for other in proof.alternatives] == [
        ((BF16,), "changes_training")
    ]


def test_smallest_then_nearest():
    nearer = CLOSE | {"loss_gap": 1e-7, "grad_cosine": 0.9999999}
    outcomes = {(A,): CLOSE, (B,): nearer, (C, AUTOCAST): nearer}
    assert run(Script(outcomes), [(C, AUTOCAST), (A,), (B,)]).minimal == (B,)


def test_another_kernel_in_the_same_format_before_a_wider_format():
    kernel = Atom(remedy="sdpa_kernel", value="cudnn")
    eager, line = Atom(remedy="attention", value="eager"), Atom(remedy="fp32_line", target="a.py:1")
    near = CLOSE | {"loss_gap": 1e-7}
    trial = Script({(A,): near, (line,): near, (eager,): CLOSE, (kernel,): CLOSE})
    proof = run(trial, [(A,), (line,), (eager,), (kernel,)])
    assert (proof.verdict, proof.minimal) == ("proven", (kernel,))
    proof = run(trial, [(A,), (line,), (eager,)])
    assert proof.minimal == (eager,)


def test_unsafe_is_proven_when_nothing_else_is():
    proof = run(Script({(BF16,): CLOSE, (A,): FAR}), [(A,), (BF16,)])
    assert (proof.verdict, proof.minimal, proof.safety) == ("proven", (BF16,), "changes_training")


def test_confirmation_fails():
    script = Script({(A,): CLOSE}, by_micro={1: {"outcome": "same_failure", "key": KEY}})
    proof = run(script, [(A,)], confirm=(0, 1))
    assert proof.verdict == "plausible"
    assert proof.next_experiment.startswith("it fails on 1 of 3 micro-batches")
    assert [trial.micro for trial in proof.passing] == [2, 0, 2, 2, 2]


def test_agreeing_before_bent_where_neither_is_proven():
    script = Script({(B,): FAR, (A, AUTOCAST): CLOSE}, by_micro={0: {"outcome": "other_failure"}})
    proof = run(script, [(B,), (A, AUTOCAST)], confirm=(0,))
    assert (proof.verdict, proof.minimal) == ("plausible", (A, AUTOCAST))


def test_pursuit_follows_the_failure():
    moved = FailureKey(kind="+inf", phase="forward", op="aten.mul.Tensor", module="b")
    steps = {(A,): (A, B), (A, B): (A, B, C)}
    script = Script(
        {
            (A,): {"outcome": "other_failure", "key": moved},
            (A, B): {"outcome": "other_failure", "key": moved},
            (A, B, C): CLOSE,
            (B, C): CLOSE,
        }
    )
    proof = run(script, [(A,)], extend=lambda trial: steps.get(trial.atoms))
    assert (proof.verdict, proof.minimal) == ("proven", (B, C))


def test_pursuit_ends():
    def extend(trial):
        return (*trial.atoms, Atom(remedy="island", target=str(len(trial.atoms)), value="float32"))

    script = Script({})
    proof = run(script, [(A,)], extend=extend)
    assert proof.verdict == "none_found"
    assert len(script.calls) == 17
    circle = Script({})
    run(circle, [(A,)], extend=lambda trial: (B,) if trial.atoms == (A,) else (A,))
    assert [atoms for atoms, _ in circle.calls] == [(A,), (B,)]


def test_rows_unchanged_stands_for_the_reference():
    script = Script({(A,): {"rows_unchanged": True}, (B,): {"rows_unchanged": False, "loss": 1.0}})
    assert run(script, [(A,)], reference=BROKEN).verdict == "proven"
    plausible = run(script, [(B,)], reference=BROKEN)
    assert plausible.verdict == "plausible"
    assert plausible.next_experiment.startswith("float32 fails too")


def test_none_found_names_what_was_tried():
    moved = FailureKey(kind="nan", phase="backward", op="aten.bmm.default", module="model.layers.1")
    script = Script({(A,): {"outcome": "other_failure", "key": moved}})
    proof = run(script, [(B,), (A,)])
    assert (proof.verdict, proof.minimal, proof.passing) == ("none_found", (), ())
    assert [trial.atoms for trial in proof.tried] == [(B,), (A,)]
    assert "moved to `aten.bmm.default` in `model.layers.1`" in proof.next_experiment
    assert run(Script({}), [(B,)]).next_experiment.startswith("float32 passes")
    assert run(Script({}), [(B,)], reference=BROKEN).next_experiment.startswith("float32 fails too")


def test_not_reproduced():
    passing = Trial(atoms=(), outcome="pass")
    proof = prove(passing, [(A,)], Script({}), reference=REFERENCE, safety_of=safety_of)
    assert proof.verdict == "none_found"
    assert "does not always end alike" in proof.next_experiment
    assert proof.chance
    assert proof.tried == ()


@pytest.mark.parametrize(
    ("error", "outcome"), [(MemoryError("no room"), "oom"), (RuntimeError("dtype"), "crash")]
)
def test_a_trial_that_raises_is_an_outcome(error, outcome):
    proof = run(Script({(A,): error, (B,): CLOSE}), [(A,), (B,)])
    assert (proof.verdict, proof.minimal) == ("proven", (B,))
    first = proof.tried[0]
    assert (first.outcome, first.micro) == (outcome, 2)
    assert first.message == f"{type(error).__name__}: {error}"


def test_interrupt_propagates():
    with pytest.raises(KeyboardInterrupt, match="by hand"):
        run(Script({(A,): KeyboardInterrupt("by hand")}), [(A,)])


def test_trial_budget():
    proof = run(Script({(B,): CLOSE}), [(A,), (B,), (C,)], budget=Budget(trials=1))
    assert proof.verdict == "none_found"
    assert len(proof.tried) == 1
    assert proof.next_experiment.startswith("the budget ended with 2 candidates untried")


def test_budget_ends_before_confirmation():
    proof = run(Script({(A,): CLOSE}), [(A,)], confirm=(0, 1), budget=Budget(trials=2))
    assert (proof.verdict, proof.minimal) == ("plausible", (A,))
    assert "before the cure was confirmed" in proof.next_experiment


def test_clock_budget():
    clock = iter(range(100))
    proof = run(
        Script({(C,): CLOSE}),
        [(A,), (B,), (C,)],
        budget=Budget(seconds=4.0, clock=lambda: float(next(clock))),
    )
    assert proof.verdict == "none_found"
    assert 0 < len(proof.tried) < 3


def test_no_trial_is_run_twice():
    script = Script({(A, B): CLOSE})
    run(script, [(A, B), (B, A), (A,), (B,)], confirm=(0,))
    asked = [(frozenset(atoms), micro) for atoms, micro in script.calls]
    searched, in_turn = asked[:-6], asked[-6:]
    assert len(searched) == len(set(searched))
    assert in_turn == [(frozenset(), None), (frozenset((A, B)), None)] * 3


class Fickle(Script):
    """From the ``after``-th run of these atoms on, the outcome is another one."""

    def __init__(self, outcomes, atoms, *, after, then):
        super().__init__(outcomes)
        self.atoms, self.after, self.then = frozenset(atoms), after, then

    def __call__(self, atoms, micro):
        found = super().__call__(atoms, micro)
        times = sum(frozenset(asked) == self.atoms for asked, _ in self.calls)
        if frozenset(atoms) == self.atoms and times >= self.after:
            return replace(found, **self.then)
        return found


@pytest.mark.parametrize("after", [1, 3])
def test_a_step_that_passes_as_it_is_proves_nothing(after):
    trial = Fickle({(A,): CLOSE}, (), after=after, then={"outcome": "pass"} | CLOSE)
    proof = run(trial, [(A,)])
    assert (proof.verdict, proof.minimal, proof.chance) == ("none_found", (), True)
    assert "does not always end alike" in proof.next_experiment


def test_a_cure_that_fails_the_next_time_is_chance():
    trial = Fickle({(A,): CLOSE}, (A,), after=2, then={"outcome": "same_failure", "key": KEY})
    assert run(trial, [(A,)]).chance


def test_a_budget_that_ends_before_the_runs_in_turn_proves_nothing():
    proof = run(Script({(A,): CLOSE}), [(A,)], budget=Budget(trials=4))
    assert (proof.verdict, proof.minimal, proof.chance) == ("plausible", (A,), False)


def test_what_leaves_out_what_fails_is_isolated_and_a_cure_goes_before_it():
    trial = Script({(DROP,): CLOSE, (A,): CLOSE})
    alone = run(trial, [(DROP,)], isolates=lambda atoms: DROP in atoms)
    assert (alone.verdict, alone.minimal) == ("isolated", (DROP,))
    both = run(trial, [(DROP,), (A,)], isolates=lambda atoms: DROP in atoms)
    assert (both.verdict, both.minimal) == ("proven", (A,))


def test_a_cure_of_this_update_alone_is_not_proven():
    def lasts(atoms):
        return Trial(atoms=atoms, outcome="other_failure", message="the loss goes from 1 to 1e9")

    proof = run(Script({(A,): CLOSE}), [(A,)], lasts=lasts)
    assert proof.verdict == "plausible"
    assert proof.next_experiment.endswith("not what follows: the loss goes from 1 to 1e9")


def test_what_follows_counts_among_the_runs_of_another_cure():
    def lasts(atoms):
        return Trial(atoms=atoms, outcome="other_failure")

    proof = run(
        Script({(A,): CLOSE, (DROP,): CLOSE}),
        [(A,), (DROP,)],
        lasts=lasts,
        isolates=lambda atoms: DROP in atoms,
    )
    assert proof.minimal == (DROP,)
    (other,) = proof.alternatives
    assert (other.atoms, other.passed, other.runs) == ((A,), 1, 2)


def test_what_follows_is_run_under_the_best_cure_and_the_next_where_that_does_not_hold():
    asked = []

    def lasts(atoms):
        asked.append(atoms)
        return Trial(atoms=atoms, outcome="other_failure" if atoms == (A,) else "pass")

    trial = Script({(A,): CLOSE, (B,): CLOSE | {"grad_cosine": 0.9999}, (C,): FAR})
    proof = run(trial, [(C,), (B,), (A,)], lasts=lasts)
    assert (proof.verdict, proof.minimal) == ("proven", (B,))
    assert asked == [(A,), (B,)]
    asked.clear()
    assert run(trial, [(B,), (C,)], lasts=lasts).minimal == (B,)
    assert asked == [(B,)]


@pytest.mark.parametrize(("gap", "verdict"), [(0.9e-3, "proven"), (1.1e-3, "plausible")])
def test_one_parameters_gradient_must_agree_as_well(gap, verdict):
    near = replace(REFERENCE, grad_tolerance=1e-3)
    assert run(Script({(A,): CLOSE | {"grad_gap": gap}}), [(A,)], reference=near).verdict == verdict


@pytest.mark.parametrize(
    ("when", "times", "verdict"), [(2, 1, "proven"), (2, 2, "plausible"), (3, 2, "plausible")]
)
def test_memory_that_is_short_in_turn_is_no_chance(when, times, verdict):
    """``when``: the run in turn that has no room, ``times`` over."""
    runs = iter(range(100))

    def anew(atoms):
        if when <= next(runs) < when + times:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        return trial(atoms, None)

    trial = Script({(A,): CLOSE})
    proof = run(trial, [(A,)], anew=anew)
    assert (proof.verdict, proof.minimal, proof.chance) == (verdict, (A,), False)
    assert ("memory was short" in proof.next_experiment) == (verdict == "plausible")


def test_a_part_of_a_cure_that_has_no_room_is_not_shown_to_be_needed():
    oom = {"outcome": "oom"}
    proof = run(Script({(A, B): CLOSE, (A,): oom, (B,): oom}), [(A, B)])
    assert (proof.verdict, set(proof.minimal)) == ("plausible", {A, B})
    assert "memory was short" in proof.next_experiment
