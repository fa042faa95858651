"""The proof of one failing step:
baseline and reference, then the search over the candidates that the rules proposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from nanstop.decide.policy import DATA_REMEDIES, Policy, not_allowed
from nanstop.errors import ShortOfMemoryError
from nanstop.numerics.room import let_go
from nanstop.prove.bench import Budget
from nanstop.prove.failing_step import FailingStep
from nanstop.prove.search import prove
from nanstop.prove.trials import Trials
from nanstop.prove.updates_after import UpdatesAfter
from nanstop.records import Alternative, Atom, FailureKey, Finiteness, Proof, Trial
from nanstop.records.line_forms import FORMS, are_forms, typed_cure
from nanstop.records.remedies import safety_of
from nanstop.rewrite.forms.form_code import FormCode

_MAX_CONFIRMED = 3
_FOLLOWING_SHARE = 0.05
"""Share of the budget that the updates which follow under one cure may take."""


def prove_step(  # noqa: PLR0913 - called once, by name
    failing: FailingStep,
    key: FailureKey,
    candidates: tuple[tuple[Atom, ...], ...],
    *,
    policy: Policy,
    wider: Finiteness = "unknown",
    in_float64: Finiteness = "unknown",
    weights: tuple[str, ...] = (),
    tried: Callable[[Trial], None] = lambda _: None,
    codes: Callable[[Proof], Iterable[FormCode]] = lambda _: (),
    lines: tuple[tuple[Atom, ...], ...] = (),
) -> Proof:
    """Return the smallest cure among ``candidates``. Call inside ``failing.in_place()``.

    It is confirmed on the window's other failing micro-batches, on a healthy one and, where the
    window is one of training whose gradients the script leaves as they are, on the updates that
    follow. Everything tried is undone. ``wider``: what the failing operation gives in a wider
    format, ``in_float64``: with all before it in that; ``weights``: those that it reads, where it
    reads nothing else. ``tried``: told of each trial as it ends.
    ``codes``: what can be typed for the forms of a cure. ``lines``: those of the script's own that
    may be typed in float32 for the module that they are of.
    """
    trials = Trials(failing, key, wider=wider, in_float64=in_float64, weights=weights)
    after = UpdatesAfter(failing, seconds=_FOLLOWING_SHARE * policy.budget_seconds)
    others = [] if failing.update else [m for m in failing.micros if m != failing.micro]
    healthy = [m for m in range(len(failing.step.batches)) if m not in failing.micros][:1]
    goes_on = failing.update or (failing.step.rates and not failing.rewritten)

    def trial(atoms: tuple[Atom, ...], micro: int | None) -> Trial:
        ended = _freed(lambda: trials.trial(atoms, micro))
        tried(ended)
        return ended

    def searched(among: tuple[tuple[Atom, ...], ...] = candidates) -> Proof:
        return prove(
            _baseline(trials),
            among,
            trial,
            reference=trials.reference(),
            safety_of=safety_of,
            extend=trials.extend,
            confirm=(*others[:_MAX_CONFIRMED], *healthy),
            lasts=(lambda atoms: _freed(lambda: after.under(atoms))) if goes_on else None,
            anew=lambda atoms: _freed(lambda: trials.anew(atoms)),
            permitted=lambda atoms: not not_allowed(policy, atoms),
            isolates=lambda atoms: any(atom.remedy in DATA_REMEDIES for atom in atoms),
            budget=Budget(trials=policy.budget_trials, seconds=policy.budget_seconds),
        )

    def typed_of(found: Proof) -> tuple[Atom, ...] | None:
        return trials.typed(codes(found))

    proof = searched()
    while _lacked_room(proof) and trials.step_down():
        proof = searched()
    with suppress(ShortOfMemoryError):
        proof = _in_lines(_typed(proof, typed_of, searched), typed_of, searched, lines)
    return replace(proof, scope=trials.scope)


def _typed(
    proof: Proof,
    typed_of: Callable[[Proof], tuple[Atom, ...] | None],
    searched: Callable[[tuple[tuple[Atom, ...], ...]], Proof],
) -> Proof:
    """Return a proof with what is typed for the forms of its cure; that of another cure, which is
    proven as well, where for the first one nothing is.
    """
    if not any(atom.remedy in FORMS for atom in typed_cure(proof)):
        return proof
    typed = typed_of(proof)
    for other in () if typed or proof.verdict != "proven" else _alike(proof):
        again = searched((other,))
        known = typed_of(again) if again.verdict == "proven" else None
        if known:
            return replace(_beside(proof, again), typed=known)
    return replace(proof, typed=typed)


def _in_lines(
    proof: Proof,
    typed_of: Callable[[Proof], tuple[Atom, ...] | None],
    searched: Callable[[tuple[tuple[Atom, ...], ...]], Proof],
    lines: tuple[tuple[Atom, ...], ...],
) -> Proof:
    """Return a proof of modules in float32 with the lines that are typed for them, which are as
    good.
    """
    if not proof.minimal or any(atom.remedy != "island" for atom in proof.minimal):
        return proof
    for one in lines:
        again = searched((one,))
        known = typed_of(again) if again.verdict in (proof.verdict, "proven") else None
        if known:
            return replace(proof, typed=known, tried=(*proof.tried, *again.tried))
    return proof


def _alike(proof: Proof) -> Iterator[tuple[Atom, ...]]:
    """Yield the other cures of the same class that are forms of lines: what holds and can be typed
    is worth more than what holds.
    """
    for one in proof.alternatives:
        if are_forms(one.atoms) and one.safety == proof.safety and one.passed == one.runs:
            yield one.atoms


def _beside(proof: Proof, again: Proof) -> Proof:
    """Return the proof of another cure with the first one beside it."""
    passed = sum(one.outcome == "pass" for one in proof.passing)
    first = Alternative(
        atoms=proof.minimal, safety=proof.safety, passed=passed, runs=len(proof.passing)
    )
    others = (one for one in proof.alternatives if one.atoms != again.minimal)
    tried = (*proof.tried, *again.tried)
    return replace(again, alternatives=(first, *others), tried=tried)


def _lacked_room(proof: Proof) -> bool:
    """Return whether nothing passed, and something had no room to be held against float32 in."""
    outcomes = {trial.outcome for trial in proof.tried}
    return "oom" in outcomes and "pass" not in outcomes


def _baseline(trials: Trials) -> Trial:
    """Return the step as it is, run once more where memory was too short: what is left of it lies
    in fewer pieces then.
    """
    with suppress(ShortOfMemoryError):
        return _freed(lambda: trials.trial(()))
    return trials.trial(())


def _freed(run: Callable[[], Trial]) -> Trial:
    """Make a run; what one that memory was too short for had made is free before the next."""
    try:
        return run()
    except Exception as error:
        let_go(error)
        raise
