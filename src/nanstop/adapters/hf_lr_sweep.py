"""A learning-rate range test in place of the training that a script asks a transformers or TRL trainer for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerCallback

from nanstop.adapters.table import Table
from nanstop.run.files import write_whole
from nanstop.run.lr_range import VARIABLE, SweepPlan
from nanstop.run.lr_sweep import set_rates, shares_of
from nanstop.search.lr_range import has_diverged, rates


def install(table: Table, trainer_class: Any) -> None:
    """Have the first ``train()`` of any trainer run the sweep that the environment plans, and end the script."""
    table.replace(trainer_class, "train", _train)


def _train(original: Any, trainer: Any, *_: Any, **__: Any) -> Any:
    """Stand in for ``Trainer.train``: sweep, write the losses down, and end the script before it saves anything."""
    plan = SweepPlan(**json.loads(os.environ[VARIABLE]))
    sweep = LrSweep(plan)
    sweep.prepare(trainer)
    try:
        original(trainer)
    finally:
        if trainer.is_world_process_zero():
            sweep.write()
    raise SystemExit(0)


class LrSweep(TrainerCallback):
    """Sets the rate of each optimizer step and keeps the loss of each; one more step than rates, for the last loss."""

    def __init__(self, plan: SweepPlan) -> None:
        self.plan = plan
        self.rates = rates(plan.low, plan.high, plan.steps)
        self.losses: list[float] = []
        self._window: list[Any] = []
        self._shares: tuple[float, ...] = ()

    def prepare(self, trainer: Any) -> None:
        """Have ``trainer`` train for as many steps as there are rates and one more, and save nothing."""
        trainer.args.max_steps = len(self.rates) + 1
        trainer.args.load_best_model_at_end = False
        step = trainer.training_step

        def training_step(*args: Any, **kwargs: Any) -> Any:
            loss = step(*args, **kwargs)
            self._window.append(loss.detach())
            return loss

        trainer.training_step = training_step
        trainer.add_callback(self)

    def on_pre_optimizer_step(self, _args: Any, _state: Any, _control: Any, **kwargs: Any) -> None:
        """Close the window: its loss is that of the weights before this update. Synchronises the device."""
        self.losses.append(float(sum(self._window)))
        self._window.clear()
        optimizer = kwargs["optimizer"]
        self._shares = self._shares or shares_of(optimizer)
        # After the last measured loss nothing more may be learnt from an update.
        set_rates(optimizer, self._shares, self.rates[min(len(self.losses), len(self.rates)) - 1])

    def on_step_end(self, args: Any, _state: Any, control: Any, **_: Any) -> None:
        """Save and evaluate nothing; end when the loss has diverged. Ranks see different losses and run to the end."""
        control.should_save = control.should_evaluate = False
        first, *after = self.losses
        if args.world_size == 1 and has_diverged(first, after):
            control.should_training_stop = True

    on_epoch_end = on_step_end

    def write(self) -> None:
        """Write what was measured as JSON; non-finite losses are strings."""
        text = json.dumps([repr(loss) for loss in self.losses])
        write_whole(Path(self.plan.out), text.encode())
