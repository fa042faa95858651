"""The failure under investigation, as something that can be run again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nanstop.decide.apart import ByItself
from nanstop.errors import NanstopError, ShortOfMemoryError
from nanstop.numerics.host_memory import lacks_memory
from nanstop.numerics.room import let_go, require
from nanstop.numerics.tensors import HALF, format_name, nonfinite
from nanstop.numerics.update_length import TOO_LONG, held_against
from nanstop.records import Phase, Signal, StepId
from nanstop.remedies.precision import reference
from nanstop.replay.conditions import Under
from nanstop.replay.copies.rewind import PutRight
from nanstop.replay.rerun import Attempt, attempt
from nanstop.replay.step import Batch, Step, gradients_of, trainable_of, update_undone

_WORKSPACE = 2**24
"""Bytes that kernels of a CPU may want for themselves."""


class WayBack(Protocol):
    """The way back to a snapshot. ``steps``: windows whose updates were applied since it, oldest
    first.
    """

    @property
    def steps(self) -> Sequence[Step]: ...

    def rewound(self) -> AbstractContextManager[Any]:
        """Be at the snapshot inside, and bitwise back at the present state after it."""
        ...


@dataclass(frozen=True, slots=True)
class FailurePoint:
    """Where a failure was met. ``step``: None where nothing can be run again;
    ``can_skip``: an update is at stake; ``agreed``: several ranks act on it as one; ``harmless``:
    all that the update is made of is finite; ``no_redo``, ``is_past``: see ``decide``;
    ``by_itself``: ``decide_apart``.
    """

    at: StepId
    step: Step | None
    can_skip: bool
    agreed: bool = False
    harmless: bool = False
    no_redo: str = ""
    is_past: bool = False
    by_itself: ByItself = ""

    @property
    def optimizer(self) -> int:
        """A number that stands for the optimizer whose update failed, 0 where that is not known."""
        return id(self.step.view.optimizer) if self.step is not None else 0

    @classmethod
    def of(
        cls,
        step: Step | None,
        signals: Sequence[Signal],
        *,
        can_skip: bool,
        agreed: bool = False,
        harmless: bool = False,
        no_redo: str = "",
        is_past: bool = False,
        by_itself: ByItself = "",
    ) -> FailurePoint:
        """Return the failure point of a step; without a step, that of the signals."""
        if step is not None:
            return cls(step.id, step, True, agreed, harmless, no_redo, is_past, by_itself)
        at = next((one.at for one in signals if one.at is not None), StepId(run="", step=0))
        return cls(at, None, can_skip)


@dataclass(frozen=True, slots=True)
class Following:
    """Updates made one after the other. ``losses``: the mean loss before each and after the last;
    ``broken``: parameters that are not finite then.
    """

    losses: tuple[float, ...]
    broken: tuple[str, ...]

    @property
    def num(self) -> int:
        """How many updates were made."""
        return len(self.losses) - 1


@dataclass(frozen=True, slots=True)
class FailingStep:
    """``micros``: micro-batches of the window that fail, ``micro`` the first of them.
    ``phase``: what its forward is.

    ``update``: the forward and backward are clean and it is the optimizer update of this step that
    breaks the weights. ``before``: the steps before this one that can be run again, of an update
    those since the snapshot.

    ``pending``: that update has not been applied yet. What it does is tried from the snapshot on,
    for a state that was rounded away in the updates before is in none of its own numbers.
    ``in_float32``: the length that each half-precision parameter's is held against, see
    ``held_against``. ``broken``: what it does to those that it ruins. ``rewritten``: the script
    itself writes to the gradients that a backward leaves, so that no update made of these alone is
    one of its own. ``way_back``: to before the updates whose weights it failed on, each of them
    finite. ``put_right``: weights that are given ordinary numbers for a run, see there.
    """

    step: Step
    micro: int
    micros: tuple[int, ...]
    phase: Phase = "forward"
    update: bool = False
    rewind: WayBack | None = None
    before: tuple[Step, ...] = ()
    pending: bool = False
    in_float32: Mapping[str, float] | None = None
    broken: tuple[Signal, ...] = ()
    rewritten: bool = False
    way_back: WayBack | None = None
    put_right: tuple[str, ...] = ()
    takes: int = 0
    """The memory that a run takes beyond what is held, in bytes, where little more is left."""

    def attempt(
        self,
        micro: int | None = None,
        *,
        batch: Batch | None = None,
        without_update: bool = False,
        under: Under,
        along: Under = nullcontext,
        gathered: Callable[[nn.Module], Mapping[str, Tensor]] = gradients_of,
    ) -> Attempt:
        """Run the failing step (or another micro-batch of its window) under a context, undone, and
        keep the gradients. ``along``, ``gathered``: see ``replay.rerun.attempt``. Errors:
        ``ShortOfMemoryError``.
        """
        try:
            run = attempt(
                self.step,
                self.micro if micro is None else micro,
                batch=batch,
                update=self.update and not without_update,
                window=self.update,
                keep_grads=True,
                in_float32=self.in_float32,
                under=partial(self.from_snapshot, under),
                along=along,
                gathered=gathered,
            )
        except Exception as error:  # a context that could not be had
            if not lacks_memory(error):
                raise
            let_go(error)
            raise ShortOfMemoryError from None
        return _with_memory(run)

    def run_on(self, goes_on: Callable[[int], bool], *, under: Under) -> Following:
        """Apply the update of the window and others on it, under a context, undone.

        ``goes_on``: whether another is made, of how many there were. A loss that raises is NaN,
        and ends it. The random state of each pass is the window's own. Synchronises the device.
        """
        step, losses = self.step, []
        with update_undone(step), self.from_snapshot(under):
            while True:
                with step.isolated():
                    losses.append(mean_loss(step))
                    if not math.isfinite(losses[-1]) or not goes_on(len(losses) - 1):
                        return Following(tuple(losses), broken_weights(step.view.root))
                    step.update()

    @contextmanager
    def from_snapshot(self, under: Under) -> Iterator[None]:
        """Have a context inside; where the update is still to come, with those before it made
        anew under the same context. Errors: ``ShortOfMemoryError``.
        """
        way_back, formats = self.rewind if self.pending else None, self._formats()
        gradients = self._gradient_bytes()
        with way_back.rewound() if way_back is not None else nullcontext(), under():
            if self.takes:
                now = self._gradient_bytes()
                kept = max(0, self.takes - gradients) * max(1.0, now / max(gradients, 1))
                # In its own formats the step has had the room; in others copies lie there.
                run = int(now + kept) if self._formats() != formats else 0
                require(self.step.view.device_type, run + _WORKSPACE)
            for earlier in self.before if self.makes_updates else ():
                apply_update(earlier)
            yield

    @property
    def makes_updates(self) -> bool:
        """Whether a run makes the updates before this step anew, whatever it is a run of."""
        return self.pending and bool(self.before)

    @property
    def half_format(self) -> str:
        """The half format of most parameters, bfloat16 where none has one."""
        half = [format_name(one) for one in self._formats() if one in HALF]
        return max(set(half), key=half.count) if half else "bfloat16"

    def _formats(self) -> tuple[torch.dtype, ...]:
        """Return the formats that parameters have now."""
        return tuple(p.dtype for p in self.step.view.root.parameters())

    def _gradient_bytes(self) -> int:
        """Return what gradients take in the formats that parameters have now."""
        return sum(p.nbytes for p in self.step.view.root.parameters() if p.requires_grad)

    def usual_length(self) -> float | None:
        """Return the length of the longest update between the snapshot and this step, over all
        that is trained; None where there is none.
        """
        if self.rewind is None or not self.before:
            return None
        lengths = []
        with self.rewind.rewound():
            for earlier in self.before:
                trained = trainable_of(earlier.view).parameters
                old = {name: p.detach().clone() for name, p in trained.items()}
                apply_update(earlier)
                moved = (float((trained[name].detach() - old[name]).norm()) for name in old)
                lengths.append(math.hypot(*moved))
        return max(lengths)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the weights inside that this step really started from."""
        if self.rewind is None or self.pending:
            yield
            return
        with self.rewind.rewound():
            for earlier in self.before:
                apply_update(earlier)
            yield


