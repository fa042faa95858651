"""The looks at a healthy run. None of them ends it: one that fails is told and left out."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from nanstop.detect.arrival.copied_units import CopiedUnits, names_of_copied
from nanstop.detect.arrival.never_reached import MOST_UPDATES, NeverReached
from nanstop.detect.arrival.replaced_parts import ReplacedParts
from nanstop.detect.early_steps import EarlySteps, is_early
from nanstop.detect.first_rows import FirstRows
from nanstop.detect.gauge import WIDE_SHARE, Gauge
from nanstop.detect.left_modes import LeftModes
from nanstop.detect.rates.used import Rates
from nanstop.detect.zero_gradients.causes import none_arrives
from nanstop.detect.zero_gradients.flat_steps import UPDATES
from nanstop.detect.zero_gradients.gradient_end import gradient_end
from nanstop.detect.zero_gradients.standstill import ELSEWHERE, Standstill
from nanstop.diagnose.diagnose import examine
from nanstop.diagnose.evidence.accounts import DECAYED, GROWS
from nanstop.numerics.room import let_go, require
from nanstop.records import (
    DataFacts,
    Evidence,
    GradientAccount,
    GradientPath,
    Localization,
    Probe,
    ResumeFacts,
    RunFacts,
    Series,
    StepId,
)
from nanstop.records.facts import BY_HAND
from nanstop.records.vocabulary import ROOM
from nanstop.replay.conditions import unrecorded
from nanstop.replay.copies.rewind import MOST_APART
from nanstop.replay.step import ModelView, parameters_of, room_made
from nanstop.session.findings import Findings
from nanstop.session.run_state import RunState
from nanstop.session.sampled_ranges import SampledRanges

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from nanstop.decide.agreement import Ranks
    from nanstop.replay.step import Step


_ACCOUNTS = 6


class Looks:
    """What is looked at in the steps of one run; what a look shows goes to its findings.

    ``learned``: told of facts that were read anew, as ``WatchedRun.learned``.
    """

    def __init__(
        self,
        run: RunState,
        findings: Findings,
        *,
        announce: Callable[[str], None],
        learned: Callable[..., None],
        keeps_ranges: bool,
        clock: Callable[[], float],
    ) -> None:
        self._run = run
        self._findings = findings
        self._announce = announce
        self._learned = learned
        self._gauge = Gauge(run.view, clock)
        self._early = EarlySteps(run.view, lambda: self._gauge.formats)
        self._standstill = Standstill()
        self._rates = Rates()
        self._modes = LeftModes()
        self._rows = FirstRows(run.view)
        self._never = NeverReached()
        self._replaced = ReplacedParts()
        self._copies = CopiedUnits()
        self._ranges = SampledRanges(wanted=keeps_ranges)
        self._memory_is_due = True
        """Whether it is to be seen yet what a step reads that nobody has written."""
        self._places: dict[tuple[str, str], int] = {}
        """Of modules and their formats in the order of the forward that was looked at first."""
        self._accounts: defaultdict[str, deque[GradientAccount]] = defaultdict(
            lambda: deque(maxlen=_ACCOUNTS)
        )
        self._audits_over = False
        self._clock, self._not_before = clock, -math.inf
        """When the next micro-batch may be run again, where room had to be made for the last."""
        self._window: StepId | None = None
        """The last window that was healthy before its update."""
        self._numbers: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        """How many updates of each optimizer were near."""
        self._num_apart = 0
        """Windows in a row that were of another model."""

    def before_update(self, step: Step) -> None:
        self._window, optimizer = step.id, step.view.optimizer
        mine = self._run.view
        is_other = step.view is not mine and step.view.root is not mine.root
        self._num_apart = self._num_apart + 1 if is_other else 0
        if self._num_apart >= MOST_APART:
            self._go_on_with(step.view)
        self._standstill.note(self._run.series.last("grad_norm"), step.id.step)
        path = self._run.facts.gradient_path
        if path is not None and path.num_reached is None:
            self._arrived(self._early.arrival.arrived(self._run.facts, step))
        if optimizer is not None:
            number = self._numbers.get(optimizer, 0)
            self._numbers[optimizer] = number + 1
            self._near(step, optimizer, number)
        elif self._run.facts.veto == BY_HAND and step.id.step <= MOST_UPDATES:
            self._never.note(step, step.id.step)
        if self._early.sample is not None or is_early(step.id.step):
            self._look(lambda: self._early.before_update(step, self._run.facts))
        if not self._rows.is_over:
            self._look(lambda: self._counted(self._rows.note(step)))

    def _go_on_with(self, view: ModelView) -> None:
        """Have the run be of another model, unless it is a part of the one so far, or trained by
        the same optimizer: that one is let go of.
        """
        self._num_apart, own = 0, set(map(id, self._run.view.root.parameters()))
        if not own.isdisjoint(map(id, parameters_of(view).values())):
            return
        self._run.follow(view)

    def follow(self, view: ModelView) -> None:
        """Look at another model from here on."""
        self._gauge.drop()
        self._gauge = Gauge(view, self._clock)
        for look in (self._early, self._early.arrival, self._rows):
            look.view = view

    def _near(self, step: Step, optimizer: Optimizer, number: int) -> None:
        """Look at update ``number``, from 0 on, of an optimizer."""
        if number == 0:
            self._early.begins(optimizer)
        if number <= MOST_UPDATES:
            self._never.note(step, number)
        if self._replaced.suspects or is_early(number):
            self._arrived(self._replaced.note(self._run.facts, step, optimizer, number))
        if number in UPDATES:
            self._arrived(self._copied(step, optimizer, number))
        rates = self._rates.note(step, optimizer)
        if rates is not None:
            self._learned(at=self._window, rates=rates)
        mode = self._modes.note(step, optimizer)
        if mode is not None:
            self._learned(at=self._window, mode=mode)
        arrival = self._early.arrival
        share = arrival.replaced(step.view) if number == 0 or arrival.was is not None else 0.0
        if share > 0.0:
            self._learned(resume=replace(self._run.facts.resume or ResumeFacts(), replaced=share))

    def updated(self, step: int) -> None:
        if self._early.arrival.untaken is not None:
            self._arrived(self._early.arrival.unheld())
        if self._early.sample is not None:
            self._look(lambda: self._early.updated(step))
            if self._early.lost is not None:
                self._run.metrics.add("lost", step, self._early.lost)
        if step & (step + 1) == 0:  # a loop has no logs at which its series are looked at
            self._look(self.logged)
        self._findings.updated(step)
        self._follow(step)

    def accounted(self, account: GradientAccount) -> None:
        known = self._accounts[account.optimizer]
        known.append(account)
        facts = self._run.facts
        if account.shrunk > GROWS:
            self._run.series.add(DECAYED, account.at.step, account.shrunk)
        if facts.world_size == 1:
            met = (report.diagnoses[0].code for report in self._run.reports if report.diagnoses)
            told = (*self._findings.told, *met)
            found = Evidence(facts=facts, accounts=tuple(known), at=account.at, told=told)
            for finding in examine(found, "account").diagnoses:
                self._findings.measured(finding)

    def may_wait(self, step: Step) -> bool:
        """Return whether nothing of a window is to be looked at before its update."""
        early, path = self._early, self._run.facts.gradient_path
        number = self._numbers.get(step.view.optimizer, 0) if step.view.optimizer else 0
        if number <= MOST_UPDATES or is_early(number) or is_early(step.id.step):
            return False
        follows = early.sample is not None or early.arrival.was is not None
        is_unknown = path is not None and path.num_reached is None
        return not (follows or is_unknown or self._replaced.suspects or self.due(step.id.step))

    def due(self, step: int) -> bool:
        """Return whether ``again`` has something to look at in a step."""
        if self._clock() < self._not_before:
            return False
        facts, still = self._run.facts, self._standstill
        if self._never.is_due or (still.num_zero and still.due(facts)):
            return True
        if is_early(step) and self._ranges.due(step):
            return True
        return self._gauge.wide_due(facts) or self._early.due(step, facts)

    def again(self, step: Step) -> None:
        """Run one micro-batch of a healthy window again, undone, for all that is due in it.

        Where gradients have to make room for that, it is not done again before it has been a small
        share of the run.
        """
        place, facts, began, takes = None, self._run.facts, self._clock(), 0
        try:
            with room_made(step) as takes:
                require(step.view.device_type, takes)
                place = self._seen_again(step, facts)
        except Exception as error:  # an instrument must not end a healthy run
            let_go(error)
            self._announce(f"ranges could not be sampled ({type(error).__name__}: {error})")
        if takes:
            now = self._clock()
            self._not_before = now + (now - began) / WIDE_SHARE
        if place is not None:
            series, at = self._run.series.recent(), replace(step.id, micro=0)
            self._findings.examine_healthy(
                Evidence(facts=facts, localization=place, series=series, at=at)
            )

    def _seen_again(self, step: Step, facts: RunFacts) -> Localization | None:
        """Return where a wide look has seen a value that is not finite, if it has."""
        place = None
        if self._ranges.due(step.id.step):
            self._ranges.take(step)
        if self._gauge.wide_due(facts):
            place = self._of_memory(step) or self._gauge.wide(step)
        if self._standstill.due(facts):
            elsewhere = self._standstill.take(step)
            self._run.series.add(ELSEWHERE, step.id.step, elsewhere)
            path = facts.gradient_path
            still = self._standstill
            found = none_arrives(step, path, elsewhere, still) if path is not None else None
            if found is None and elsewhere == 0.0:
                # A count in half overflows beside a model of any format.
                place = place or self._gauge.wide(step)
                if place is None and path is not None and not step.calls_script:
                    found = replace(path, end=gradient_end(step))
            if found is not None:
                self._learned(at=step.id, gradient_path=found)
        if self._never.is_due and facts.gradient_path is not None:
            path = self._never.take(step, facts.gradient_path)
            self._learned(at=step.id, **({} if path is None else {"gradient_path": path}))
        if self._early.due(step.id.step, facts):
            self._look(lambda: self._early.again(step, facts))
        return place

    def _of_memory(self, step: Step) -> Localization | None:
        """Return where a step reads what nobody has written; looked for once."""
        from nanstop.localize.memory.unwritten import unwritten_read

        is_due, self._memory_is_due = self._memory_is_due, False
        return unwritten_read(step, 0) if is_due else None

    def logged(self, *, is_over: bool = False) -> None:
        known = tuple(account for account in self._latest if account.is_own)
        series, told = self._run.series.recent(), self._findings.told
        facts = self._run.facts
        self._findings.examine_healthy(
            Evidence(facts=facts, series=series, accounts=known, told=told, is_over=is_over)
        )

    def audit(self, step: Step, ranks: Callable[[], Ranks]) -> None:
        """Compare what the devices of all ranks make of one micro-batch, taking turns whose, where
        the user has asked for it.
        """
        every = self._run.policy.audit_devices
        if not every or self._audits_over or step.id.step % every:
            return
        from nanstop.session.shared.device_audit import audit_devices

        try:
            with unrecorded():
                together = ranks()
                source = step.id.step // every % together.size
                found = audit_devices(step, 0, together, source)
        except Exception as error:  # an instrument must not end a healthy run
            self._audits_over = True
            self._announce(f"devices are not compared any more ({error})")
            return
        if found.op:
            self._audits_over = True
            self._learned(at=step.id, devices=found)

    def drop(self) -> None:
        """Take the gauge off the model, as it is to be before a failure is looked at."""
        self._gauge.drop()

    def finish(self, *, ended_well: bool = True) -> tuple[Series, ...]:
        """Take the last look and return the ranges that were sampled for other runs to be
        compared with.
        """
        self._look(lambda: self.logged(is_over=ended_well))
        self._findings.await_no_longer()
        for rates in self._rates.finished() if ended_well else ():
            self._learned(at=self._window, rates=rates)
        for mode in self._modes.finished():
            self._learned(at=self._window, mode=mode)
        self._counted(self._rows.finished())
        self._gauge.drop()
        return self._ranges.records() or self._run.rooms.records()

    def _copied(self, step: Step, optimizer: Optimizer, number: int) -> GradientPath | None:
        """Return with the path of gradients the weights whose units are copies of each other."""
        path, found = self._run.facts.gradient_path, self._copies.note(optimizer, number)
        if path is None or not found:
            return None
        names = names_of_copied(found, dict(step.view.root.named_parameters()))
        return replace(path, copied=names) if names else None

    def _arrived(self, path: GradientPath | None) -> None:
        if path is not None:
            self._learned(at=self._window, gradient_path=path)

    def _counted(self, data: DataFacts | None) -> None:
        if data is not None:
            self._learned(at=self._window, data=data)

    @property
    def _latest(self) -> tuple[GradientAccount, ...]:
        """The last account of each optimizer."""
        return tuple(known[-1] for known in self._accounts.values())

    def _look(self, look: Callable[[], Probe | None]) -> None:
        """Take a look that may fail, and say what it found. Nobody's recorder hears of it."""
        try:
            with unrecorded():
                found = look()
        except Exception as error:  # an instrument must not end a healthy run
            let_go(error)
            self._announce(f"a look was left out ({type(error).__name__}: {error})")
            return
        if found is not None:
            facts, known = self._run.facts, self._latest
            evidence = Evidence(facts=facts, probe=found, at=found.at, accounts=known)
            for finding in examine(evidence, "gauge").diagnoses:
                self._findings.measured(finding)

    def _follow(self, step: int) -> None:
        """Follow the ranges of the model's modules;
        say once that one is about to leave its format.
        """
        facts = self._run.facts
        if facts.world_size > 1 or facts.compiled:
            return
        try:
            row = self._gauge.stepped(step)
            if self._gauge.room is not None:
                self._run.metrics.add("headroom", step, self._gauge.room)
            for spot, room in self._gauge.rooms.items():
                place = self._places.setdefault((spot.module, spot.dtype), len(self._places))
                name = f"{ROOM}{place:04d} {spot.dtype} {spot.module}"
                self._run.rooms.add(name, step, room)
        except Exception as error:  # an instrument must not end a healthy run
            self._gauge.close()
            self._announce(f"ranges are no longer followed ({type(error).__name__}: {error})")
            return
        if row is not None:
            self._findings.examine_healthy(
                Evidence(facts=facts, ranges=(row,), series=self._run.series.recent())
            )
