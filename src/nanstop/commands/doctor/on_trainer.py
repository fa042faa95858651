"""A trainer audited: short trainings of three steps, with a failure planted in the second."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from nanstop.commands.doctor.doctor import (
    CLIP,
    FILTER,
    SCALER,
    WATCH,
    Audit,
    Setting,
    due,
    guards_seen,
    say_how_far,
)
from nanstop.commands.doctor.planted import (
    LOSSES,
    Reads,
    Voices,
    clipping,
    distance,
    gradients_of,
    num_bad,
    num_zero,
    observing_updates,
    poisoned_gradient,
    scaler_without_check,
    state_tensors,
)
from nanstop.commands.doctor.result import Guard, GuardTrial, Injected
from nanstop.commands.doctor.trainer_reruns import TrainerReruns
from nanstop.errors import NanstopError

NUM_STEPS, FAILING = 3, 1
"""A failure comes after one healthy update, and one healthy step comes after it."""


class TrainerAudit:
    """Lets a trainer train again and again, from where it stands."""

    def __init__(self, trainer: Any) -> None:
        self.stage = TrainerReruns(trainer)
        self.trials: list[GuardTrial] = []
        self.guards: tuple[Guard, ...] = ()
        self._healthy: _Seen | None = None
        self._clip = ""

    def run(self) -> Audit:
        """Run every trial that the judgement needs.

        The trainer is afterwards what it was before.
        """
        stage = self.stage
        seen = self._healthy = self._training(None)
        if seen.error is not None:
            raise NanstopError(
                f"the training itself fails: {type(seen.error).__name__}: {seen.error}",
                hint="nanstop run SCRIPT says more",
            )
        if seen.num_steps < NUM_STEPS:
            raise NanstopError(f"the training ended after {seen.num_steps} steps of {NUM_STEPS}")
        self.guards = self._found(seen)
        while settings := due(guards_seen(self.guards, self.trials), self.trials):
            for done, setting in enumerate(settings):
                say_how_far(self.trials, settings[done:])
                self.trials.append(self._trial(setting))
        return Audit(
            host=stage.name,
            guards=self.guards,
            trials=tuple(self.trials),
            notes=tuple(stage.notes),
        )

    def _found(self, seen: _Seen) -> tuple[Guard, ...]:
        args = self.stage.trainer.args
        found = [Guard(name=WATCH, kind="watch")] if self.stage.opens_watch else []
        if args.logging_nan_inf_filter:
            found.append(Guard(name=FILTER, kind="log_filter"))
        if seen.has_scaler:
            found.append(Guard(name=SCALER, kind="scaler"))
        if seen.bounds:
            self._clip = _clip_name(seen.bounds)
            found.append(Guard(name=self._clip, kind="clip"))
        found += [Guard(name=name, kind="callback") for name in self.stage.callbacks]
        return tuple(found)

    def _trial(self, setting: Setting) -> GuardTrial:
        seen, healthy = self._training(setting), self._healthy
        assert healthy is not None
        ended = "went on" if seen.num_steps == NUM_STEPS else "stopped"
        return GuardTrial(
            injected=setting.injected,
            removed=setting.removed,
            took=seen.took,
            bad_weights=seen.bad_weights,
            bad_state=seen.bad_state,
            growth=seen.gone / healthy.gone if healthy.gone > 0.0 else 1.0,
            bad_gradients=seen.bad_gradients,
            zero_gradients=seen.zero_gradients,
            ended=ended if seen.error is None else "raised",
            error="" if seen.error is None else f"{type(seen.error).__name__}: {seen.error}"[:500],
            bad_logs=seen.bad_logs,
            said=tuple(line for line in seen.said if line not in healthy.said),
            lines=seen.lines,
        )

    def _training(self, setting: Setting | None) -> _Seen:
        """Train under a setting, None for a healthy training, and return what there was to see."""
        removed = frozenset(setting.removed if setting is not None else ())
        with self.stage.copied(), ExitStack() as scope:
            seen = _Seen(self.stage, setting)
            if SCALER in removed:
                scope.enter_context(scaler_without_check())
            self.stage.prepare(
                num_steps=NUM_STEPS,
                removed=removed,
                filtered=FILTER not in removed,
                watched=WATCH not in removed,
            )
            scope.enter_context(clipping(self._clip in removed, seen.bounds))
            scope.callback(observing_updates(seen.before_update).undo)
            scope.enter_context(self.stage.planted(seen.plant, seen.poisoned))
            voices = Voices()
            with voices.heard():
                seen.error = self.stage.train(reads := Reads(removed))
            seen.finish(voices.lines, tuple(reads.lines))
            return seen


class _Seen:
    """Observes one training."""

    def __init__(self, stage: TrainerReruns, setting: Setting | None) -> None:
        self.took = self.has_scaler = False
        self.error: BaseException | None = None
        self.bad_weights = self.bad_state = self.bad_gradients = self.zero_gradients = 0
        self.num_steps, self.gone = 0, 0.0
        self.bad_logs: tuple[str, ...] = ()
        self.said: tuple[str, ...] = ()
        self.lines: tuple[str, ...] = ()
        self.bounds: list[float] = []
        self._stage = stage
        self._injected: Injected | None = setting.injected if setting is not None else None

    @property
    def _failing(self) -> bool:
        return self._injected is not None and self._stage.step == FAILING

    def plant(self) -> float | None:
        """Return the value that a loss is to have, or None."""
        if self._injected is None or not self._failing or self._injected not in LOSSES:
            return None
        self.took = True
        return LOSSES[self._injected]

    def poisoned(self, gradient: Tensor) -> Tensor | None:
        """Return the gradient that takes the place of a healthy one, or None.

        A hook of a parameter.
        """
        if not self._failing or self._injected is None or self._injected in LOSSES:
            return None
        self.took = True
        return poisoned_gradient(gradient, self._injected)

    def before_update(self, optimizer: Optimizer) -> None:
        """Count what an update is about to read in the failing step."""
        self.has_scaler |= self._stage.has_scaler
        if self._stage.step == FAILING:
            gradients = gradients_of(optimizer)
            self.bad_gradients += num_bad(gradients)
            self.zero_gradients += num_zero(gradients)
            self._stage.note_gradients()

    def finish(self, said: tuple[str, ...], lines: tuple[str, ...]) -> None:
        """Note what is left when a training is over."""
        stage = self._stage
        self.num_steps, self.said, self.lines = stage.step, said, lines
        self.bad_weights = num_bad(stage.parameters.values())
        self.bad_state = num_bad(state_tensors(stage.optimizers))
        self.gone = distance(stage.parameters, stage.before)
        self.bad_logs = stage.bad_logs()


def _clip_name(bounds: list[float]) -> str:
    """Return what clipping is called, by the bounds that it was seen to clip to."""
    if all(map(math.isinf, bounds)):
        return "gradient norm for the log (max_grad_norm=0)"
    return f"{CLIP} (max_grad_norm={min(bounds):g})"
