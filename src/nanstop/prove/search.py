"""Proof by trial: the smallest set of atoms that cures a failing micro-batch and leaves its mathematics alone.

Nothing here knows what an atom does. A cure is proven when the micro-batch fails without it, passes with it, fails
again when any of its atoms is taken away, agrees with a float32 run of the same micro-batch, and holds on further
micro-batches. Finite alone is not fixed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from nanstop.errors import NanstopError
from nanstop.prove.minimize import minimize
from nanstop.records import Alternative, Atom, Outcome, Proof, Reference, Safety, Trial, Verdict

Atoms = tuple[Atom, ...]
RunTrial = Callable[[Atoms, int | None], Trial]
Extend = Callable[[Trial], Atoms | None]

PURSUIT_LIMIT = 16
"""How often one candidate may grow by what ``extend`` proposes."""

FAILED, BENT, AGREES = 0, 1, 2
"""Grades of a trial: not finite; finite but away from the reference; finite and in agreement with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """``seconds`` are counted by ``clock``. A trial that has begun is not interrupted."""

    trials: int = 48
    seconds: float = 120.0
    clock: Callable[[], float] = time.monotonic


class _SpentError(Exception):
    """The budget does not allow another trial."""


@dataclass(slots=True)
class _Bench:
    """Runs each trial once, within the budget, and grades it against the reference."""

    run_trial: RunTrial
    reference: Reference
    budget: Budget
    baseline: Trial
    start: float = 0.0
    done: dict[tuple[frozenset[Atom], int | None], Trial] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.start = self.budget.clock()
        self.done[frozenset(), None] = self.baseline

    @property
    def seconds(self) -> float:
        return self.budget.clock() - self.start

    @property
    def tried(self) -> tuple[Trial, ...]:
        return tuple(self.done.values())[1:]

    def run(self, atoms: Atoms, micro: int | None = None) -> Trial:
        """Return a trial of these atoms, run at most once.

        Errors: ``_SpentError`` where the budget of trials or seconds is spent.
        """
        key = frozenset(atoms), micro
        if key not in self.done:
            if len(self.done) > self.budget.trials or self.seconds >= self.budget.seconds:
                raise _SpentError
            self.done[key] = self._attempt(atoms, micro)
        return self.done[key]

    def run_all(self, wanted: Sequence[tuple[Atoms, int | None]]) -> tuple[Trial, ...]:
        """Return as many of the wanted trials, in order, as the budget allows."""
        trials: list[Trial] = []
        with suppress(_SpentError):
            trials.extend(self.run(atoms, micro) for atoms, micro in wanted)
        return tuple(trials)

    def _attempt(self, atoms: Atoms, micro: int | None) -> Trial:
        before = self.budget.clock()
        try:
            return self.run_trial(atoms, micro)
        except Exception as error:  # a trial that cannot be run is an outcome like any other
            outcome: Outcome = "oom" if isinstance(error, MemoryError) else "crash"
            if isinstance(error, NanstopError):  # the remedy's own word for it
                outcome = "not_applicable"
            return Trial(
                atoms=atoms,
                outcome=outcome,
                micro=self.baseline.micro if micro is None else micro,
                seconds=self.budget.clock() - before,
                message=f"{type(error).__name__}: {error}",
            )

    def grade(self, trial: Trial) -> int:
        """Return FAILED, BENT (passes, and is not what float32 computes) or AGREES."""
        if trial.outcome != "pass" or trial.causal is False:
            return FAILED
        if self.reference.outcome != "pass":
            return AGREES if trial.rows_unchanged else BENT
        return AGREES if self.distance(trial) <= 1.0 else BENT

    def distance(self, trial: Trial) -> float:
        """How far ``trial`` is from the reference, in tolerances; inf where that was not measured."""
        if trial.loss_gap is None or trial.grad_cosine is None:
            return math.inf
        return max(
            _in_units(abs(trial.loss_gap), self.reference.loss_tolerance),
            _in_units(1.0 - trial.grad_cosine, self.reference.cosine_tolerance),
        )

    def holds(self, trial: Trial) -> bool:
        """Whether a trial of a further micro-batch confirms: it passes and, where measured, agrees."""
        if self.reference.outcome != "pass" or math.isinf(self.distance(trial)):
            return trial.outcome == "pass" and trial.causal is not False
        return self.grade(trial) == AGREES


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cure:
    """A set that passes: its trial, its ablations, and how many micro-batches of those to confirm on it passed."""

    trial: Trial
    ablations: tuple[Trial, ...]
    safety: Safety
    grade: int
    distance: float
    passed: int
    runs: int
    complete: bool

    @property
    def atoms(self) -> Atoms:
        return self.trial.atoms

    @property
    def proven(self) -> bool:
        """Whether every ablation fails, float32 agrees, and every confirming run passed."""
        return self.complete and self.grade == AGREES and self.passed == self.runs

    def order(self) -> tuple[bool, bool, bool, int, float]:
        """Proven before not, safe before what changes training, agreeing before bent, then small, then near float32."""
        return (
            not self.proven,
            self.safety != "safe",
            self.grade != AGREES,
            len(self.atoms),
            self.distance,
        )


