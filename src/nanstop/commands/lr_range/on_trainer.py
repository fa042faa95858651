"""A learning-rate range test in place of the training that a script asks a transformers or TRL trainer for."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

from transformers.trainer_callback import TrainerCallback

from nanstop.commands.lr_range.job import LrRecorder, end, planned, save_nothing
from nanstop.hosts.patch_table import Table


def install(table: Table, trainer_class: Any) -> None:
    """Have the first ``train()`` of any trainer run the sweep that the environment plans, and end the script."""
    table.replace(trainer_class, "train", partial(_train, table))
    table.replace(trainer_class, "init_hf_repo", lambda *_args, **_options: None)


def _train(table: Table, original: Any, trainer: Any, *_: Any, **__: Any) -> NoReturn:
    """Stand in for ``Trainer.train``: sweep, write the losses down, and end the script before it saves anything."""
    from nanstop.hosts.script import autowatch

    save_nothing(table)
    recorder = LrRecorder(planned())
    sweep = LrSweep(recorder)
    sweep.prepare(trainer)
    try:
        with autowatch.paused():
            original(trainer)
    finally:
        if trainer.is_world_process_zero():
            recorder.write()
    end()


class LrSweep(TrainerCallback):
    """Sets the rate of each optimizer step of a trainer and keeps the loss of each."""

    def __init__(self, recorder: LrRecorder) -> None:
        self.recorder = recorder
        self._window: list[Any] = []

    def prepare(self, trainer: Any) -> None:
        """Have ``trainer`` train for as many steps as there are rates and one more, and save nothing."""
        trainer.args.max_steps = len(self.recorder.rates) + 1
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
        self.recorder.set_rate(kwargs["optimizer"], len(self.recorder.losses))
        self.recorder.losses.append(float(sum(self._window)))
        self._window.clear()

    def on_step_end(self, args: Any, _state: Any, control: Any, **_: Any) -> None:
        """Save and evaluate nothing; end when the loss has diverged."""
        control.should_save = control.should_evaluate = False
        if self.recorder.is_over(world_size=args.world_size):
            control.should_training_stop = True

    on_epoch_end = on_step_end
