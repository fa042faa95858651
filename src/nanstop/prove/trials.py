"""Trials of remedies on a failing step:
each is one undone run, held against the float32 reference of the same step.
"""

from __future__ import annotations

import math
import re
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial

import torch

from nanstop.diagnose.evidence.reading import counted
from nanstop.localize.localize import localize
from nanstop.numerics.tensors import HALF, format_name
from nanstop.prove.agreement import agree, cosine, largest_gap, loss_gap
from nanstop.prove.bad_samples import atoms_for, bad_rows, without
from nanstop.prove.failing_step import FailingStep
from nanstop.records import Atom, FailureKey, Outcome, Reference, Trial
from nanstop.remedies.apply import applied
from nanstop.remedies.data import dropped_micros, rebatch
from nanstop.remedies.precision import reference
from nanstop.replay.batches import num_samples
from nanstop.replay.conditions import Under
from nanstop.replay.rerun import Attempt
from nanstop.replay.step import Batch, ModelView

_HEALTHY_FACTOR = 3.0
_LOSS_SPACINGS, _COSINE_SPACINGS, _GRADIENT_SPACINGS = 8.0, 10.0, 64.0
"""Spacings of the coarsest format that a cure may be off where no healthy run says how far is
usual.
"""

_FOLLOWING = 4
"""Updates after the failing one that a cure of an update must stand."""
_RUNS_AWAY = 10.0
"""A loss has run away that exceeds the first by this many times its size, or by this much."""
_MAX_OTHERS = 3
_DTYPE_CLASH = re.compile(r"same dtype|expected scalar type|dtype mismatch|must match.*dtype", re.I)
_MAX_ISLANDS = 8


