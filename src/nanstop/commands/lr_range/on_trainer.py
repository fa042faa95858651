"""A learning-rate range test in place of the training that a script asks a transformers or TRL
trainer for.
"""

from __future__ import annotations

from typing import Any

from nanstop.commands.lr_range.recorder import LrRecorder
from nanstop.hosts.trainer.callbacks import TrainerCallback


class LrSweep(TrainerCallback):
    """Sets the rate of each optimizer step of a trainer and keeps the loss of each."""

    def __init__(self, recorder: LrRecorder) -> None:
        self.recorder = recorder
        self._window: list[Any] = []

    def prepare(self, trainer: Any) -> None:
        """Have ``trainer`` train for as many steps as there are rates and one more, and save
        nothing.
        """
        trainer.args.max_steps = len(self.recorder.rates) + 1
        trainer.args.load_best_model_at_end = False
        step = trainer.training_step

        def training_step(*args: Any, **kwargs: Any) -> Any:
            loss = step(*args, **kwargs)
            self._window.append(loss.detach())
            return loss

        trainer.training_step = training_step
        trainer.add_callback(self)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Close the window: its loss is that of the weights before this update.

        Synchronises the device.
        """
        self.recorder.set_rate(kwargs["optimizer"], len(self.recorder.losses))
        self.recorder.losses.append(float(sum(self._window)))
        self._window.clear()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Save and evaluate nothing; end when the loss has diverged."""
        control.should_save = control.should_evaluate = False
        if self.recorder.is_over(world_size=args.world_size):
            control.should_training_stop = True

    on_epoch_end = on_step_end
