"""Trials within a budget: each set of atoms is run once, and graded against the float32
reference.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from nanstop.errors import NanstopError, ShortOfMemoryError
from nanstop.numerics.host_memory import lacks_memory
from nanstop.records import Atom, Outcome, Reference, Trial
from nanstop.records.line_forms import are_forms

Atoms = tuple[Atom, ...]
RunTrial = Callable[[Atoms, int | None], Trial]
RunOn = Callable[[Atoms], Trial]

FAILED, BENT, AGREES = 0, 1, 2
"""Grades of a trial: not finite; finite but away from the reference;
finite and in agreement with it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """``seconds`` are counted by ``clock``. A trial that has begun is not interrupted."""

    trials: int = 48
    seconds: float = 120.0
    clock: Callable[[], float] = time.monotonic


class SpentError(Exception):
    """The budget does not allow another trial."""


@dataclass(slots=True)
class Bench:
    """Runs each trial once, within the budget, and grades it against the reference.

    ``anew``: how the failing micro-batch is run once more; as in any trial where it is None.
    """

    run_trial: RunTrial
    reference: Reference
    budget: Budget
    baseline: Trial
    anew: RunOn | None = None
    start: float = 0.0
    done: dict[tuple[frozenset[Atom], int | None], Trial] = field(default_factory=dict)
    num_anew: int = 0

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
        key = frozenset(atoms), micro
        if key not in self.done:
            self._require_budget()
            self.done[key] = self._attempt(atoms, micro, lambda: self.run_trial(atoms, micro))
        return self.done[key]

    def _require_budget(self) -> None:
        spent = len(self.done) + self.num_anew > self.budget.trials
        if spent or self.seconds >= self.budget.seconds:
            raise SpentError

    def run_anew(self, atoms: Atoms) -> Trial:
        """Run the failing micro-batch once more, whatever is known of these atoms; and again where
        memory was too short: what is left of it lies in fewer pieces then.
        """
        self._require_budget()
        self.num_anew += 1
        run = self.anew or (lambda given: self.run_trial(given, None))
        first = self._attempt(atoms, None, lambda: run(atoms))
        return first if first.outcome != "oom" else self._attempt(atoms, None, lambda: run(atoms))

    def run_on(self, atoms: Atoms, lasts: RunOn) -> Trial:
        """Return the updates that follow under a cure, as one trial."""
        return self._attempt(atoms, None, lambda: lasts(atoms))

    def run_all(self, wanted: Sequence[tuple[Atoms, int | None]]) -> tuple[Trial, ...]:
        """Return as many of the wanted trials, in order, as the budget allows."""
        trials: list[Trial] = []
        with suppress(SpentError):
            trials.extend(self.run(atoms, micro) for atoms, micro in wanted)
        return tuple(trials)

    def _attempt(self, atoms: Atoms, micro: int | None, run: Callable[[], Trial]) -> Trial:
        before = self.budget.clock()
        try:
            return run()
        except Exception as error:  # a trial that cannot be run is an outcome like any other
            short = isinstance(error, ShortOfMemoryError) or lacks_memory(error)
            outcome: Outcome = "oom" if short else "crash"
            if isinstance(error, NanstopError) and not short:  # the remedy's own word for it
                outcome = "not_applicable"
            return Trial(
                atoms=atoms,
                outcome=outcome,
                micro=self.baseline.micro if micro is None else micro,
                seconds=self.budget.clock() - before,
                message=f"{type(error).__name__}: {error}",
            )

    def grade(self, trial: Trial) -> int:
        if trial.outcome != "pass" or trial.causal is False:
            return FAILED
        is_wider = self.reference.dtype != "float32" or self.reference.without_casts
        agrees = self.distance(trial) <= 1.0
        if self.reference.outcome != "pass" or (is_wider and trial.rows_unchanged is not None):
            # Next to a pole float64 has other roundings than a form; where it has not, that counts.
            agrees = bool(trial.rows_unchanged) or (agrees and are_forms(trial.atoms))
        return AGREES if agrees else BENT

    def distance(self, trial: Trial) -> float:
        """How far ``trial`` is from the reference, in tolerances;
        inf where that was not measured.
        """
        if trial.loss_gap is None or trial.grad_cosine is None:
            return math.inf
        return max(
            _in_units(abs(trial.loss_gap), self.reference.loss_tolerance),
            _in_units(1.0 - trial.grad_cosine, self.reference.cosine_tolerance),
            _in_units(trial.grad_gap or 0.0, self.reference.grad_tolerance),
        )

    def holds(self, trial: Trial) -> bool:
        """Whether a trial of a further micro-batch confirms:
        it passes and, where measured, agrees.
        """
        if self.reference.outcome != "pass" or math.isinf(self.distance(trial)):
            return trial.outcome == "pass" and trial.causal is not False
        return self.grade(trial) == AGREES


def _in_units(gap: float, tolerance: float) -> float:
    """``gap`` in multiples of ``tolerance``; a tolerance of 0 asks for equality.
    NaN is infinitely far.
    """
    if math.isnan(gap):
        return math.inf
    if gap <= 0.0:
        return 0.0
    return gap / tolerance if tolerance > 0.0 else math.inf
