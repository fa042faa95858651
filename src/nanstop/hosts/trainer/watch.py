"""Watches a transformers or TRL trainer.

Every patch is on the instance, stands in one table and is undone by ``close``.

Two seams carry it: ``_prepare_inputs``, whose output a replay starts from, and
``accelerator.clip_grad_norm_``, the window's end, where the losses and the norm are read before the
update and a window can be redone or skipped. A trainer that clips by means of its own, or not at
all, comes to that end when its callbacks hear of the update.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanstop.decide.decision import STOPPED, Decision
from nanstop.diagnose.evidence.objective import INF, NAN
from nanstop.errors import NanstopError, TrainingStopped
from nanstop.hosts import compat
from nanstop.hosts.data_rows import TrainerRows
from nanstop.hosts.model.hook_writes import HookWrites
from nanstop.hosts.model.left_weights import LEFT
from nanstop.hosts.model.loaded_weights import LOADED
from nanstop.hosts.patching import Patches
from nanstop.hosts.trackers import Incidents
from nanstop.hosts.trainer.accounts import TrainerAccounts
from nanstop.hosts.trainer.actions import Carrier
from nanstop.hosts.trainer.callbacks import CallbackWrites, Trackers
from nanstop.hosts.trainer.facts import facts_of
from nanstop.hosts.trainer.guards.checkpoints import CheckpointGuard
from nanstop.hosts.trainer.guards.evaluation import EvaluationGuard
from nanstop.hosts.trainer.objective import Objective, bad_weights_of_rewards, has_own_loss
from nanstop.hosts.trainer.sinks import TrainerSinks
from nanstop.hosts.trainer.steps.micros import TrainerMicro, TrainerWindow
from nanstop.hosts.trainer.steps.reentry import Reentry
from nanstop.hosts.trainer.view import HfView
from nanstop.hosts.trainer.windows import TrainerWindows
from nanstop.records import RunFacts, SourceLine, StepId
from nanstop.records.facts import HOOKED
from nanstop.session.telling.numbers import numbers
from nanstop.session.watched_run import OpenSession, WatchedRun
from nanstop.store.beside_weights import plan_beside
from nanstop.tracebacks import passes_through

__tracebackhide__ = passes_through


_log = logging.getLogger("nanstop")
LinesOf = Callable[[Any], "dict[str, SourceLine | None]"]


def watch_trainer(
    trainer: Any, open_session: OpenSession, *, lines_of: LinesOf = lambda _: {}
) -> TrainerWatch:
    """Watch ``trainer`` from its next ``train()`` on and return the watch, which ``close()`` ends.

    ``lines_of`` returns the lines that made an optimizer and its schedule, as fields of
    ``RunFacts``.
    ``open_session(view, facts)`` is called once, when the optimizer exists. Nothing is attached to
    the model. Errors: ``NanstopError`` for a trainer that lacks what a watch holds on to; it is
    left as it was.
    """
    missing = compat.missing_seams(trainer)
    if missing:
        raise NanstopError(f"{compat.described(trainer)} has no {' and no '.join(missing)}")
    watch = TrainerWatch(trainer, open_session)
    watch.lines_of = lines_of
    watch.install()
    return watch


class TrainerWatch:
    """The watch on one trainer. ``session`` is None until training has begun."""

    def __init__(self, trainer: Any, open_session: OpenSession) -> None:
        self.trainer = trainer
        self.session: WatchedRun | None = None
        self.view = HfView(trainer)
        self.facts = RunFacts()
        self.patches = Patches()
        self.host = Reentry(trainer)
        self.carrier = Carrier(self.host)
        self.objective = Objective(trainer, self._note_objective)
        self.rows = TrainerRows(trainer)
        self.lines_of: LinesOf = lambda _: {}
        self._open_session = open_session
        self._train = trainer.train
        self._logged = torch.zeros(())
        self._training = self._is_over = False
        self._attached = self._has_read_judges = False
        self._folder: tuple[Any, str] = (None, "")
        """The trainer's folder, and its last name."""
        self._num_logs = 0
        self.windows = TrainerWindows(self)
        self._accounts = TrainerAccounts(self, TrainerWatch._on_train.__code__)
        self._resumed_from: str | None = None
        self._stop: Decision | None = None
        self._hooks = HookWrites(nn.Module())
        self._callback_writes = CallbackWrites()
        writes = self._callback_writes
        self._sinks = TrainerSinks(self, self.windows, self._accounts, writes)
        self._trackers = Trackers(self._numbers)
        self._incidents = Incidents(self._trackers.sends)

    def _numbers(self) -> dict[str, float]:
        """Return what goes into a row of the training log, for which the loss has been read."""
        return numbers(self.session, reads=True) if self.session else {}

    def install(self) -> None:
        """Put every patch in place; those of the window's end follow when training begins."""
        self.patches.set(self.trainer, "train", self._on_train)
        self.patches.set(self.trainer, "training_step", self._on_training_step)
        self.patches.set(self.trainer, "_prepare_inputs", self.host.prepare)
        log = self.trainer._maybe_log_save_evaluate
        self.patches.set(self.trainer, "_maybe_log_save_evaluate", partial(self._on_log, log))
        self.objective.install(self.patches)
        self.host.within.install(self.patches)
        self.rows.install(self.patches)
        EvaluationGuard(self, self.windows.ends).install()
        CheckpointGuard(self, self.windows.ends).install()

    def close(self) -> None:
        """Restore every patched attribute; calling it again does nothing."""
        self.patches.undo()
        self._trackers.end()
        self._incidents.end()

    def end(self) -> None:
        """Close, and end a session that was opened for an evaluation outside of a training."""
        if self.session is not None and not self._is_over:
            self._end(self.session, 0)
        self.close()

    def open(self) -> None:
        """Open the session, or begin it anew.

        Once a training, when model and optimizer are those that train.
        """
        if self._attached:
            return
        self._attached = True
        # A resumed training has the logs of its checkpoint, which are of steps nobody watched.
        self._num_logs = len(self.trainer.state.log_history)
        self.host.attach()
        self.windows.ends.begin()
        if self.session is None:
            self.session = self._open_session(self.view, self.facts)
        session = self.session
        session.rows_of, session.decode = self.rows.rows_of, self.rows.decode
        session.written_by = self._callback_writes.to_each
        session.prepare()
        facts = facts_of(self.view, self.trainer, resumed=self._resumed_from)
        lines: Any = self.lines_of(self.view.optimizer)
        facts = replace(facts, loaded=LOADED.facts(self.view.root), **lines)
        if not self._training and self.trainer.state.global_step:  # the training may have made them
            facts = replace(facts, odd_weights=())
        session.facts = self.facts = facts
        alone = self.facts.world_size == 1 and not self.facts.compiled
        self.host.may_tape = alone and has_own_loss(self.trainer)
        session.start(trains=self._training)
        if self.facts.world_size == 1:
            self._callback_writes.begin(self.view.root)
        self._trackers.begin(self.trainer)
        self._incidents.follow(session)
        self._hooks.stop()
        self._hooks = HookWrites(self.view.root)
        try:
            session.resume(plan_beside(self._resumed_from), str(self._resumed_from))
        except NanstopError as error:
            _log.warning("the plan of the checkpoint is not used: %s", error)

    def note_hook_writes(self) -> None:
        if self.session is not None and self._hooks.seen():
            self.facts = replace(self.facts, veto=HOOKED)
            self.session.learned(veto=HOOKED)

    def _opened(self) -> bool:
        """Open the session.

        Where that fails, end the watch, say so, and let the training go on without it.
        """
        try:
            self.open()
        except NanstopError:
            raise
        except Exception as error:
            self.close()
            self._training, self.session = False, None
            _log.warning("nanstop: %s", compat.not_watched(self.trainer, error))
        return self._training

    def step_id(self, *, step: int | None = None, micro: int | None = None) -> StepId:
        """Return the id of the trainer's present step, or of the one given."""
        args = self.trainer.args
        if args.output_dir != self._folder[0]:
            self._folder = args.output_dir, Path(args.output_dir or "").name
        run = args.run_name or self._folder[1] or type(self.trainer).__name__
        index = self.trainer.state.global_step if step is None else step
        return StepId(run=run, step=index, micro=micro, rank=args.process_index)

    def stop(self, decision: Decision) -> None:
        """Have the host end training as early stopping does.

        ``train()`` then raises, if the policy says so.
        """
        self._stop = decision
        self.trainer.control.should_training_stop = True

    # ---- calls of the host

    def _on_train(self, *args: Any, **kwargs: Any) -> Any:
        self._training, self._attached, exit_code = True, False, 0
        self._sinks.window = None
        self._logged = torch.zeros((), device=self.trainer.args.device)
        self._stop = None
        given = args[0] if args else kwargs.get("resume_from_checkpoint")
        self._resumed_from = compat.checkpoint_path(self.trainer, given)
        accelerator = self.trainer.accelerator
        if not self.patches.holds(accelerator, "clip_grad_norm_"):
            self._sinks.install()
            callbacks = self.trainer.callback_handler
            mark = partial(self._callback_writes.heard, callbacks, callbacks.call_event)
            self.patches.set(callbacks, "call_event", mark)
            self._accounts.install()
        try:
            output = self._train(*args, **kwargs)
        except BaseException as error:
            exit_code = STOPPED if isinstance(error, TrainingStopped) else 1
            if isinstance(error, Exception):
                self.windows.raised_between(error)
            raise
        finally:
            self._training = False
            self._hooks.stop()
            self._accounts.end()
            self.rows.end()
            if self.session is not None:
                self._end(self.session, exit_code)
            self._callback_writes.end()
        # A search goes on with its next trial: this one has ended early.
        if not self.trainer.state.is_hyper_param_search:
            self._raise_stopped()
        return output

    def _raise_stopped(self) -> None:
        stop = self._stop
        if stop is not None and stop.on_stop == "raise":
            raise stop.error

    def _on_training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        if not self._training or self.host.replaying is not None:
            return self.host.training_step(model, inputs, num_items_in_batch)
        if not self._attached and not self._opened():
            return self.host.training_step(model, inputs, num_items_in_batch)
        window = self._current_window()
        self._accounts.forward()
        sync = self.trainer.accelerator.gradient_state.sync_gradients
        micro = TrainerMicro(model, inputs, num_items_in_batch, sync)
        window.micros.append(micro)
        try:
            self.host.record(micro)
        except Exception as error:
            if not self.windows.raised(window, error):
                self._sinks.window = None
                raise
        assert micro.loss is not None
        self.objective.compare(micro.batch)
        if self.facts.world_size > 1 and micro.reduced:
            at = self.step_id(step=window.index)
            self.host.shared.compare((micro.model,), at, self.session, micro.batch)
        return micro.loss

    def _on_log(self, log: Any, total: Tensor, norm: Any, *args: Any, **kwargs: Any) -> None:
        anew, self._sinks.norm_anew = self._sinks.norm_anew, None
        self.carrier.mend_sum(total)
        before = self.trainer._globalstep_last_logged
        log(total, norm if anew is None else anew, *args, **kwargs)
        if self.trainer._globalstep_last_logged != before:
            self.carrier.mend_reset(total)
        self._logged = total.clone()

    # ---- the window

    def _current_window(self) -> TrainerWindow:
        window, index = self._sinks.window, self.trainer.state.global_step
        if window is None or window.closed or window.index != index:
            if self._stop is not None:
                self._raise_stopped()  # the host has passed its own door by
            self._step_done()
            self.carrier.begin_window()
            rates = self.host.learning_rates()
            window = self._sinks.window = TrainerWindow(index, rates, self._logged)
        return window

    def _note_objective(self, name: str, value: Any) -> None:
        if self.session is None:
            return
        self.session.series.add(name, self.trainer.state.global_step, value)
        known, is_bad = self.facts.objective, name.startswith((NAN, INF))
        if is_bad and known is not None and known.reward_models and not self._has_read_judges:
            self._has_read_judges = True
            found = replace(known, bad_weights=bad_weights_of_rewards(self.trainer))
            self.facts = replace(self.facts, objective=found)
            self.session.learned(objective=found)

    def _step_done(self) -> None:
        """Tell the session that the previous step is over, with what the host has logged since."""
        session = self.session
        pending = self._sinks.pending
        if pending is None or session is None:
            return
        logs = self.trainer.state.log_history
        new = logs[self._num_logs :]
        losses = [entry for entry in new if "loss" in entry] if new else []
        for entry in losses:
            session.series.add("loss_logged", entry["step"], float(entry["loss"]))
            session.series.log(entry["step"], entry)
        if losses:
            session.logged()
        self._num_logs = len(logs)
        (session.completed if self.windows.applied else session.left_out)(pending)
        self._sinks.pending = None

    def _end(self, session: WatchedRun, exit_code: int) -> None:
        self._trackers.end()
        self._step_done()
        self.carrier.close()
        self.carrier.begin_window()
        odd = self.windows.ends.end(self.view, self.step_id(), is_well=not exit_code)
        LEFT.note(odd, loaded=self.facts.odd_weights)
        session.finish(exit_code or (STOPPED if self._stop is not None else 0))
        self._is_over = True
        self._incidents.end()