def _with_memory(run: Attempt) -> Attempt:
    if run.lacked_memory:
        raise ShortOfMemoryError
    # What is not finite is held against nothing, and what looks for its place wants the room.
    return replace(run, grads=None) if run.failed else run


def mean_loss(step: Step) -> float:
    """Return the mean loss of a window's micro-batches, NaN where the script refuses one. Gradients
    are left in place. Synchronises the device.
    """
    try:
        losses = [float(step.run(micro)) for micro in range(len(step.batches))]
    except Exception as error:  # the script's own refusal of what it met
        if lacks_memory(error):
            raise
        return math.nan
    return sum(losses) / len(losses)


def apply_update(step: Step) -> None:
    """Run a window and its optimizer update for good;
    everything but weights and optimizer state is undone.
    """
    with step.isolated():
        for micro in range(len(step.batches)):
            step.run(micro)
        step.update()


def failing_step(
    step: Step, *, phase: Phase, raised: bool, before: Sequence[Step] = ()
) -> FailingStep:
    """Return the failing step of a window:
    the micro-batches whose loss or gradients are bad when run again.

    The ones whose first loss was bad count even if they replay clean.
    A micro-batch that raised is the last one.
    """
    forward: Phase = phase if phase in ("evaluate", "generate") else "forward"
    if raised or forward != "forward":
        last = len(step.batches) - 1
        return FailingStep(step, last, (last,), phase=forward)
    bad = [
        micro
        for micro, loss in enumerate(step.losses)
        if (loss is not None and not bool(loss.isfinite().all()))
        or _with_memory(attempt(step, micro)).failed
    ]
    before = tuple(one for one in before if one is not step)
    return FailingStep(step, bad[0] if bad else 0, tuple(bad) or (0,), before=before)


