"""What every kind of raw loop shares.

One session, and what is done about the ends of its windows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanstop.decide.decision import STOPPED, Decision
from nanstop.decide.policy import GIVEN_UP, RAISED
from nanstop.detect.numeric_errors import phase_of
from nanstop.detect.sentinel import Reading, read_window, total_norm
from nanstop.detect.signals import Alarm, alarm, alarm_of_exception, alarm_of_reading, arrived
from nanstop.hosts.data_rows import DataRows
from nanstop.hosts.loop.bare_weights import with_bad_bare
from nanstop.hosts.loop.facts import facts_of_loop, present_rank
from nanstop.hosts.loop.gated_update import GatedUpdate, can_be_gated
from nanstop.hosts.loop.rates import learning_rates
from nanstop.hosts.loop.step import LoopStep
from nanstop.hosts.model.hook_writes import HookWrites
from nanstop.hosts.model.left_weights import LEFT
from nanstop.hosts.model.view import PlainView
from nanstop.hosts.tape.taped_micro import TapedMicro
from nanstop.hosts.window.ending import Ending
from nanstop.hosts.window.ends import WindowEnds
from nanstop.numerics.tensors import nonfinite
from nanstop.numerics.trained import held_by
from nanstop.records import Atom, Phase, RunFacts, Signal, StepId
from nanstop.records.facts import HOOKED
from nanstop.replay.conditions import eager
from nanstop.replay.step import ModelView, parameters_of
from nanstop.session.watched_run import OpenSession, WatchedRun
from nanstop.tracing.places import Line


class LoopController:
    """One session of raw loops: opens it late, numbers the updates.

    See ``hosts.window.host.WindowHost``.
    """

    def __init__(self, open_session: OpenSession) -> None:
        self.session: WatchedRun | None = None  # until a training has begun
        self.facts = RunFacts(host="loop")
        self.num_updates = 0
        self.usual_rates: deque[tuple[Any, ...]] = deque(maxlen=512)
        self._open_session = open_session
        self._finished = False
        self._stopped = False
        self._until_update = ExitStack()
        self._follows_next, self._leaves_to_scaler = False, True
        """Whether the last model was let go of: the run is of the next one at once."""
        self.view: ModelView | None = None
        """Of what was trained last."""
        self.hooks: HookWrites | None = None
        """What has been looked for since the first micro-batch."""
        self.ends = WindowEnds(self)
        self.data_rows = DataRows("the data set")
        self.latest_norm: float | None = None
        """Of the gradients of the last window, None where they were not measured."""

    def open(self, view: PlainView, written: Collection[str] = (), **known: Any) -> None:
        """Open the session once; ``known`` are further fields of ``RunFacts``. ``written``: weights
        that the first forward has set, of which nobody knows what they were before.
        """
        if self.session is None:
            facts = facts_of_loop(view, **known)
            odd = tuple(one for one in facts.odd_weights if one.name not in written)
            self.facts = replace(facts, odd_weights=odd)
            self.session = self._open_session(view, self.facts)
            self.session.present = self.step_id
            self.session.rows_of = self.data_rows.rows_of
            self.session.start()
            self.look_at_hooks(view.root)

    def step_id(self, micro: int | None = None) -> StepId:
        """Return which step this is; ``step`` counts the updates that were seen, from 0."""
        return StepId(run="loop", step=self.num_updates, micro=micro, rank=present_rank())

    def note_rates(self, optimizer: Optimizer | None) -> tuple[Any, ...]:
        """Return the present learning rates and remember them as the run's own."""
        rates = learning_rates(optimizer)
        if not self.usual_rates or self.usual_rates[-1] != rates:
            self.usual_rates.append(rates)
        return rates

    def judge(
        self,
        step: LoopStep,
        norm: Tensor | None,
        found_inf: Sequence[Tensor] = (),
        *,
        can_redo: bool = True,
        rest: bool = False,
        anew: Callable[[], Tensor | None] | None = None,
        gated: GatedUpdate | None = None,
    ) -> Ending:
        """Read the window's flag and carry out what the session resolves.

        One device synchronisation. ``gated``: the update, which the device may have by now.

        Without ``can_redo`` the update is left out where it would be redone: its gradients are
        already in use. ``rest``: see ``WindowEnds.close``. ``anew``: returns the norm of gradients
        that were just made. Errors: ``TrainingStopped`` where that is resolved; the update may not
        be applied then.
        """
        given = [(norm, found_inf)]

        def read() -> Reading:
            if gated is not None and given:
                given.clear()
                return gated.read()
            measure = anew or partial(_norm_anew, step)
            norm, found = given.pop() if given else (measure(), ())
            losses = [loss for loss in step.losses if loss is not None]
            if norm is None:
                norm = torch.zeros((), device=next((t.device for t in (*found, *losses)), None))
            return read_window(losses, norm, found)

        self._note_hook_writes()
        is_late = gated is not None and gated.is_launched
        if self._follows_next:
            self._follow(step.view)
        ending, self.view = Ending(), step.view
        self.ends.close(step, read, ending, can_redo=can_redo, rest=rest, late=is_late)
        reading = ending.reading if norm is not None else None
        self.latest_norm = reading.norm if reading is not None else None
        return ending

    def gated(self, step: LoopStep, norm: Tensor | None) -> GatedUpdate | None:
        """Return the update of a window whose values need not be waited for before it is launched,
        None where they do: the device leaves it out where they are bad.
        """
        if self.session is None or step.view.scaler is not None:
            return None
        if norm is None or not can_be_gated(step.view.optimizer, norm):
            return None
        if not self.ends.may_read_late(step):
            return None
        try:
            return GatedUpdate(step, norm)
        except RuntimeError:  # no pinned memory is to be had: it is waited for
            return None

    def look_at_hooks(self, root: nn.Module) -> None:
        """Find out in the next backward whether hooks of a model update its weights, once a run."""
        if self.hooks is None:
            self.hooks = HookWrites(root)

    def _note_hook_writes(self) -> None:
        if self.hooks is not None and self.session is not None and self.hooks.seen():
            self.learned(veto=HOOKED)

    def learned(self, **facts: Any) -> None:
        """Have the set-up looked at once more: these fields of the facts are others now."""
        self.facts = replace(self.facts, **facts)
        if self.session is not None:
            self.session.learned(**facts)

    def raised(
        self, step: LoopStep, error: Exception, phase: Phase | None = None, line: Line = None
    ) -> None:
        """Report an exception that says that a number was bad; ``phase``: what was under way, and
        ``line`` where in the script, by default as the exception says it.

        The caller raises it again unchanged.
        """
        if self._follows_next:
            self._follow(step.view)
        path, is_off = self.facts.gradient_path, not torch.is_grad_enabled()
        if path is not None and path.is_off != is_off:
            self.learned(gradient_path=replace(path, is_off=is_off))
        at = self.step_id(len(step.micros) - 1)
        found = alarm_of_exception(step.view, at, error, phase or phase_of(error), line)
        self.ends.ask(step, replace(found, no_redo=RAISED, is_past=True))

    def given_up(self, step: LoopStep, why: str = GIVEN_UP) -> None:
        """Report a micro-batch, the last of ``step``, that the script skipped because its loss is
        not finite. ``why``: there is nothing to make anew.

        Errors: ``TrainingStopped`` where that is resolved.
        """
        if self._follows_next:
            self._follow(step.view)
        at, loss = self.step_id(len(step.micros) - 1), step.micros[-1].loss
        value = float(loss) if loss is not None else None
        signal = Signal(
            source="loss", name="loss", value=value, message="skipped by the script", at=at
        )
        found = alarm(step.view, at, (signal,), "forward")
        self.ends.ask(step, replace(found, no_redo=why, is_past=True))

    def fails_again(self, step: LoopStep) -> bool:
        """Return whether the only micro-batch of a step can be run again, and fails; if that takes
        other ranks, whether it can be.
        """
        from nanstop.replay.rerun import attempt  # a healthy run has no use for it

        return not step.obstacle() and (not step.is_local or attempt(step, 0).failed)

    def evaluated(self, step: LoopStep, value: float) -> bool:
        """Report a model call without gradients, the only micro-batch of ``step``, if it fails when
        it is made again; return whether it does. ``value``: what the script read of it.

        Errors: ``TrainingStopped`` where that is resolved.
        """
        if not self.fails_again(step):
            return False
        signal = Signal(source="loss", name="eval_loss", value=value, at=step.id)
        self.ends.ask(step, alarm(step.view, step.id, (signal,), "evaluate"))
        return True

    def completed(self, optimizer: Optimizer | None = None, *, applied: bool = True) -> None:
        """Note that the window is over, with an update of this optimizer."""
        self._until_update.close()
        self._stopped = False  # the script goes on all the same
        if self.session is not None:
            whose = id(optimizer) if optimizer is not None else None
            note = self.session.completed if applied else self.session.left_out
            note(self.num_updates, optimizer=whose)
        self.num_updates += 1

    def finish(self, exit_code: int = 0) -> None:
        """Finish the session, once.

        Errors: ``TrainingStopped`` where the last update broke weights and that is resolved.
        """
        if self.session is None or self._finished:
            return
        self._finished = True
        if self.hooks is not None:
            self.hooks.stop()
        try:
            self._end(is_well=not exit_code)
        finally:
            self.session.finish(STOPPED if self._stopped else exit_code)

    def _end(self, *, is_well: bool) -> None:
        if self.view is not None:
            odd = self.ends.end(self.view, self.step_id(), is_well=is_well)
            LEFT.note(odd, loaded=self.facts.odd_weights)

    def let_go(self) -> None:
        """Look once more at what was trained last and hold it no more: a script that goes on trains
        another model.
        """
        self._end(is_well=True)
        self.ends.begin()
        self.view, self._follows_next = None, True
        if self.session is not None:
            self.session.follow(PlainView(nn.Module()))

    def _follow(self, view: ModelView) -> None:
        self._follows_next = False
        if self.session is not None:
            self.session.follow(view)

    @contextmanager
    def without_scaler(self) -> Iterator[None]:
        """Have an overflow inside be no scaler's own: the script raises before it gets there."""
        self._leaves_to_scaler = False
        try:
            yield
        finally:
            self._leaves_to_scaler = True

    # ---- what a window's end asks for

    def alarm_of(self, step: LoopStep, reading: Reading) -> Alarm | None:
        found = alarm_of_reading(step, reading, step.has_spoilt_buffers)
        seen = found is not None and not found.harmless
        if not (seen or reading.quiet) and nonfinite(step.replicas.parts()):
            found = arrived(step) if found is None else replace(found, harmless=False)
        if found is None:
            return None
        try:
            if step.is_local:
                _refuse_what_raises(step)
            is_left = self._leaves_to_scaler and found.phase == "backward"
            is_scalers = is_left and _is_scalers_own(step)
        except KeyboardInterrupt as interrupt:  # what was noticed is told all the same
            return replace(found, interrupt=interrupt)
        if is_scalers:
            return None
        step.view = with_bad_bare(step.view)
        return found

    def redo(self, step: LoopStep, atoms: Mapping[int, tuple[Atom, ...]]) -> None:
        step.redo(atoms, self._until_update)

    def update_anew(self, steps: Sequence[LoopStep]) -> None:
        # All that an investigation needs comes with it, which a healthy run has no use for.
        from nanstop.prove.failing_step import apply_update

        for step in steps:
            apply_update(step)

    def leave_out(self, step: LoopStep) -> None:
        """Put buffers back where a bad forward has left NaN in them, and have its backward give
        nothing to what another optimizer updates later.

        Running statistics would keep it for good, and gradients until they are cleared.
        """
        if nonfinite({str(place): one for place, one in enumerate(step.buffers.tensors())}):
            with step.buffers.rewritten(step.start):
                step.buffers.restore(step.start)
        if step.view.optimizer is not None and step.view.scaler is None:
            own = set(map(id, held_by(step.view.optimizer)))
            rest = [p.grad for p in parameters_of(step.view).values() if id(p) not in own]
            given = {str(place): grad for place, grad in enumerate(rest) if grad is not None}
            for name in nonfinite(given):
                given[name].zero_()

    def stop(self, decision: Decision) -> None:
        self._stopped = True
        raise decision.error


