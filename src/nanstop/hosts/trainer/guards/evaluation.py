"""Watches a trainer's evaluation.

Exceptions with a numeric signature, and losses that are not finite. What is called without a
backward, there or where a trainer makes its own batches, is a step of one call.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from nanstop.detect.numeric_errors import is_numeric
from nanstop.detect.signals import Alarm, alarm, alarm_of_exception
from nanstop.errors import NanstopError
from nanstop.hosts import compat
from nanstop.hosts.run_again import run_again
from nanstop.hosts.trainer.steps.reentry import Reentry, given_of, shown
from nanstop.hosts.trainer.steps.step import isolation
from nanstop.hosts.trainer.watched import WatchedTrainer
from nanstop.hosts.window.ends import WindowEnds
from nanstop.records import RunFacts, Signal, StepId
from nanstop.replay.collectives import Collectives
from nanstop.replay.rng import RngState, note_rng, restore_rng
from nanstop.replay.step import Batch, ModelView
from nanstop.tracebacks import passes_through

__tracebackhide__ = passes_through

_log = logging.getLogger("nanstop")


class EvaluationGuard:
    """On the CPU each batch's loss is read at once and its batch can be replayed.

    Elsewhere the mean is, at the end.
    """

    def __init__(self, watch: WatchedTrainer, ends: WindowEnds) -> None:
        self._watch = watch
        self._ends = ends
        self._predict = watch.trainer.prediction_step
        self._evaluate = watch.trainer.evaluate
        self._reported = False

    def install(self) -> None:
        self._watch.patches.set(self._watch.trainer, "prediction_step", self._on_prediction_step)
        self._watch.patches.set(self._watch.trainer, "evaluate", self._on_evaluate)

    def _on_prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        watch = self._watch
        if watch.host.replaying is not None:
            return self._predict(model, inputs, prediction_loss_only, ignore_keys)
        rng, kept = note_rng(), copy.copy(inputs)

        def again(batch: Any) -> Tensor:
            return self._predict(model, given_of(batch), True, ignore_keys)[0]

        def step(loss: Tensor | None) -> ForwardStep:
            return ForwardStep(
                watch.step_id(micro=0),
                watch.view,
                watch.facts,
                (shown(kept),),
                (loss,),
                rng,
                watch.host,
                again,
                training=False,
            )

        try:
            outputs = self._predict(model, inputs, prediction_loss_only, ignore_keys)
        except Exception as error:
            # A healthy run has no use for it.
            from nanstop.localize.own_answer import answers_a_bad_number

            is_meant = is_numeric(error) or answers_a_bad_number(step(None), error)
            if is_meant and self._is_open():
                at = watch.step_id()
                self._ends.ask(step(None), alarm_of_exception(watch.view, at, error, "evaluate"))
            raise
        loss = outputs[0]
        if self._reported or loss is None or loss.device.type != "cpu":
            return outputs
        if not bool(loss.isfinite().all()):
            self._reported = True
            if self._is_open():
                self._ends.ask(step(loss), self._alarm(float(loss.mean())))
        return outputs

    def _on_evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self._reported = False
        metrics = self._evaluate(*args, **kwargs)
        bad = [v for k, v in metrics.items() if k.endswith("_loss") and not math.isfinite(v)]
        if bad and not self._reported and self._is_open():
            self._ends.ask(None, self._alarm(bad[0]))
        return metrics

    def _is_open(self) -> bool:
        """Open the session, as in a training; where that fails, say so and leave it."""
        try:
            self._watch.open()
        except NanstopError:
            raise
        except Exception as error:  # nanstop is never the reason a run dies
            _log.warning("nanstop: %s", compat.not_watched(self._watch.trainer, error))
            return False
        return True

    def _alarm(self, loss: float) -> Alarm:
        at = self._watch.step_id()
        signal = Signal(source="loss", name="eval_loss", value=loss, at=at)
        return alarm(self._watch.view, at, (signal,), "evaluate")


@dataclass(slots=True)
class ForwardStep:
    """One call of the model as a step of one micro-batch: of an evaluation, or of what a trainer
    makes a batch by (it generates, and is rewarded).

    Forward only, no gradient, no update. ``again`` makes the call; ``training``: whether the model
    is as it is in training. ``given`` holds objects of the script that the call is given.
    """

    id: StepId
    view: ModelView
    facts: RunFacts
    batches: tuple[Batch, ...]
    losses: tuple[Tensor | None, ...]
    rng: RngState
    host: Reentry
    again: Callable[[Batch], Any]
    training: bool
    given: Any = None
    rates: tuple[float, ...] = ()
    collectives: Collectives = field(default_factory=Collectives)

    def learned(self, **facts: Any) -> None:
        self.facts = replace(self.facts, **facts)

    @property
    def calls_script(self) -> bool:
        return False

    @property
    def is_local(self) -> bool:
        return self.facts.world_size == 1

    def run(self, micro: int, batch: Batch | None = None) -> Tensor:
        restore_rng(self.rng)
        inputs = copy.copy(self.batches[micro] if batch is None else batch)
        if not self.training:
            self.host.root.eval()
        with run_again(self.host.root, (), compiled=self.facts.compiled, host=self.given):
            made = self.again(inputs)
        return made if isinstance(made, Tensor) else torch.zeros(0)  # it has no loss

    def update_of(self, names: Collection[str]) -> ForwardStep:
        """See ``replay.step.Step``: one optimizer makes it."""
        del names
        return self

    def update(self) -> None:
        """Nothing is updated by it."""

    @contextmanager
    def isolated(self, *, with_update: bool = False) -> Iterator[None]:
        with isolation(self.host, self.view, with_update=with_update):
            yield