def breaking_update(rewind: WayBack) -> FailingStep | int | None:
    """Return the failing step of the update that broke the weights, found by running the kept
    windows again; the number of the last step where its update, too, leaves them finite; None where
    nothing can be run, or no weight that is trained is broken.
    """
    root = rewind.steps[0].view.root if rewind.steps else None
    if root is None or not broken_weights(root):  # no update breaks what is frozen
        return None
    with rewind.rewound():
        for place, step in enumerate(rewind.steps):
            apply_update(step)
            broken = broken_weights(root)
            if broken:
                return FailingStep(
                    step.update_of(broken),
                    0,
                    tuple(range(len(step.batches))),
                    phase="optimizer",
                    update=True,
                    rewind=rewind,
                    before=tuple(rewind.steps[:place]),
                )
    return rewind.steps[-1].id.step


def update_at_fault(
    step: Step | None, rewind: WayBack | None, names: tuple[str, ...]
) -> FailingStep | int | None:
    """Return the failing step of the update that broke weights, see ``breaking_update``; without a
    way back that of ``step`` itself (None: the run is over), if it breaks again some of the weights
    ``names``, which are put right for its runs: None where it does not, where the optimizer's own
    state is not finite, or where the window cannot be run. Undone; may synchronise the device.
    """
    if rewind is not None:
        return breaking_update(rewind)
    if step is None:
        return None
    step = step.update_of(names)
    trainable = trainable_of(step.view)
    if not names or step.view.optimizer is None or nonfinite(trainable.state_tensors()):
        return None
    micros, way_back = tuple(range(len(step.batches))), PutRight(trainable, (step,))
    with suppress(NanstopError), way_back.rewound():
        if any(_with_memory(attempt(step, micro)).failed for micro in micros):
            return None
        apply_update(step)
        if set(broken_weights(step.view.root)).intersection(names):
            return FailingStep(
                step, 0, micros, phase="optimizer", update=True, rewind=way_back, put_right=names
            )
    return None


def broken_weights(root: nn.Module) -> tuple[str, ...]:
    """Return the names of what is trained and not finite. Synchronises the device."""
    named = root.named_parameters()
    return nonfinite({name: p for name, p in named if p.requires_grad})


def pending_update(step: Step, rewind: WayBack | None) -> FailingStep | None:
    """Return the failing step of an update that is about to ruin weights, judged by a float32 run
    of it; None if it does not.

    ``rewind``: its last step is this one. Raises NanstopError where there is no such run.
    """
    micros = tuple(range(len(step.batches)))
    before = tuple(rewind.steps[:-1]) if rewind is not None else ()
    failing = FailingStep(
        step, 0, micros, phase="optimizer", update=True, rewind=rewind, before=before, pending=True
    )
    named = dict(step.view.root.named_parameters())
    half = {name: math.inf for name, p in named.items() if p.requires_grad and p.dtype in HALF}
    true = replace(failing, in_float32=half).attempt(under=partial(reference, step.view))
    if true.error is not None:
        raise NanstopError(f"it does not run in float32: {true.error}")
    lengths = {name: true.lengths.get(name, math.nan) for name in half}
    groups = step.view.optimizer.param_groups if step.view.optimizer is not None else ()
    beside = held_against(lengths, named, groups)
    plain = attempt(step, 0, update=True, in_float32=beside)
    names = [one.removeprefix("param:") for one in plain.bad if one.startswith("param:")]
    broken = tuple(
        Signal(
            source="param",
            name=name,
            value=plain.lengths.get(name),
            threshold=TOO_LONG * beside[name] if name in lengths else None,
            message=f"float32 moves it by {lengths[name]:.3g}" if name in lengths else "",
            at=step.id,
        )
        for name in names
    )
    return replace(failing, in_float32=beside, broken=broken) if broken else None