def prove(  # noqa: PLR0913 - called once, by name
    incident_id: str,
    baseline: Trial,
    candidates: Sequence[Atoms],
    trial: RunTrial,
    *,
    reference: Reference,
    safety_of: Callable[[Atoms], Safety],
    extend: Extend = lambda _: None,
    confirm: Sequence[int] = (),
    budget: Budget | None = None,
) -> Proof:
    """Return the best cure among ``candidates``, with everything that was tried.

    ``baseline`` is the failing micro-batch without atoms. ``trial(atoms, micro)`` runs micro-batch ``micro`` (None: the
    failing one) under ``atoms``; what it raises, except KeyboardInterrupt, becomes an outcome. When a candidate does
    not pass, ``extend(its trial)`` may name the next larger set. ``confirm``: further micro-batches on which a cure
    must hold. Where ``reference`` fails too, ``Trial.rows_unchanged`` takes the place of agreement.
    """
    bench = _Bench(trial, reference, budget or Budget(), baseline)
    cures: dict[frozenset[Atom], _Cure] = {}
    untried: tuple[Atoms, ...] = ()
    for place, candidate in enumerate(candidates if baseline.outcome != "pass" else ()):
        grow = extend if not any(cure.proven for cure in cures.values()) else lambda _: None
        try:
            found = _cure(bench, candidate, grow, safety_of, confirm)
        except _SpentError:
            untried = tuple(candidates[place:])
            break
        if found is not None:
            cures.setdefault(frozenset(found.atoms), found)
    ranked = sorted(cures.values(), key=_Cure.order)
    return _proof(incident_id, bench, ranked, untried)


def _cure(
    bench: _Bench,
    candidate: Atoms,
    extend: Extend,
    safety_of: Callable[[Atoms], Safety],
    confirm: Sequence[int],
) -> _Cure | None:
    """Return the minimal part of ``candidate``, grown as far as needed, or None. Raises _SpentError before anything passed."""
    passing = _pursue(bench, candidate, extend)
    if passing is None:
        return None
    grade = bench.grade(passing)
    complete = True
    try:
        atoms = minimize(passing.atoms, lambda part: bench.grade(bench.run(part)) >= grade)
        passing = bench.run(atoms)
    except _SpentError:
        complete = False
    without = [tuple(a for a in passing.atoms if a != atom) for atom in passing.atoms]
    ablations = bench.run_all([(atoms, None) for atoms in without])
    confirmed = bench.run_all([(passing.atoms, micro) for micro in confirm])
    complete = complete and len(ablations) + len(confirmed) == len(without) + len(confirm)
    return _Cure(
        trial=passing,
        ablations=ablations,
        safety=safety_of(passing.atoms),
        grade=bench.grade(passing),
        distance=bench.distance(passing),
        passed=1 + sum(bench.holds(run) for run in confirmed),
        runs=1 + len(confirmed),
        complete=complete,
    )


