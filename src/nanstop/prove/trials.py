"""Trials of remedies on a failing step:
each is one undone run, held against the float32 reference of the same step.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from functools import cached_property, partial

from nanstop.errors import ShortOfMemoryError
from nanstop.localize.localize import fails_at, localize
from nanstop.prove.bad_samples import (
    atoms_for,
    changes_new_outputs_only,
    healthy_rows,
    is_causal,
    only,
)
from nanstop.prove.failing_step import FailingStep
from nanstop.prove.forms.evidence import (
    bends,
    is_better_computed,
    moves_loss,
    objection,
    unchanged_elsewhere,
    values_unchanged,
)
from nanstop.prove.forms.next_form import next_form
from nanstop.prove.forms.typed_code import typed_forms
from nanstop.prove.reference.agreement import agree
from nanstop.prove.reference.exact import ExactRuns
from nanstop.prove.reference.ladder import Ladder, Rung
from nanstop.prove.reference.region import RegionRuns
from nanstop.prove.reference.tolerances import Healthy, reference_of
from nanstop.prove.regions import around, is_within, with_module
from nanstop.records import (
    Atom,
    FailureKey,
    Finiteness,
    Localization,
    Outcome,
    Reference,
    Trial,
    op_name,
)
from nanstop.records.line_forms import NUMBERED, are_forms, are_guards
from nanstop.remedies.apply import applied
from nanstop.remedies.data import dropped_micros, rebatch
from nanstop.remedies.forward import FORMATS_CLASH
from nanstop.replay.batches import num_samples
from nanstop.replay.rerun import Attempt
from nanstop.replay.step import Batch, ModelView
from nanstop.rewrite.forms.form_code import FormCode

_MAX_OTHERS = 3


class Trials:
    """Runs trials of one failing step. Call inside ``failing.in_place()``.

    ``wider``: what the failing operation gives in a wider format; ``in_float64``: with all before
    it in that, which an exact run is not where tensors of the script's own are in a narrower one.
    ``weights``: those that it reads, where it reads nothing else.
    """

    def __init__(
        self,
        failing: FailingStep,
        key: FailureKey,
        *,
        wider: Finiteness = "unknown",
        in_float64: Finiteness = "unknown",
        weights: tuple[str, ...] = (),
    ) -> None:
        self._failing, self._weights = failing, weights
        self._wider: Finiteness = wider
        self._key = key
        self._ladder = Ladder(failing, key.module)
        has_value = in_float64 == "finite"
        self._exact = ExactRuns(failing, self._ladder, key.op or "", has_value=has_value)
        self._places: dict[frozenset[Atom], Localization] = {}

    def reference(self) -> Reference:
        """Return the exact run of the failing micro-batch, and how near to it a cure must come."""
        run = self._reference_run()
        healthy = Healthy(
            self._failing,
            self._exact,
            self._others,
            lambda: self._healthy_rows or (),
            # Each takes all gradients to the host and back where the model is run in parts.
            most=1 if self._ladder.rung is Rung.PARTS else _MAX_OTHERS,
        )
        return reference_of(run, _outcome(run, None, self._key), self._exact, healthy)

    def _reference_run(self) -> Attempt:
        try:
            return self._exact.of(self._failing.micro)
        except ShortOfMemoryError:
            self.step_down()
            return self._exact.of(self._failing.micro)

    def step_down(self) -> bool:
        """Hold what comes against less of the model; return whether that is less than before."""
        if isinstance(self._exact, RegionRuns):
            return False
        if self._ladder.rung < Rung.REGION:
            self._ladder.step_down()
        if self._ladder.rung is Rung.PARTS:
            self._exact = ExactRuns(self._failing, self._ladder, self._key.op or "")
        else:
            self._exact = RegionRuns(self._failing, self._ladder, self._wider)
        return True

    @property
    def scope(self) -> str:
        """What was run, and held against what of it in exact numbers."""
        return self._exact.scope or ("optimizer update" if self._failing.update else "micro-batch")

    def anew(self, atoms: tuple[Atom, ...]) -> Trial:
        """Run the failing micro-batch once more as the host would: what is drawn and chosen
        is this run's own, and so it is not held against float32.
        """
        return self.trial(atoms, anew=True)

    def trial(
        self, atoms: tuple[Atom, ...], micro: int | None = None, *, anew: bool = False
    ) -> Trial:
        """Run the failing micro-batch (or another one of the window) under ``atoms``."""
        micro = self._failing.micro if micro is None else micro
        mine = atoms_for(self._failing, atoms, micro) if micro in self._failing.micros else atoms
        if micro in dropped_micros(mine):
            return self._without_micro(atoms, micro)
        under = partial(applied, self._view, atoms)
        own = self._failing.step.batches[micro]
        batch = rebatch(own, mine, micro=micro)
        if batch is own and not anew:
            run = self._exact.attempt(micro, under=under)
        else:
            run = self._failing.attempt(micro, batch=batch, under=under)
        given = (self._failing, self._exact, atoms, run, self._weights)
        against = "" if anew else objection(*given)
        if against:
            return Trial(atoms=atoms, outcome="not_applicable", micro=micro, message=against)
        key = self._key_of(atoms, micro, run, anew=anew) if run.failed else None
        judged = not (run.failed or anew)
        gaps = (self._exact.gaps(micro, run, under) if judged else None) or (None, None, None)
        return Trial(
            atoms=atoms,
            outcome=_outcome(run, key, self._key),
            micro=micro,
            key=key,
            loss=run.loss,
            loss_gap=gaps[0],
            grad_cosine=gaps[1],
            grad_gap=gaps[2],
            causal=is_causal(self._failing, atoms, micro) if judged else None,
            rows_unchanged=self._rows_unchanged(atoms, micro, run) if judged else None,
            seconds=run.seconds,
            peak_bytes=self._exact.peak_of(run),
            message=_said(run, self._places.get(frozenset(atoms))),
        )

    def extend(self, trial: Trial) -> tuple[Atom, ...] | None:
        """Return a larger set worth trying after ``trial`` failed elsewhere or passed with other
        numbers, or None.

        An op that met mixed formats wants an outer autocast; a failure in another module wants an
        island there, and one at another line, under a form, a form there. Islands that bend, or
        whose own numbers do not fit what reads them, want one around them.
        """
        held = trial.atoms
        root = self._view.root
        if trial.outcome == "pass":
            return around(held, root) if trial.causal is not False else None
        if are_forms(held):
            return next_form(held, self._places.get(frozenset(held)), trial.message)
        if FORMATS_CLASH.search(trial.message) and not _has(held, "outer_autocast"):
            return (*held, Atom(remedy="outer_autocast", value=self._failing.half_format))
        if trial.key is None:
            return None
        return around(held, root) if is_within(held, trial.key) else with_module(held, trial.key)

    @property
    def _view(self) -> ModelView:
        return self._failing.step.view

    def _without_micro(self, atoms: tuple[Atom, ...], micro: int) -> Trial:
        """Return what is left of the window without a micro-batch:
        it passes where the others do, each run by itself.
        """
        others = self._others[:_MAX_OTHERS]
        if not others:
            said = "it is the whole window: nothing would be left to update with"
            return Trial(atoms=atoms, outcome="not_applicable", micro=micro, message=said)
        runs = [self._failing.attempt(other, under=nullcontext) for other in others]
        failed = [place for place, run in zip(others, runs, strict=True) if run.failed]
        return Trial(
            atoms=atoms,
            outcome="other_failure" if failed else "pass",
            micro=micro,
            rows_unchanged=None if self._healthy_rows is None else not self._healthy_rows,
            seconds=sum(run.seconds for run in runs),
            message=f"micro-batch {failed[0]} fails without it" if failed else "",
        )

    def typed(self, codes: Iterable[FormCode]) -> tuple[Atom, ...] | None:
        """Return the forms of a cure that can be typed: see ``typed_forms``."""
        return typed_forms(self._failing, self._exact, codes)

    @cached_property
    def _others(self) -> tuple[int, ...]:
        """The micro-batches of the window that do not fail."""
        places = range(len(self._failing.step.batches))
        return tuple(micro for micro in places if micro not in self._failing.micros)

    def _key_of(
        self, atoms: tuple[Atom, ...], micro: int, run: Attempt, *, anew: bool
    ) -> FailureKey | None:
        """Return what failed. Of the step as it is, that is known; of a run in turn, only whether
        it fails counts.
        """
        if run.error is not None:
            return FailureKey(kind="exception", phase="forward", op=type(run.error).__name__)
        if anew:
            return None
        if not atoms and micro == self._failing.micro:
            return self._key
        step, update, phase = self._failing.step, self._failing.update, self._failing.phase
        with applied(self._view, atoms):
            # Forms are of a line, and ask where the step fails next.
            is_known = not are_forms(atoms) and fails_at(
                step, micro, self._key, update=update, phase=phase
            )
            if is_known:
                return self._key
            place = localize(step, micro, update=update, phase=phase)
        if place is not None:
            self._places[frozenset(atoms)] = place
        return place.key if place else None

    @cached_property
    def _healthy_rows(self) -> tuple[int, ...] | None:
        return healthy_rows(self._failing)

    def _rows_unchanged(self, atoms: tuple[Atom, ...], micro: int, run: Attempt) -> bool | None:
        """Return whether healthy samples keep loss and gradient; None where float32 can judge: not
        other roundings of a form, nor what leaves a sample out.
        """
        leaves_out = _has(atoms, "drop_sample")
        passes = not self._exact.of(micro).failed
        by_rows = leaves_out or (are_forms(atoms) and bool(self._healthy_rows))
        if micro != self._failing.micro:
            return None
        if passes and not (by_rows and self._exact.is_wider):
            return is_better_computed(self._failing, self._exact, atoms, run) or None
        is_unjudged = are_guards(atoms) and self._exact.misses_value
        if is_unjudged or moves_loss(self._failing, self._exact, atoms, run):
            return False
        if self._failing.update:
            return agree(self._exact.attempt(micro, without_update=True, under=nullcontext), run)
        if not self._healthy_rows:
            return self._unchanged_elsewhere(atoms, run)
        own = self._failing.step.batches[micro]
        only_healthy = only(own, self._healthy_rows)
        rest = self._failing.attempt(micro, batch=only_healthy, under=nullcontext)
        if leaves_out:
            return agree(rest, run)
        share = len(self._healthy_rows) / (num_samples(own) or 1)
        if passes and bends(self._exact, micro, run, rest, share):
            return False
        return self._is_unchanged(atoms, micro, only_healthy)

    def _is_unchanged(
        self, atoms: tuple[Atom, ...], micro: int, batch: Batch | None = None
    ) -> bool:
        """Return whether a cure leaves a healthy batch as it is, but for outputs that it makes."""
        under = partial(applied, self._view, atoms)
        plain, cured = self._exact.with_and_without(micro, under, batch)
        if agree(plain, cured):
            return True
        if are_forms(atoms):
            return self._exact.is_same_function(micro, under, batch)
        given = self._failing.step.batches[micro] if batch is None else batch
        return changes_new_outputs_only(
            self._failing, atoms, given, under=under, plain=plain, cured=cured
        )

    def _unchanged_elsewhere(self, atoms: tuple[Atom, ...], run: Attempt) -> bool | None:
        """Return what is known of a cure where no sample of the failing micro-batch is healthy: by
        another one of the window, by the values that guards leave alone, or by the window before.
        Guards under which nothing is learned, as of what is 0 in each step, leave nothing to judge.
        """
        if self._others and self._healthy_rows is not None:
            return self._is_unchanged(atoms, self._others[0])
        teaches = run.grads is None or any(bool(grad.any()) for grad in run.grads.values())
        unchanged = values_unchanged(self._failing, atoms) if teaches else None
        if unchanged is None and are_forms(atoms):
            under = partial(applied, self._view, atoms)
            unchanged = unchanged_elsewhere(self._failing, self._exact, under)
        # It passed, and so did another number, with the same loss and gradients.
        is_any = all(atom.remedy in NUMBERED for atom in atoms)
        return is_any or None if unchanged is None else unchanged


def _outcome(run: Attempt, key: FailureKey | None, failure: FailureKey) -> Outcome:
    if isinstance(run.error, ShortOfMemoryError):
        return "oom"
    if run.error is not None:
        return "same_failure" if failure.kind == "exception" else "crash"
    if not run.failed:
        return "pass"
    return "same_failure" if key is None or key.same_as(failure) else "other_failure"


def _has(atoms: tuple[Atom, ...], remedy: str) -> bool:
    return any(atom.remedy == remedy for atom in atoms)


def _said(run: Attempt, place: Localization | None) -> str:
    first_line, _, _ = str(run.error).partition("\n")
    if run.error is not None:
        return f"{type(run.error).__name__}: {first_line}"
    event = place.first_bad if place is not None and run.failed else None
    if event is not None and event.source is not None:
        return f"`{op_name(event.op)}` at {event.source.short}"
    if run.strayed and not run.failed:
        return f"draws other numbers from {run.strayed} on: compared without dropout"
    return ""