class Trials:
    """Runs trials of one failing step. Call inside ``failing.in_place()``."""

    def __init__(self, failing: FailingStep, key: FailureKey) -> None:
        self._failing = failing
        self._key = key
        self._references: dict[int, Attempt] = {}

    def reference(self) -> Reference:
        """Return the float32 run of the failing micro-batch, and how near to it a cure must come.

        The tolerances are three times the distances of something healthy of the same window to its
        own float32 run; where there is none, they follow from the format's spacing.
        """
        run = self._reference(self._failing.micro)
        eps = _coarsest_eps(self._failing)
        found = self._healthy_gaps()
        source, loss, cosines, gradient = found or (
            "the spacing of the format: nothing in this window is healthy",
            _LOSS_SPACINGS * eps / _HEALTHY_FACTOR,
            _COSINE_SPACINGS * eps / _HEALTHY_FACTOR,
            _GRADIENT_SPACINGS * eps / _HEALTHY_FACTOR,
        )
        return Reference(
            outcome=_outcome(run, None, self._key),
            loss=run.loss,
            loss_tolerance=max(_HEALTHY_FACTOR * loss, eps),
            cosine_tolerance=max(_HEALTHY_FACTOR * cosines, eps),
            grad_tolerance=max(_HEALTHY_FACTOR * gradient, _GRADIENT_SPACINGS * eps),
            source=source,
        )

    def _healthy_gaps(self) -> tuple[str, float, float, float] | None:
        """Return what is healthy, and how far its loss, its gradients' direction and the worst
        gradient are from float32.

        Another micro-batch; the failing one where only the update fails;
        else those of its samples that do not.
        """
        failing, batch = self._failing, None
        healthy = self._others[:1]
        if healthy:
            micro, source = (
                healthy[0],
                f"micro-batch {healthy[0]} of the same window, which is healthy",
            )
        elif failing.update:
            micro, source = failing.micro, "forward and backward of this window, which are healthy"
        elif self._healthy_rows:
            micro, source = failing.micro, "the healthy samples of this micro-batch"
            batch = self._without_bad_rows(micro)
        else:
            return None
        own = failing.attempt(micro, batch=batch, without_update=True, under=nullcontext)
        exact = self._reference(micro) if batch is None else self._exact(micro, batch)
        if own.failed or exact.failed or own.loss is None or exact.loss is None:
            return None
        first, second = own.grads or {}, exact.grads or {}
        gap = loss_gap(own.loss, exact.loss)
        return source, gap, 1 - cosine(first, second), largest_gap(first, second)

    def trial(self, atoms: tuple[Atom, ...], micro: int | None = None) -> Trial:
        """Run the failing micro-batch (or another one of the window) under ``atoms``."""
        micro = self._failing.micro if micro is None else micro
        mine = atoms_for(self._failing, atoms, micro) if micro in self._failing.micros else atoms
        if micro in dropped_micros(mine):
            return self._without_micro(atoms, micro)
        under = partial(applied, self._view, atoms)
        batch = rebatch(self._failing.step.batches[micro], mine, micro=micro)
        run = self._failing.attempt(micro, batch=batch, under=under)
        key = self._key_under(atoms, micro, run) if run.failed else None
        gaps = (None, None, None) if run.failed else self._gaps(micro, run)
        return Trial(
            atoms=atoms,
            outcome=_outcome(run, key, self._key),
            micro=micro,
            key=key,
            loss=run.loss,
            loss_gap=gaps[0],
            grad_cosine=gaps[1],
            grad_gap=gaps[2],
            causal=None if run.failed else self._is_causal(atoms, micro),
            rows_unchanged=None if run.failed else self._rows_unchanged(atoms, micro, run),
            seconds=run.seconds,
            peak_bytes=run.peak_bytes,
            message=_said(run.error),
        )

    def extend(self, trial: Trial) -> tuple[Atom, ...] | None:
        """Return a larger set worth trying after ``trial`` failed elsewhere, or None.

        An op that met mixed formats wants an outer autocast;
        a failure in another module wants an island there.
        """
        held = trial.atoms
        if _DTYPE_CLASH.search(trial.message) and not _has(held, "outer_autocast"):
            return (*held, Atom(remedy="outer_autocast", value=_half_format(self._failing)))
        islands = [atom for atom in held if atom.remedy == "island"]
        if trial.key is None or not islands or len(islands) >= _MAX_ISLANDS:
            return None
        place = trial.key.module
        if not place or any(atom.target == place for atom in islands):
            return None
        return (*held, Atom(remedy="island", target=place, value=islands[0].value))

    @property
    def _view(self) -> ModelView:
        return self._failing.step.view

    def _reference(self, micro: int) -> Attempt:
        if micro not in self._references:
            self._references[micro] = self._exact(micro)
        return self._references[micro]

    def _exact(self, micro: int, batch: Batch | None = None) -> Attempt:
        """Return the float32 run of a micro-batch; what the update should be is not its to say."""
        under = partial(reference, self._view)
        run = self._failing.attempt(micro, batch=batch, without_update=True, under=under)
        # A run that fails on a device is nearly full:
        # what only waits to be compared waits in host memory.
        return replace(run, grads={name: grad.cpu() for name, grad in (run.grads or {}).items()})

    def _gaps(self, micro: int, run: Attempt) -> tuple[float | None, float | None, float | None]:
        exact = self._reference(micro)
        if exact.failed or run.loss is None or exact.loss is None:
            return None, None, None
        first, second = run.grads or {}, exact.grads or {}
        return loss_gap(run.loss, exact.loss), cosine(first, second), largest_gap(first, second)

    def _without_micro(self, atoms: tuple[Atom, ...], micro: int) -> Trial:
        """Return what is left of the window without a micro-batch:
        it passes where the others do, each run by itself.
        """
        others = self._others[:_MAX_OTHERS]
        if not others:
            message = "it is the whole window: nothing would be left to update with"
            return Trial(atoms=atoms, outcome="not_applicable", micro=micro, message=message)
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

    def following(self, atoms: tuple[Atom, ...]) -> Trial:
        """Apply this update and those after it on the same window, under ``atoms``: whether weights
        and losses stay.

        What is finite now and ruins the forward after it has cured nothing, where float32 is ruined
        as well. Where it is not, what fails later is another failure of the format. Raises what the
        host's update raises.
        """
        began = time.perf_counter()
        loss, message = self._ruin(partial(applied, self._view, atoms))
        if message:
            message = self._ruin_in_float32
        return Trial(
            atoms=atoms,
            outcome="other_failure" if message else "pass",
            micro=self._failing.micro,
            loss=loss,
            seconds=time.perf_counter() - began,
            message=message,
        )

    @cached_property
    def _ruin_in_float32(self) -> str:
        return self._ruin(partial(reference, self._view))[1]

    def _ruin(self, under: Under) -> tuple[float, str]:
        """Return the worst loss of the updates that follow under a context, and what they ruin,
        or "".
        """
        losses, broken = self._failing.run_on(_FOLLOWING, under=under)
        first, worst = losses[0], math.nan if math.isnan(losses[-1]) else max(losses)
        if not worst - first <= _RUNS_AWAY * max(abs(first), 1.0):
            after = counted(len(losses) - 1, "update")
            return worst, f"the loss goes from {first:.4g} to {worst:.4g} in {after}"
        return worst, f"{broken[0]} is not finite {_FOLLOWING} updates later" if broken else ""

    @cached_property
    def _others(self) -> tuple[int, ...]:
        """The micro-batches of the window that do not fail."""
        places = range(len(self._failing.step.batches))
        return tuple(micro for micro in places if micro not in self._failing.micros)

    def _without_bad_rows(self, micro: int) -> Batch:
        batch, healthy = self._failing.step.batches[micro], self._healthy_rows or ()
        return without(batch, tuple(set(range(num_samples(batch) or 0)) - set(healthy)))

    def _key_under(self, atoms: tuple[Atom, ...], micro: int, run: Attempt) -> FailureKey | None:
        if run.error is not None:
            return FailureKey(kind="exception", phase="forward", op=type(run.error).__name__)
        with applied(self._view, atoms):
            place = localize(self._failing.step, micro, update=self._failing.update)
        return place.key if place else None

    @cached_property
    def _healthy_rows(self) -> tuple[int, ...] | None:
        """The samples that do not fail by themselves; None where that is unknown."""
        batch = self._failing.step.batches[self._failing.micro]
        rows, bad = num_samples(batch), bad_rows(self._failing)
        if rows is None or bad is None:
            return None
        return tuple(row for row in range(rows) if row not in bad)

    def _rows_unchanged(self, atoms: tuple[Atom, ...], micro: int, run: Attempt) -> bool | None:
        """Return whether healthy samples keep loss and gradient;
        None where float32 can judge, or nothing can.

        An update's remedy that leaves forward and backward alone leaves every sample as it was.
        """
        if not self._reference(micro).failed or micro != self._failing.micro:
            return None
        if self._failing.update:
            plain = self._failing.attempt(micro, without_update=True, under=nullcontext)
            return agree(plain, run)
        healthy = self._healthy_rows
        if not healthy:
            return None if healthy is None else self._others_unchanged(atoms)
        only_healthy = self._without_bad_rows(micro)
        plain = self._failing.attempt(micro, batch=only_healthy, under=nullcontext)
        if any(atom.remedy == "drop_sample" for atom in atoms):
            return agree(plain, run)
        under = partial(applied, self._view, atoms)
        return agree(plain, self._failing.attempt(micro, batch=only_healthy, under=under))

    def _others_unchanged(self, atoms: tuple[Atom, ...]) -> bool | None:
        """Return what a healthy micro-batch of the window says where every sample of the failing
        one fails.
        """
        if not self._others:
            return None
        other = self._others[0]
        plain = self._failing.attempt(other, without_update=True, under=nullcontext)
        under = partial(applied, self._view, atoms)
        return agree(plain, self._failing.attempt(other, without_update=True, under=under))

    def _is_causal(self, atoms: tuple[Atom, ...], micro: int) -> bool | None:
        """Return whether changing the last token leaves every earlier logit as it was;
        None where it cannot be asked.
        """
        if not _has(atoms, "attention"):
            return None
        batch = self._failing.step.batches[micro]
        ids = self._view.token_ids(batch)
        if ids is None or ids.dim() != 2 or ids.shape[1] < 2:
            return None
        changed = ids.clone()
        changed[:, -1] = torch.where(ids[:, -1] > 0, ids[:, -1] - 1, ids[:, -1] + 1)
        with self._failing.step.isolated(), applied(self._view, atoms):
            before = self._view.logits(batch, ids)
            after = self._view.logits(batch, changed)
        if before is None or after is None:
            return None
        return torch.equal(before[:, :-1], after[:, :-1])


