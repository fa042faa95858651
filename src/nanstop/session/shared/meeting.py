"""The ranks that have met over one failure: one of them looks into it, all do the same about it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nanstop.decide.agreement import ONE_RANK, Ranks
from nanstop.decide.policy import Policy
from nanstop.errors import NanstopError
from nanstop.numerics.tensors import has_bad
from nanstop.prove.failing_step import FailingStep, WayBack, apply_update, broken_weights
from nanstop.records import DeviceFacts, codec
from nanstop.records.record import record
from nanstop.replay.collectives import finite, other
from nanstop.replay.copies.rewind import Rewind
from nanstop.replay.copies.snapshot import Snapshot
from nanstop.replay.rerun import Attempt, attempt
from nanstop.replay.step import Step, trainable_of
from nanstop.session.machine import own_version
from nanstop.session.shared.conclusion import Conclusion, as_text, from_text
from nanstop.session.shared.device_audit import audit_devices

_log = logging.getLogger("nanstop")


@record
class _Part:
    """What one rank says of its own part of a failing window. ``fails``: whether it does so by
    itself, None where that cannot be tried; ``arrived``: only by what a collective brought;
    ``communicates``: whether it came to any; ``reads``: whether what they bring makes a difference
    to it, None where that cannot be told; ``bad_micro``: the first whose loss was not finite;
    ``since``: the steps that it can go back to.
    """

    fails: bool | None
    arrived: bool
    communicates: bool
    reads: bool | None
    bad_micro: int | None
    num_micros: int
    step: int
    since: tuple[int, ...]
    policy: Policy


@dataclass(frozen=True, slots=True)
class Meeting:
    """``leader``: the rank that looks into the failure, the first of those that it was ``born_on``
    (None: nobody was asked, or could tell). ``broken_by``: the update that broke the weights of
    all, where they have the way back to it. ``devices``: what those of all ranks make of a
    micro-batch that has failed and does not fail again.
    """

    ranks: Ranks = ONE_RANK
    leader: int = 0
    born_on: tuple[int, ...] | None = None
    broken_by: FailingStep | None = None
    devices: DeviceFacts | None = None

    @property
    def agreed(self) -> bool:
        """Whether several ranks have met."""
        return self.ranks.size > 1

    @classmethod
    def over(
        cls, ranks: Ranks, step: Step | None, policy: Policy, broken: WayBack | None = None
    ) -> Meeting:
        """Return the meeting over a window that fails, each rank's own part of which is run again,
        undone; of this rank alone where the others cannot be met.

        ``broken``: the way back to weights that were not yet, where they are.
        """
        if ranks.size == 1 or step is None:
            return cls()
        try:
            own = _own_part(step, ranks, policy, broken)
            told = ranks.gather("part", f"{own_version()}\n{codec.to_json(own)}", patient=True)
            _require_one_version(told)
            parts = [codec.from_json(_Part, one.partition("\n")[2]) for one in told]
            _require_alike(parts)
            broken_by = None
            if broken is not None and all(part.since == own.since for part in parts):
                broken_by = breaking_update_of_all(broken, ranks)
        except Exception as error:  # whatever it is, the others must not wait for this rank
            ranks.leave(getattr(error, "message", f"{type(error).__name__}: {error}"))
            return cls()
        step.collectives.absent = not any(part.communicates for part in parts)
        step.collectives.unread = {part.reads for part in parts} - {None} == {False}
        failing = tuple(rank for rank, part in enumerate(parts) if part.fails)
        born_on = tuple(rank for rank in failing if not parts[rank].arrived) or failing
        bad_losses = (rank for rank, part in enumerate(parts) if part.bad_micro is not None)
        leader = (*born_on, *bad_losses, 0)[0]
        asked = born_on or all(part.fails is not None for part in parts)
        devices = None
        if asked and not born_on and broken_by is None:
            devices = _devices(step, parts[leader].bad_micro or 0, ranks, leader)
        return cls(ranks, leader, born_on if asked else None, broken_by, devices)

    def conclusion(
        self, own: Callable[[], Conclusion | None], follow: Callable[[Conclusion], None]
    ) -> Conclusion | None:
        """Return what several ranks come to: what the leader's ``own`` look does, which the others
        ``follow``; None: nothing is left to decide, or the leader did not come to an end.
        """
        leads = self.leader == self.ranks.rank
        try:
            end = own() if leads else None
        except Exception as error:  # nanstop is never the reason a run dies
            _log.warning("nanstop: the failure was not investigated (%s)", error)
            problem = f"rank {self.leader} could not look at the failure"
            self.ranks.leave(problem)
            raise NanstopError(problem) from error
        try:
            told = self.ranks.gather("conclusion", as_text(end), patient=True)
            if not leads:
                end = from_text(told[self.leader])
        except NanstopError as error:
            self.ranks.leave(error.message)
            raise
        if end is not None and not leads:
            follow(end)
        return end


ALONE = Meeting()


def _devices(step: Step, micro: int, ranks: Ranks, source: int) -> DeviceFacts | None:
    try:
        return audit_devices(step, micro, ranks, source)
    except NanstopError as error:
        _log.warning("nanstop: devices were not compared (%s)", error.message)
        return None


def _own_part(step: Step, ranks: Ranks, policy: Policy, broken: WayBack | None) -> _Part:
    """Return this rank's part, run again with the collectives in place. Every rank calls it.

    Errors: ``NanstopError`` where a rank does not come to them.
    """
    made, runs = step.collectives, _runs(step, ranks)
    bad = (m for m, loss in enumerate(step.losses) if loss is not None and has_bad(loss))
    fails = any(run.failed for run in runs) if runs else None
    arrived = reads = None
    if runs and any(made.noted(micro) for micro in range(len(runs))):
        arrived = bool(fails) and not _fails_alone(step, runs)
        reads = _reads(step, runs)
    return _Part(
        fails=fails,
        arrived=bool(arrived),
        communicates=bool(made.stopped) or any(made.noted(m) for m in range(len(step.batches))),
        reads=reads,
        bad_micro=next(bad, None),
        num_micros=len(step.batches),
        step=step.id.step,
        since=tuple(one.id.step for one in broken.steps) if broken is not None else (),
        policy=policy,
    )


def _runs(step: Step, ranks: Ranks) -> list[Attempt]:
    """Return a run of each micro-batch, [] where one cannot be run again."""
    obstacle = "" if step.is_local else "it needs the other processes"
    try:
        with step.isolated():
            step.collectives.stopped = ""
    except Exception as error:  # it cannot be run again
        obstacle = str(error)
    if any(ranks.gather("runs", obstacle)):
        return []
    with step.collectives.together(ranks):
        runs = [attempt(step, micro) for micro in range(len(step.batches))]
    again = zip(runs, step.losses, strict=True)
    lost = any(run.error is not None and loss is not None for run, loss in again)
    return [] if lost or step.collectives.stopped else runs


def _fails_alone(step: Step, runs: list[Attempt]) -> bool:
    """Return whether a run fails where everything that the others bring is finite."""
    with step.collectives.changed(finite):
        return any(attempt(step, micro).failed for micro, run in enumerate(runs) if run.failed)


def _reads(step: Step, runs: list[Attempt]) -> bool | None:
    """Return whether a healthy run depends on what the others bring; None: there is none."""
    healthy = [m for m, run in enumerate(runs) if not run.failed and step.collectives.noted(m)]
    with step.collectives.changed(other):
        changed = [attempt(step, micro).digest != runs[micro].digest for micro in healthy]
    return any(changed) if changed else None


def _require_one_version(told: Sequence[str]) -> None:
    """Errors: ``NanstopError`` where ranks have different versions of nanstop, of which nothing
    else that they say can be compared.
    """
    first, *others = (one.partition("\n")[0] for one in told)
    for rank, version in enumerate(others, 1):
        if version != first:
            raise NanstopError(
                f"ranks 0 and {rank} have different versions of nanstop: {first} and {version}"
            )


def _require_alike(parts: list[_Part]) -> None:
    """Errors: ``NanstopError`` where ranks differ in what they must have in common."""
    first = parts[0]
    for rank, part in enumerate(parts):
        if part.policy != first.policy:
            raise NanstopError(f"ranks 0 and {rank} have different policies")
        if (part.step, part.num_micros) != (first.step, first.num_micros):
            raise NanstopError(
                f"rank 0 is at step {first.step} of {first.num_micros} micro-batches, rank {rank} "
                f"at step {part.step} of {part.num_micros}"
            )


def breaking_update_of_all(rewind: WayBack, ranks: Ranks) -> FailingStep | None:
    """Return the failing step of the update that broke the weights of all ranks, which make the
    kept windows together again; else None.

    It begins right before that update, and has the gradients that all of them came to. Every rank
    calls this with the same windows. Errors: ``NanstopError`` where one does not come along.
    """
    root = rewind.steps[0].view.root if rewind.steps else None
    if root is None or not broken_weights(root):
        return None
    before: Snapshot | None = None
    with rewind.rewound():
        for step in rewind.steps:
            before = Snapshot(trainable_of(step.view), spent=before)
            with step.collectives.together(ranks):
                apply_update(step)
            if broken_weights(root):
                micros = tuple(range(len(step.batches)))
                at_it = Rewind(before, (step,))
                return FailingStep(step, 0, micros, phase="optimizer", update=True, rewind=at_it)
            step.collectives.forget_shared()
    return None
