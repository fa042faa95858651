"""A raw loop audited: failures planted in its own windows, one after the other.

The loop runs on by itself; after each trial weights, optimizer and scaler are put back. Where a
trial ends the script, the process above starts it again for the trials that are left.
"""

from __future__ import annotations

import atexit
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanstop.commands.doctor.doctor import (
    CLIP,
    SCALER,
    Audit,
    Setting,
    due,
    guards_seen,
    say_how_far,
)
from nanstop.commands.doctor.loop_loss import LoopMode
from nanstop.commands.doctor.planted import (
    LOSSES,
    PoisonedLoss,
    Voices,
    clipping,
    distance,
    gradients_of,
    num_bad,
    num_zero,
    poisoned_gradient,
    scaler_without_check,
    state_tensors,
    target_among,
)
from nanstop.commands.doctor.result import Guard, GuardTrial, Injected
from nanstop.hosts.patch_table import Table
from nanstop.hosts.script import autowatch
from nanstop.numerics.trained import held_by
from nanstop.process.inject import dry_run_child
from nanstop.process.inject.dry_run import DryRun, answered
from nanstop.process.inject.save_nothing import save_nothing
from nanstop.records.codec import from_json, to_json
from nanstop.replay.copies.snapshot import Snapshot, Trainable
from nanstop.store.files import MAX_JSON_BYTES, read_text, write_whole

_WARM = 2
"""Healthy updates before the first failure:
one to learn where the loss is made, one to compare with.
"""


def install(table: Table, dry_run: DryRun) -> None:
    """Audit the loop of the first optimizer that is made, unless a trainer begins to train
    before it steps.
    """
    table.replace(torch.optim.Optimizer, "__init__", _First(table, dry_run))