def _pursue(bench: _Bench, candidate: Atoms, extend: Extend) -> Trial | None:
    """Return the first passing trial of ``candidate`` or of what ``extend`` makes of it; None if there is none."""
    seen = {frozenset(candidate)}
    current = bench.run(candidate)
    for _ in range(PURSUIT_LIMIT):
        if bench.grade(current) > FAILED:
            return current
        larger = extend(current)
        if larger is None or frozenset(larger) in seen:
            return None
        seen.add(frozenset(larger))
        current = bench.run(larger)
    return current if bench.grade(current) > FAILED else None


def _proof(
    incident_id: str, bench: _Bench, ranked: Sequence[_Cure], untried: Sequence[Atoms]
) -> Proof:
    best = ranked[0] if ranked else None
    verdict: Verdict = "none_found" if best is None else "proven" if best.proven else "plausible"
    proof = Proof(
        incident=incident_id,
        verdict=verdict,
        minimal=(),
        baseline=bench.baseline,
        tried=bench.tried,
        reference=bench.reference,
        next_experiment=_next_experiment(bench, best, untried),
        seconds=bench.seconds,
    )
    if best is None:
        return proof
    return replace(
        proof,
        minimal=best.atoms,
        passing=tuple(
            run
            for (atoms, _), run in bench.done.items()
            if atoms == frozenset(best.atoms) and bench.grade(run) > FAILED
        ),
        ablations=best.ablations,
        alternatives=tuple(_alternative(cure) for cure in ranked[1:]),
        cost=_cost(bench.baseline, best.trial),
        safety=best.safety,
    )


def _alternative(cure: _Cure) -> Alternative:
    return Alternative(
        atoms=cure.atoms,
        safety=cure.safety,
        passed=cure.passed,
        runs=cure.runs,
        loss_gap=cure.trial.loss_gap,
        grad_cosine=cure.trial.grad_cosine,
    )


def _in_units(gap: float, tolerance: float) -> float:
    """``gap`` in multiples of ``tolerance``; a tolerance of 0 asks for equality. NaN is infinitely far."""
    if math.isnan(gap):
        return math.inf
    if gap <= 0.0:
        return 0.0
    return gap / tolerance if tolerance > 0.0 else math.inf


def _cost(baseline: Trial, cured: Trial) -> str:
    """Time and memory of the cured micro-batch against the failing one, on a device that reports its memory.

    On a CPU half formats are slower than float32, which says nothing of the device that a run is meant for.
    """
    if not (baseline.peak_bytes and cured.peak_bytes and baseline.seconds > 0.0):
        return ""
    time = f"{100.0 * (cured.seconds / baseline.seconds - 1.0):+.1f} % time"
    return f"{time}, {(cured.peak_bytes - baseline.peak_bytes) / 2**20:+.1f} MiB"


def _next_experiment(bench: _Bench, best: _Cure | None, untried: Sequence[Atoms]) -> str:
    """What would settle what this proof could not; empty where nothing is open."""
    if bench.baseline.outcome == "pass":
        return (
            "the micro-batch passes when run again: replay the whole window, then look for a race"
        )
    if best is not None:
        return "" if best.proven else _open_question(bench, best)
    if untried:
        return (
            f"the budget ended with {len(untried)} candidates untried: allow more trials or seconds"
        )
    if bench.reference.outcome != "pass":
        return (
            "float32 fails too: no format cures this; look at the batch, the mask and the weights"
        )
    moved = [run for run in bench.tried if run.outcome == "other_failure" and run.key is not None]
    if moved and moved[-1].key is not None:
        key = moved[-1].key
        return (
            f"the failure moved to `{key.op}` in `{key.module}`: take that into the float32 region"
        )
    return "float32 passes: keep a wider region in float32, or train in bfloat16"


def _open_question(bench: _Bench, cure: _Cure) -> str:
    if not cure.complete:
        return "the budget ended before the cure was confirmed: allow more trials or seconds"
    if cure.passed < cure.runs:
        missed = cure.runs - cure.passed
        return f"it fails on {missed} of {cure.runs} micro-batches: investigate one of those"
    if bench.reference.outcome != "pass":
        return (
            "float32 fails too: compare loss and gradient of the healthy rows with and without it"
        )
    if math.isinf(cure.distance):
        return "finite, but its distance to float32 was not measured"
    return f"finite, but {cure.distance:.3g} tolerances away from float32"
