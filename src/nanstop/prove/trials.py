"""Trials of remedies on a case: each is one undone run, held against the float32 reference of the same step."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor

from nanstop.localize.localize import localize
from nanstop.numerics.tensors import HALF, format_name, in_float64
from nanstop.prove.bad_samples import atoms_for, bad_rows, without
from nanstop.prove.failing_step import FailingStep
from nanstop.records import Atom, FailureKey, Outcome, Reference, Trial
from nanstop.remedies.apply import applied
from nanstop.remedies.data import dropped_micros, rebatch
from nanstop.remedies.precision import reference
from nanstop.replay.batches import num_samples
from nanstop.replay.rerun import Attempt
from nanstop.replay.step import ModelView

_HEALTHY_FACTOR = 3.0
_FORMAT_FACTOR = 8.0
_DTYPE_CLASH = re.compile(r"same dtype|expected scalar type|dtype mismatch|must match.*dtype", re.I)
_MAX_ISLANDS = 8
_SAME = 1e-4


class Trials:
    """Runs trials of one case. Call inside ``case.in_place()``."""

    def __init__(self, case: FailingStep, key: FailureKey) -> None:
        self._case = case
        self._key = key
        self._references: dict[int, Attempt] = {}

    def reference(self) -> Reference:
        """Return the float32 run of the failing micro-batch, and how near to it a cure must come.

        The tolerance is three times the distance of a healthy micro-batch of the same window to its own float32 run;
        where there is none, it follows from the format's spacing.
        """
        run = self._reference(self._case.micro)
        healthy = next(
            (m for m in range(len(self._case.step.batches)) if m not in self._case.failing), None
        )
        eps = _coarsest_eps(self._case)
        loss_tolerance, cosine_tolerance = _FORMAT_FACTOR * eps, 10 * eps
        source = "the spacing of the format: no micro-batch of this window is healthy"
        if healthy is not None:
            own = self._case.attempt(healthy, under=partial(applied, self._view, ()))
            loss_gap, cosine = self._gaps(healthy, own)
            if not own.failed and loss_gap is not None and cosine is not None:
                loss_tolerance = max(_HEALTHY_FACTOR * loss_gap, eps)
                cosine_tolerance = max(_HEALTHY_FACTOR * (1 - cosine), eps)
                source = f"micro-batch {healthy} of the same window, which is healthy"
        return Reference(
            outcome=_outcome(run, None, self._key),
            loss=run.loss,
            loss_tolerance=loss_tolerance,
            cosine_tolerance=cosine_tolerance,
            source=source,
        )

    def trial(self, atoms: tuple[Atom, ...], micro: int | None = None) -> Trial:
        """Run the failing micro-batch (or another one of the window) under ``atoms``."""
        micro = self._case.micro if micro is None else micro
        mine = atoms_for(self._case, atoms, micro) if micro in self._case.failing else atoms
        if micro in dropped_micros(mine):
            healthy = self._healthy_rows
            unchanged = None if healthy is None else not healthy
            return Trial(atoms=atoms, outcome="pass", micro=micro, rows_unchanged=unchanged)
        under = partial(applied, self._view, atoms)
        batch = rebatch(self._case.step.batches[micro], mine, micro=micro)
        run = self._case.attempt(micro, batch=batch, under=under)
        key = self._key_under(atoms, micro, run) if run.failed else None
        loss_gap, cosine = (None, None) if run.failed else self._gaps(micro, run)
        return Trial(
            atoms=atoms,
            outcome=_outcome(run, key, self._key),
            micro=micro,
            key=key,
            loss=run.loss,
            loss_gap=loss_gap,
            grad_cosine=cosine,
            causal=None if run.failed else self._is_causal(atoms, micro),
            rows_unchanged=None if run.failed else self._rows_unchanged(atoms, micro, run),
            seconds=run.seconds,
            peak_bytes=run.peak_bytes,
            message=_said(run.error),
        )

    def extend(self, trial: Trial) -> tuple[Atom, ...] | None:
        """Return a larger set worth trying after ``trial`` failed elsewhere, or None.

        An op that met mixed formats wants an outer autocast; a failure in another module wants an island there.
        """
        held = trial.atoms
        if _DTYPE_CLASH.search(trial.message) and not _has(held, "outer_autocast"):
            return (*held, Atom(remedy="outer_autocast", value=_half_format(self._case)))
        islands = [atom for atom in held if atom.remedy == "island"]
        if trial.key is None or not islands or len(islands) >= _MAX_ISLANDS:
            return None
        place = trial.key.module
        if not place or any(atom.target == place for atom in islands):
            return None
        return (*held, Atom(remedy="island", target=place, value=islands[0].value))

    @property
    def _view(self) -> ModelView:
        return self._case.step.view

    def _reference(self, micro: int) -> Attempt:
        if micro not in self._references:
            # Agreement is about forward and backward; what the update should be is not the reference's to say.
            run = self._case.attempt(
                micro, without_update=True, under=partial(reference, self._view)
            )
            # A run that fails on a device is nearly full: what only waits to be compared waits in host memory.
            grads = {name: grad.cpu() for name, grad in (run.grads or {}).items()}
            self._references[micro] = replace(run, grads=grads)
        return self._references[micro]

    def _gaps(self, micro: int, run: Attempt) -> tuple[float | None, float | None]:
        exact = self._reference(micro)
        if exact.failed or run.loss is None or exact.loss is None:
            return None, None
        loss_gap = abs(run.loss - exact.loss) / max(abs(exact.loss), 1e-3)
        return loss_gap, cosine(run.grads or {}, exact.grads or {})

    def _key_under(self, atoms: tuple[Atom, ...], micro: int, run: Attempt) -> FailureKey | None:
        if run.error is not None:
            return FailureKey(kind="exception", phase="forward", op=type(run.error).__name__)
        with applied(self._view, atoms):
            place = localize(self._case.step, micro, update=self._case.update)
        return place.key if place else None

    @cached_property
    def _healthy_rows(self) -> tuple[int, ...] | None:
        """The samples that do not fail by themselves; None where that is unknown."""
        rows, bad = num_samples(self._case.step.batches[self._case.micro]), bad_rows(self._case)
        if rows is None or bad is None:
            return None
        return tuple(row for row in range(rows) if row not in bad)

    def _rows_unchanged(self, atoms: tuple[Atom, ...], micro: int, run: Attempt) -> bool | None:
        """Return whether healthy samples keep loss and gradient; None where float32 can judge, or nothing can.

        An update's remedy that leaves forward and backward alone leaves every sample as it was.
        """
        if not self._reference(micro).failed or micro != self._case.micro:
            return None
        if self._case.update:
            plain = self._case.attempt(micro, without_update=True, under=nullcontext)
            return _agree(plain, run)
        healthy = self._healthy_rows
        if not healthy:
            return None if healthy is None else self._others_unchanged(atoms)
        batch = self._case.step.batches[micro]
        rest = tuple(row for row in range(num_samples(batch) or 0) if row not in healthy)
        only_healthy = without(batch, rest)
        plain = self._case.attempt(micro, batch=only_healthy, under=nullcontext)
        if any(atom.remedy == "drop_sample" for atom in atoms):
            return _agree(plain, run)
        under = partial(applied, self._view, atoms)
        return _agree(plain, self._case.attempt(micro, batch=only_healthy, under=under))

    def _others_unchanged(self, atoms: tuple[Atom, ...]) -> bool | None:
        """Return what a healthy micro-batch of the window says where every sample of the failing one fails."""
        num = len(self._case.step.batches)
        other = next((m for m in range(num) if m not in self._case.failing), None)
        if other is None:
            return None
        plain = self._case.attempt(other, without_update=True, under=nullcontext)
        under = partial(applied, self._view, atoms)
        return _agree(plain, self._case.attempt(other, without_update=True, under=under))

    def _is_causal(self, atoms: tuple[Atom, ...], micro: int) -> bool | None:
        """Return whether changing the last token leaves every earlier logit as it was; None where it cannot be asked."""
        if not _has(atoms, "attention"):
            return None
        batch = self._case.step.batches[micro]
        ids = self._view.token_ids(batch)
        if ids is None or ids.dim() != 2 or ids.shape[1] < 2:
            return None
        changed = ids.clone()
        changed[:, -1] = torch.where(ids[:, -1] > 0, ids[:, -1] - 1, ids[:, -1] + 1)
        with self._case.step.isolated(), applied(self._view, atoms):
            before = self._view.logits(batch, ids)
            after = self._view.logits(batch, changed)
        if before is None or after is None:
            return None
        return torch.equal(before[:, :-1], after[:, :-1])


def _agree(plain: Attempt, cured: Attempt) -> bool:
    """Return whether two finite runs have the same loss and gradient, to float32 rounding."""
    if plain.failed or plain.loss is None or cured.loss is None:
        return False
    near = abs(plain.loss - cured.loss) <= _SAME * max(abs(plain.loss), 1e-3)
    return near and 1 - cosine(plain.grads or {}, cured.grads or {}) <= _SAME


def cosine(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Return the cosine between two sets of gradients by parameter name, in float64; 1.0 if both are zero."""
    names = [name for name in first if name in second]
    dot = norm_first = norm_second = 0.0
    for name in names:
        a = in_float64(first[name]).flatten()
        b = in_float64(second[name]).to(a.device).flatten()
        dot += float(a @ b)
        norm_first += float(a @ a)
        norm_second += float(b @ b)
    if norm_first == 0.0 and norm_second == 0.0:
        return 1.0
    scale = math.sqrt(norm_first) * math.sqrt(norm_second)
    return dot / scale if scale > 0 else 0.0