class _First:
    """Stands in for ``Optimizer.__init__``."""

    def __init__(self, table: Table, dry_run: DryRun) -> None:
        self._table, self._dry_run = table, dry_run
        self._audit: LoopAudit | None = None

    def __call__(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        if self._audit is None and not autowatch.is_paused():
            self._audit = LoopAudit(self._table, self._dry_run)


class LoopAudit:
    """Runs the trials that are due in the windows of a loop, and writes what it saw when none
    is, or the script ends.
    """

    def __init__(self, table: Table, dry_run: DryRun) -> None:
        self._out = Path(dry_run.out)
        known = from_json(Audit, read_text(Path(dry_run.options["known"]), MAX_JSON_BYTES))
        self._guards, self._trials = list(known.guards), list(known.trials)
        self._num_updates, self._num_new = 0, 0
        self._optimizer: Optimizer | None = None
        self._mode = LoopMode(self._planted)
        self._bounds: list[float] = []
        self._scaler: Any = None
        self._target: Tensor | None = None
        self._snapshot: Snapshot | None = None
        self._healthy = 0.0
        self._trial: _GuardTrial | None = None
        self._settling = self._in_backward = False
        self._scope = ExitStack()
        self._voices = Voices()
        self._install(table)

    def _install(self, table: Table) -> None:
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        table.replace(torch.Tensor, "backward", self._backward)
        table.replace(torch.autograd, "backward", self._backward)
        table.replace(torch.amp.GradScaler, "step", self._scaler_step)
        save_nothing(table)
        table.hook(register_optimizer_step_pre_hook(self._before_update))
        table.hook(register_optimizer_step_post_hook(self._after_update))
        self._scope.enter_context(clipping(False, self._bounds))
        atexit.register(self._script_ended)

    # ---- calls of the loop

    def _backward(self, original: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand in for ``backward``: the loop goes on."""
        if autowatch.is_paused() or self._in_backward:
            return original(loss, *args, **kwargs)
        self._goes_on()
        self._mode.enter()
        if isinstance(loss, Tensor):
            self._mode.locate(loss)
        self._in_backward = True
        try:
            result = original(loss, *args, **kwargs)
        finally:
            self._in_backward = False
        if self._settling:
            self._mend_gradients()
        return result

    def _scaler_step(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        if scaler.is_enabled():
            self._scaler = scaler
        return original(scaler, *args, **kwargs)

    def _before_update(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if autowatch.is_paused():
            return
        self._optimizer = self._optimizer or optimizer
        if optimizer is not self._optimizer:
            return
        gradients = gradients_of(optimizer)
        if self._target is None:
            self._choose_target(optimizer)
        if self._trial is not None and self._trial.took and not self._trial.updated:
            self._trial.bad_gradients = num_bad(gradients)
            self._trial.zero_gradients = num_zero(gradients)

    def _after_update(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if optimizer is not self._optimizer or autowatch.is_paused():
            return
        self._num_updates += 1
        if self._trial is not None:
            self._trial.updated |= self._trial.took
        elif self._settling:
            self._mode.between = self._next
        elif self._num_updates <= _WARM:
            self._mode.between = self._learn

    def _learn(self) -> None:
        """Keep what a healthy update has led to; after the last of them, begin."""
        assert self._optimizer is not None
        if self._num_updates == _WARM:
            self._healthy = distance(self._parameters(), self._copies())
        self._snapshot = Snapshot(Trainable(self._parameters(), self._optimizer, self._scaler))
        if self._num_updates == _WARM:
            self._find_guards()
            self._next()

    def _planted(self, loss: Tensor) -> Tensor:
        """Return the loss that takes the place of the loop's own; told of each by the mode."""
        trial = self._trial
        if trial is None or trial.took or trial.setting.injected not in LOSSES:
            self._goes_on(by_loss=True)
            trial = self._trial
        if trial is None or trial.took or trial.setting.injected not in LOSSES:
            return loss
        trial.took = True
        return PoisonedLoss.apply(loss, LOSSES[trial.setting.injected])  # type: ignore[return-value]

    def _poisoned(self, gradient: Tensor) -> Tensor | None:
        trial = self._trial
        if trial is None or trial.took or trial.setting.injected in LOSSES:
            return None
        trial.took = True
        return poisoned_gradient(gradient, trial.setting.injected)

    # ---- trials

    def _goes_on(self, *, by_loss: bool = False) -> None:
        """End a trial whose failing window is over: the loop is at its next one."""
        trial = self._trial
        if trial is None:
            return
        trial.num_losses += by_loss
        if trial.updated and (not by_loss or trial.num_losses > 1):
            self._end("went on")
            self._settle()

    def _end(self, ended: Any, error: str = "") -> None:
        trial, self._trial = self._trial, None
        assert trial is not None
        lines = tuple(self._mode.lines)
        self._scope.close()
        far = distance(self._parameters(), self._copies())
        assert self._optimizer is not None
        self._trials.append(
            GuardTrial(
                injected=trial.setting.injected,
                removed=trial.setting.removed,
                bad_weights=num_bad(self._parameters().values()),
                bad_state=num_bad(state_tensors([self._optimizer])),
                growth=far / self._healthy if self._healthy > 0.0 else 1.0,
                bad_gradients=trial.bad_gradients,
                zero_gradients=trial.zero_gradients,
                ended=ended,
                error=error,
                said=self._voices.lines,
                lines=lines,
            )
        )
        self._num_new += 1

    def _settle(self) -> None:
        """Let the window that is under way come to its end unseen.

        It was made with the weights of the trial.
        """
        self._settling = self._mode.blind = True

    def _mend_gradients(self) -> None:
        for parameter in self._parameters().values():
            if parameter.grad is not None:
                parameter.grad.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def _next(self) -> None:
        """Begin the next trial from where the first one began, or end the process."""
        self._skip_losses_if_unplaced()
        settings = due(guards_seen(self._guards, self._trials), self._trials)
        if not settings:
            self._write()
            dry_run_child.end()
        say_how_far(self._trials, settings)
        setting = settings[0]
        assert self._snapshot is not None
        self._snapshot.restore()
        self._trial, self._settling = _GuardTrial(setting), False
        self._mode.begin(setting.removed)
        self._scope.enter_context(clipping(any(n.startswith(CLIP) for n in setting.removed), []))
        if SCALER in setting.removed:
            self._scope.enter_context(scaler_without_check())
        self._voices = Voices()
        self._scope.enter_context(self._voices.heard())

    def _skip_losses_if_unplaced(self) -> None:
        if self._mode.placed:
            return
        cases: tuple[Injected, ...] = tuple(LOSSES)
        done = {trial.injected for trial in self._trials}
        self._trials += [GuardTrial(injected=c, took=False) for c in cases if c not in done]

    def _script_ended(self) -> None:
        """Note that a trial has ended the script, if it has.

        One that may have come to its own end is tried again.
        """
        error = getattr(sys, "last_value", None)
        trial = self._trial
        if trial is not None and trial.took and (error is not None or self._is_certain(trial)):
            said = "" if error is None else f"{type(error).__name__}: {error}"[:500]
            self._end("stopped" if error is None else "raised", said)
        if self._num_updates:
            self._write()

    def _is_certain(self, trial: _GuardTrial) -> bool:
        """Return whether the trial has ended the script.

        It is the first one, or this failure was seen to end it.
        """
        known = {(seen.injected, seen.ended) for seen in self._trials}
        return self._num_new == 0 or (trial.setting.injected, "stopped") in known

    def _write(self) -> None:
        found = Audit(host="the loop", guards=tuple(self._guards), trials=tuple(self._trials))
        write_whole(self._out, answered(result=to_json(found)))

    # ---- what the loop consists of

    def _find_guards(self) -> None:
        if self._guards:
            return
        if self._scaler is not None:
            self._guards.append(Guard(name=SCALER, kind="scaler"))
        if self._bounds:
            self._guards.append(Guard(name=f"{CLIP} (max_norm={min(self._bounds):g})", kind="clip"))

    def _choose_target(self, optimizer: Optimizer) -> None:
        self._target = target_among(held_by(optimizer))
        if self._target is not None:
            self._target.register_hook(self._poisoned)

    def _parameters(self) -> dict[str, Tensor]:
        assert self._optimizer is not None
        groups = self._optimizer.param_groups
        return {
            f"{g}.{i}": p for g, group in enumerate(groups) for i, p in enumerate(group["params"])
        }

    def _copies(self) -> dict[str, Tensor]:
        assert self._snapshot is not None
        return {name: kept.copy for name, kept in self._snapshot.parameters.items()}


class _GuardTrial:
    """A trial under way.

    ``took``: the failure has come about; ``updated``: an update has come after it.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.took = self.updated = False
        self.num_losses = self.bad_gradients = self.zero_gradients = 0
