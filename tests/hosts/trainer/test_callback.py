"""The callback is the watch, in the trainer's own convention."""

from transformers import Trainer, TrainingArguments

import nanstop
import tiny


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