def _outcome(run: Attempt, key: FailureKey | None, failure: FailureKey) -> Outcome:
    if isinstance(run.error, torch.OutOfMemoryError | MemoryError):
        return "oom"
    if run.error is not None:
        return "same_failure" if failure.kind == "exception" else "crash"
    if not run.failed:
        return "pass"
    return "same_failure" if key is None or key.same_as(failure) else "other_failure"


def _coarsest_eps(case: FailingStep) -> float:
    formats = [p.dtype for p in case.step.view.root.parameters() if p.is_floating_point()]
    autocast = case.step.facts.autocast
    if autocast:
        formats.append(getattr(torch, autocast))
    return max((torch.finfo(one).eps for one in formats), default=torch.finfo(torch.float32).eps)


def _half_format(case: FailingStep) -> str:
    used = (p.dtype for p in case.step.view.root.parameters())
    half = [format_name(one) for one in used if one in HALF]
    return max(set(half), key=half.count) if half else "bfloat16"


def _has(atoms: tuple[Atom, ...], remedy: str) -> bool:
    return any(atom.remedy == remedy for atom in atoms)


def _said(error: BaseException | None) -> str:
    first_line, _, _ = str(error).partition("\n")
    return "" if error is None else f"{type(error).__name__}: {first_line}"
