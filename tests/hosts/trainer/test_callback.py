"""The callback is the watch, in the trainer's own convention."""

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import nanstop
import tiny
from nanstop.errors import TrainingStopped


def trainer_with(folder, *callbacks):
    args = TrainingArguments(**tiny.training_args(folder, max_steps=2))
    rows = tiny.TokenRows()
    return Trainer(model=tiny.llama(), args=args, train_dataset=rows, callbacks=list(callbacks))


def test_a_trainer_that_is_given_the_callback_is_watched(tmp_path, capfd):
    callback = nanstop.Callback(policy="skip", out=tmp_path / "out")
    trainer = trainer_with(tmp_path, callback)
    assert callback.watch is nanstop.watch(trainer)
    trainer.train()
    assert callback.watch.report().steps == 2
    assert "nanstop: 2 steps watched, nothing found\n" in capfd.readouterr().err
    assert repr(callback.watch).startswith("<Watch: 2 steps, 0 incidents, 0 findings, in ")
    callback.watch.close()


def test_one_that_comes_too_late_says_so(tmp_path, caplog):
    trainer = trainer_with(tmp_path)
    trainer.add_callback(nanstop.Callback())
    trainer.train()
    assert "not watched: give nanstop.Callback() to the trainer's constructor" in caplog.text


class Scales(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **_):
        with torch.no_grad():
            model.model.norm.weight.mul_(0.999)


class Averages(Scales):
    """Puts an average of nothing in place of a weight after its third step; has another callback
    come in while the handler goes through them.
    """

    def __init__(self, trainer_of):
        self.trainer_of = trainer_of

    def on_step_end(self, args, state, control, model=None, **_):
        if state.global_step == 1:
            self.trainer_of().add_callback(Scales())
        if state.global_step == 3:
            with torch.no_grad():
                model.lm_head.weight.div_(torch.zeros(()))


def test_the_callback_that_has_written_to_weights_is_told(tmp_path):
    held = []
    callbacks = (Scales(), Averages(lambda: held[0]))
    trainer = trainer_with(tmp_path, *callbacks, nanstop.Callback(out=tmp_path / "out"))
    trainer.args.max_steps = 6
    held.append(trainer)
    before = trainer.callback_handler.callbacks
    with pytest.raises(TrainingStopped):
        trainer.train()
    assert trainer.callback_handler.callbacks is before
    assert type(before) is list
    assert sum(type(one) is Scales for one in before) == 2
    (report,) = nanstop.watch(trainer).incidents
    (line,) = report.incident.written_by
    assert (line.function, line.file) == ("Averages.on_step_end", __file__)
    assert line.text.startswith("def on_step_end")
    (diagnosis,) = report.diagnoses[:1]
    assert diagnosis.code == "NS401"
    assert diagnosis.lines[0].startswith("written to since by `Averages.on_step_end` (test_cal")
    assert report.incident.remade_finite == 2
    nanstop.watch(trainer).close()
    assert "call_event" not in vars(trainer.callback_handler)
