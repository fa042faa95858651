"""Exact runs of a failing step, in float32 or wider, that compute what its own runs compute: the
numbers that were drawn, the choices that were made, the modules beside the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from nanstop.errors import ShortOfMemoryError
from nanstop.numerics.parked import copied_to_host
from nanstop.numerics.room import MOST_IN_FLOAT64, place_for
from nanstop.numerics.tensors import HALF, format_name
from nanstop.prove.failing_step import FailingStep
from nanstop.prove.reference.agreement import SAME, Gaps, agree, gaps_between
from nanstop.prove.reference.beside import met_beside
from nanstop.prove.reference.ladder import Ladder, Rung
from nanstop.prove.reference.manner import Manner
from nanstop.records import op_kind
from nanstop.remedies.precision import reference
from nanstop.remedies.streamed import Stream, streamed
from nanstop.replay.conditions import Under, eager, without_dropout
from nanstop.replay.path import Path
from nanstop.replay.rerun import Attempt
from nanstop.replay.step import Batch, gradients_of
from nanstop.tracing.definitions.attention import FUSED_ATTENTION
from nanstop.tracing.in_float64 import NarrowFailures
from nanstop.tracing.operators import CASTS


class ExactRuns:
    """Runs of one failing step, and what each micro-batch is in exact numbers.
    Call inside ``failing.in_place()``.

    The first run of a micro-batch makes the path that all others of it take. ``dtype``: exact is
    float32, and float64 from where the failing micro-batch was found to fail in float32 and to pass
    in that: exp(100) is beyond the one and not beyond the other. ``ladder``: how much of the model
    is held in it at a time. ``op``: what failed; fused attention that fails in exact numbers too is
    computed in its parts, for its kernel may be wrong in every format. ``has_value``: whether what
    failed has one in float64, with all before it in that. ``loss_in_float64``: of a run in float64
    of which only the backward fails.
    """

    def __init__(
        self,
        failing: FailingStep,
        ladder: Ladder | None = None,
        op: str = "",
        *,
        has_value: bool = False,
    ) -> None:
        self._failing, self._is_fused = failing, FUSED_ATTENTION in op
        self._is_cast = op_kind(op) in CASTS if op else False
        self._ladder = ladder or Ladder(failing, "")
        self._paths: dict[int, Path] = {}
        self._runs: dict[int, Attempt] = {}
        self._manner = Manner()
        self._fails_in_float64 = False
        self._has_value = has_value
        self.loss_in_float64: float | None = None
        self._is_by_parts = False
        self.dtype = torch.float32

    def beside(self, failing: FailingStep) -> ExactRuns:
        """Return the runs of another step, as exact as these."""
        return ExactRuns(failing, self._ladder)

    @property
    def scope(self) -> str:
        """What of the model is computed exactly at a time; "" for all of it."""
        return "layer by layer" if self._is_by_parts else ""

    @property
    def is_wider(self) -> bool:
        """Whether it computes in more than the script asks for: next to a pole that is another
        number.
        """
        return self.dtype is torch.float64 or self.leaves_half

    @property
    def leaves_half(self) -> bool:
        """Whether casts of the script to half precision are left out, without which it passes."""
        return self._manner.leaves_half

    def path(self, micro: int) -> Path:
        """Return the path of a micro-batch."""
        return self._paths.setdefault(micro, Path())

    def attempt(self, micro: int, *, under: Under, without_update: bool = False) -> Attempt:
        """Run a micro-batch under a context, undone, on its path."""
        return self._on(self.path(micro), micro, under=under, without_update=without_update)

    def of(self, micro: int) -> Attempt:
        """Return the exact run of a micro-batch; what the update should be is not its to say.

        Where it fails with the choices of the run, and does not with its own, these are part of the
        failure, and nobody takes them over from then on. Where it has operations in half precision
        by casts of the script, and passes in float32 without these, they are left out.
        """
        if micro not in self._runs:
            run = self._exact(self.path(micro), micro)
            for manner in self._other_manners(micro):
                if not run.failed:
                    break
                before, self._manner = self._manner, manner
                again = self._exact(self.path(micro), micro)
                run, self._manner = (run, before) if again.failed else (again, manner)
            self._runs[micro] = run
            if run.failed and micro == self._failing.micro and self.may_widen():
                self._widen(micro)
        return self._runs[micro]

    def _other_manners(self, micro: int) -> Iterator[Manner]:
        """Yield in which other manner a micro-batch that fails may pass."""
        if self._manner.takes_choices and self.path(micro).num_choices:
            yield replace(self._manner, takes_choices=False)
        if self._is_fused:
            yield replace(self._manner, is_opened=True)
        if micro == self._failing.micro and self._may_cast():
            yield replace(self._manner, leaves_half=True)

    def _may_cast(self) -> bool:
        """Return whether the script may have cast to half precision in the float32 run."""
        is_half = self.coarsest_eps() > torch.finfo(torch.float32).eps
        return self._ladder.rung is Rung.WHOLE and (is_half or self._is_cast)

    def _widen(self, micro: int) -> None:
        self.dtype = torch.float64
        try:
            with eager(), NarrowFailures() as narrow:
                run = self._whole(self.path(micro), micro)
        except ShortOfMemoryError:
            self.dtype = torch.float32
            return
        made = run
        if run.failed and (narrow.are_any or run.error is not None):
            made = self._lifted(micro)
        if not made.failed:
            self._runs = {micro: made}
            return
        self.dtype, self._manner = torch.float32, replace(self._manner, is_lifted=False)
        # What refuses float64 (a constant of the script in float32, in a product) says nothing,
        # nor does what fails in the narrower format of a tensor of the script's own.
        is_run = run.error is None or self._runs[micro].error is not None
        has_loss = run.loss is not None and math.isfinite(run.loss)
        self.loss_in_float64 = run.loss if has_loss else None
        self._fails_in_float64 = is_run and not narrow.are_any

    def _lifted(self, micro: int) -> Attempt:
        """Run a micro-batch in float64 where the script casts to float32, too."""
        self._manner = replace(self._manner, is_lifted=True)
        with eager():
            return self._whole(self.path(micro), micro)

    def may_widen(self) -> bool:
        """Return whether there is room for runs in float64."""
        root = self._failing.step.view.root
        is_small = sum(p.numel() for p in root.parameters()) <= MOST_IN_FLOAT64
        return is_small and self._ladder.rung is Rung.WHOLE

    def fails_in(self) -> tuple[str, ...]:
        """Return the formats in which the failing micro-batch was run exactly and failed."""
        if not self.of(self._failing.micro).failed:
            return ()
        is_known = self._fails_in_float64 and not self.misses_value
        return ("float32", "float64") if is_known else ("float32",)

    @property
    def misses_value(self) -> bool:
        """Whether float64 has a value that no run came to, for tensors of the script's own are
        float32. Of half formats it may be an eps that is 0 in them, and a guard as good as that.
        """
        if not self._has_value or self.loss_in_float64 is not None:
            return False
        is_failed = self.of(self._failing.micro).failed
        return is_failed and self.coarsest_eps() <= torch.finfo(torch.float32).eps

    def still_in(self) -> str:
        """Return the half format that the float32 run of the failing micro-batch has ops in, which
        casts of the script bring back; "" where there is none, or the run passes.
        """
        return self._half_left if self.of(self._failing.micro).failed else ""

    @cached_property
    def _half_left(self) -> str:
        if self._ladder.rung is not Rung.WHOLE:
            return ""  # by parts, a run with such ops is none
        path = Path()
        with suppress(ShortOfMemoryError):
            self._whole(path, self._failing.micro)
        return next((format_name(dtype) for dtype in HALF if dtype in path.formats), "")

    def peak_of(self, run: Attempt) -> int | None:
        """Return the bytes that were in use on the device in a run at the most, without gradients
        that wait there to be compared.
        """
        if run.peak_bytes is None:
            return None
        kept = (grad for one in self._runs.values() for grad in (one.grads or {}).values())
        return run.peak_bytes - sum(grad.nbytes for grad in kept if grad.device.type != "cpu")

    def num_taken(self) -> tuple[int, int]:
        """Return how many draws and how many choices of the failing micro-batch all runs share."""
        path = self.path(self._failing.micro)
        return path.num_draws, path.num_choices if self._manner.takes_choices else 0

    def gaps(self, micro: int, run: Attempt, under: Under) -> Gaps | None:
        """Return how far a run under a context is from the exact one; None where one has no loss.

        A run that cannot be given the draws is compared without dropout, as another run.
        """
        exact = self.of(micro)
        if run.strayed or exact.strayed:
            run, exact = self._without_dropout(micro, under)
        return gaps_between(run, exact)

    def gaps_of_rows(self, micro: int, batch: Batch) -> Gaps | None:
        """Return how far the run of another batch, without any remedy, is from the exact run of it;
        None where either failed.
        """
        path = Path()
        exact = self._exact(path, micro, batch) if self._ladder.rung is Rung.PARTS else None
        own = self._on(path, micro, batch=batch, under=nullcontext, without_update=True)
        return gaps_between(own, exact or self._exact(path, micro, batch))

    def own_gaps(self, micro: int) -> Gaps | None:
        """Return how far a micro-batch, run as it is, is from the exact run of it; None where
        nothing tells, or memory is short.
        """
        with suppress(ShortOfMemoryError):
            if self._ladder.rung is Rung.PARTS:
                self.of(micro)  # it has no room beside the gradients of another run
            own = self.attempt(micro, under=nullcontext, without_update=True)
            return self.gaps(micro, own, nullcontext)
        return None

    def with_and_without(
        self, micro: int, under: Under, batch: Batch | None = None
    ) -> tuple[Attempt, Attempt]:
        """Return the runs of a batch as it is and under a context, on the same path."""
        path = Path()
        plain = self._on(path, micro, batch=batch, under=nullcontext, without_update=True)
        return plain, self._on(path, micro, batch=batch, under=under, without_update=True)

    def is_same_function(self, micro: int, under: Under, batch: Batch | None = None) -> bool:
        """Return whether a context leaves loss and gradients of a batch as they are in float64, and
        takes those in the run's format no farther from these: a form may keep digits that the old
        one loses. All with the same draws. False where there is no room for float64.
        """
        if not self.may_widen():
            return False
        path, around = Path(), self._around
        plain, own, exact, formed = (
            self._on(path, micro, batch=batch, under=one, without_update=True)
            for one in (nullcontext, under, around(nullcontext), around(under))
        )
        gaps, own_gaps = gaps_between(plain, exact), gaps_between(own, exact)
        if gaps is None or own_gaps is None or not agree(exact, formed):
            return False
        return own_gaps[0] <= max(gaps[0], SAME) and own_gaps[2] <= max(gaps[2], SAME)

    def under(self, micro: int, under: Under) -> Attempt:
        """Return the run of a micro-batch under a context, in float64 and on its path."""
        return self.attempt(micro, under=self._around(under), without_update=True)

    def _around(self, under: Under) -> Under:
        @contextmanager
        def both() -> Iterator[None]:
            with self._in(torch.float64), under():
                yield

        return both

    def coarsest_eps(self) -> float:
        """Return the spacing at 1 of the coarsest format that the run stores or computes in."""
        failing = self._failing
        formats = {p.dtype for p in failing.step.view.root.parameters() if p.is_floating_point()}
        formats |= self.path(failing.micro).formats
        if failing.step.facts.autocast:
            formats.add(getattr(torch, failing.step.facts.autocast))
        return max(
            (torch.finfo(one).eps for one in formats), default=torch.finfo(torch.float32).eps
        )

    def _without_dropout(self, micro: int, under: Under) -> tuple[Attempt, Attempt]:
        root = self._failing.step.view.root

        def still(inner: Under) -> AbstractContextManager[object]:
            with ExitStack() as scope:
                scope.enter_context(without_dropout(root))
                scope.enter_context(inner())
                return scope.pop_all()

        runs = [
            self._failing.attempt(micro, without_update=True, under=partial(still, inner))
            for inner in (under, self._in_exact)
        ]
        return runs[0], runs[1]

    def _in_exact(self) -> AbstractContextManager[None]:
        return self._in(self.dtype)

    @contextmanager
    def _in(self, dtype: torch.dtype) -> Iterator[None]:
        failing = self._failing
        # An update that is yet to come is tried from the snapshot on, with those before it.
        exact = reference(failing.step.view, dtype, with_state=failing.makes_updates)
        with exact, self._manner.within(dtype):
            yield

    def _exact(self, path: Path, micro: int, batch: Batch | None = None) -> Attempt:
        """Run a batch exactly, on the highest rung that there is room for. Errors:
        ``ShortOfMemoryError`` where no run of all of it can be had.
        """
        if self._ladder.rung is Rung.WHOLE:
            with suppress(ShortOfMemoryError):
                return self._whole(path, micro, batch)
            self._ladder.step_down()
        if self._ladder.rung is Rung.PARTS:
            run = self._by_parts(path, micro, batch)
            if run is not None:
                self._is_by_parts = True
                return run
            self._ladder.step_down()
        raise ShortOfMemoryError

    def _whole(self, path: Path, micro: int, batch: Batch | None = None) -> Attempt:
        run = self._on(path, micro, batch=batch, under=self._in_exact, without_update=True)
        grads, root = run.grads or {}, self._failing.step.view.root
        if place_for(grads.values(), root.parameters(), is_there=True) is None:
            return run
        # A run that fails on a device is nearly full:
        # what only waits to be compared waits in host memory.
        return replace(run, grads={name: copied_to_host(grad) for name, grad in grads.items()})

    def _by_parts(self, path: Path, micro: int, batch: Batch | None) -> Attempt | None:
        """Return the exact run with one part of the model in float32 at a time; None where memory
        is short for that, too, or some of it is not computed in float32 so.
        """
        if self._failing.step.facts.compiled:
            return None
        if not path.is_known:
            self._on(path, micro, batch=batch, under=nullcontext, without_update=True)
        view = self._failing.step.view
        stream, formats = Stream(view.root), set[torch.dtype]()
        try:
            run = self._on(
                path,
                micro,
                batch=batch,
                under=partial(streamed, view, stream),
                without_update=True,
                gathered=stream.gathered,
                formats=formats,
            )
        except ShortOfMemoryError:
            return None
        return None if run.error is not None or formats & set(HALF) else run

    def _on(
        self,
        path: Path,
        micro: int,
        *,
        under: Under,
        batch: Batch | None = None,
        without_update: bool = False,
        gathered: Callable[[nn.Module], Mapping[str, Tensor]] = gradients_of,
        formats: set[torch.dtype] | None = None,
    ) -> Attempt:
        """Run a batch on a path, which is made by it where it is not known yet."""
        played = partial(path.played, choices=self._manner.takes_choices, formats=formats)
        along = played if path.is_known else partial(self._first, path)
        run = self._failing.attempt(
            micro,
            batch=batch,
            without_update=without_update,
            under=under,
            along=nullcontext if self._failing.step.facts.compiled else along,
            gathered=gathered,
        )
        return replace(run, strayed=path.strayed)

    @contextmanager
    def _first(self, path: Path) -> Iterator[None]:
        """Record a path, and tell the view of every module that is called beside the model."""
        with met_beside(self._failing.step.view), path.recorded():
            yield