def _outcome(run: Attempt, key: FailureKey | None, failure: FailureKey) -> Outcome:
    if isinstance(run.error, torch.OutOfMemoryError | MemoryError):
        return "oom"
    if run.error is not None:
        return "same_failure" if failure.kind == "exception" else "crash"
    if not run.failed:
        return "pass"
    return "same_failure" if key is None or key.same_as(failure) else "other_failure"


def _coarsest_eps(failing: FailingStep) -> float:
    formats = [p.dtype for p in failing.step.view.root.parameters() if p.is_floating_point()]
    autocast = failing.step.facts.autocast
    if autocast:
        formats.append(getattr(torch, autocast))
    return max((torch.finfo(one).eps for one in formats), default=torch.finfo(torch.float32).eps)


def _half_format(failing: FailingStep) -> str:
    used = (p.dtype for p in failing.step.view.root.parameters())
    half = [format_name(one) for one in used if one in HALF]
    return max(set(half), key=half.count) if half else "bfloat16"


def _has(atoms: tuple[Atom, ...], remedy: str) -> bool:
    return any(atom.remedy == remedy for atom in atoms)


def _said(error: BaseException | None) -> str:
    first_line, _, _ = str(error).partition("\n")
    return "" if error is None else f"{type(error).__name__}: {first_line}"