def _refuse_what_raises(step: LoopStep) -> None:
    """Count micro-batches that went through once and raise when they are run again as not
    replayable: something in them can be called once only. Runs a failing window again, undone.
    """
    from nanstop.replay.rerun import attempt  # a healthy run has no use for it

    taped = [(p, m) for p, m in enumerate(step.micros) if isinstance(m, TapedMicro)]
    for place, micro in taped:
        if micro.loss is None or step.obstacle():
            return
        tried = attempt(step, place, under=eager)
        if step.collectives.stopped:
            return  # which it is together with the other processes
        if not tried.failed and micro.hooks:
            micro.is_hooked = True
            hooked = attempt(step, place, under=eager)
            micro.is_hooked = hooked.failed and hooked.error is None
        error = tried.error
        if error is not None:
            micro.refuse(f"what it calls cannot be called again ({type(error).__name__}: {error})")


def _norm_anew(step: LoopStep) -> Tensor:
    """Return the norm of gradients that were just made, at a loss scale of 1."""
    norm = total_norm(parameters_of(step.view).values())
    scaler = step.view.scaler
    return norm / scaler.get_scale() if scaler is not None and scaler.is_enabled() else norm


def _is_scalers_own(step: LoopStep) -> bool:
    """Return whether gradients overflow only because of the loss scale, which the scaler then
    lowers by itself.

    The window is run again at scale 1, undone.
    Where it cannot be, a scale above 1 is taken as the cause.
    """
    scaler = step.view.scaler
    if scaler is None or not scaler.is_enabled():
        return False
    if step.obstacle() or step.facts.world_size > 1:
        return scaler.get_scale() > 1
    try:
        with step.isolated(), _unit_scale(scaler):
            for place in range(len(step.micros)):
                step.run(place)
            gradients = {name: p.grad for name, p in parameters_of(step.view).items()}
            return not nonfinite(gradients)
    except Exception:  # the script's own code, run once more: whatever it raises is no answer
        return scaler.get_scale() > 1


@contextmanager
def _unit_scale(scaler: Any) -> Iterator[None]:
    scale = scaler._scale
    scaler._scale = torch.ones_like(scale)
    try:
        yield
    finally:
        scaler._scale = scale
