"""Exceptions that end a training between its micro-batches."""

import math

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import nanstop
import tiny


class Hides(LogitsProcessor):
    """Hides every token; or raises, as if it had, once alone."""

    def __init__(self, *, once=False):
        self.left, self.seen = 1 if once else math.inf, []

    def __call__(self, input_ids, scores):
        self.seen.append(len(input_ids))
        if self.left == math.inf:
            return torch.full_like(scores, -math.inf)
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        return scores


class Samples(TrainerCallback):
    def __init__(self, processor):
        self.processor, self.num_heard = LogitsProcessorList([processor]), 0

    def on_step_end(self, args, state, control, model=None, **_):
        self.num_heard += 1
        if state.global_step == 2:
            ids = torch.tensor([[3, 4, 5]])
            model.generate(ids, do_sample=True, max_new_tokens=3, logits_processor=self.processor)


class Divides(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        assert 1 / (2 - state.global_step)


def incidents_of(folder, callback, error):
    args = TrainingArguments(**tiny.training_args(folder, max_steps=4))
    callbacks = [callback, nanstop.Callback(out=folder / "out")]
    trainer = Trainer(
        model=tiny.llama(), args=args, train_dataset=tiny.TokenRows(), callbacks=callbacks
    )
    with pytest.raises(error):
        trainer.train()
    found = nanstop.watch(trainer).incidents
    nanstop.watch(trainer).close()
    return found


def test_a_callback_that_can_not_generate_is_looked_into(tmp_path):
    callback = Samples(Hides())
    (report,) = incidents_of(tmp_path, callback, RuntimeError)
    assert report.incident.phase == "generate"
    assert [one.source for one in report.incident.signals] == ["exception"]
    (diagnosis, *_) = report.diagnoses
    assert diagnosis.code == "NS204"
    assert any("`return torch.full_like(scores" in line for line in diagnosis.lines)
    assert report.audit[-1].action.kind == "observe"
    assert callback.num_heard == 2
    assert callback.processor[0].seen == [1]


@pytest.mark.parametrize(
    ("callback", "error"),
    [(Samples(Hides(once=True)), RuntimeError), (Divides(), ZeroDivisionError)],
    ids=["not_again", "of_no_model"],
)
def test_an_exception_of_no_model_and_one_that_does_not_come_again_are_the_scripts(
    tmp_path, callback, error
):
    assert incidents_of(tmp_path, callback, error) == ()
