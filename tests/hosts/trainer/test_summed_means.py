"""A loss of the script's own that is the mean of its micro-batch, and that nobody divides by their
number; and those that are a share of their window, however that is spelled.
"""

import pytest
import torch
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

import nanstop
import tiny
from versions import needs

torch.set_num_threads(1)


def mean(trainer, logits, labels, num):
    del trainer, num
    return F.cross_entropy(logits, labels)


def mean_of_each(trainer, logits, labels, num):
    del trainer, num
    return F.cross_entropy(logits, labels, reduction="none").mean()


def mean_of_what_counts(trainer, logits, labels, num):
    del trainer, num
    return F.cross_entropy(logits, labels, reduction="sum") / (labels != -100).sum()


def mean_of_what_a_mask_keeps(trainer, logits, labels, num):
    del trainer, num
    used = (labels != -100).float()
    each = F.cross_entropy(logits, labels, reduction="none").view(2, -1)
    return (each * used.view(2, -1)).sum() / used.sum().clamp(min=1)


def share(trainer, logits, labels, num):
    del trainer
    return F.cross_entropy(logits, labels, reduction="sum") / num


def share_by_a_mean(trainer, logits, labels, num):
    del trainer
    return (F.cross_entropy(logits, labels, reduction="none") * (labels.numel() / num)).mean()


def divided(trainer, logits, labels, num):
    del num
    return F.cross_entropy(logits, labels) / trainer.args.gradient_accumulation_steps


def divided_twice(trainer, logits, labels, num):
    counted = mean_of_what_counts(trainer, logits, labels, num)
    return counted / trainer.args.gradient_accumulation_steps


class Own(Trainer):
    """``loss``: what it makes of logits and labels."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs = dict(inputs)
        labels = inputs.pop("labels")[:, 1:].flatten()
        logits = model(**inputs).logits[:, :-1].flatten(0, 1)
        return self.loss(logits, labels, num_items_in_batch)


def told(out, loss, *, scaled=None, **options):
    settings = TrainingArguments(**tiny.training_args(out, max_steps=4) | options)
    kind = type("Mine", (Own,), {"loss": loss})
    trainer = kind(model=tiny.llama(), args=settings, train_dataset=tiny.TokenRows())
    if scaled is not None:
        trainer.loss_is_scaled_for_ga = scaled
    with nanstop.watch(trainer, policy="observe", out=out) as watch:
        trainer.train()
    return [one for one in watch.findings if one.code == "NS117"]


@needs("transformers", "5", "leaves the division to the loss")
@pytest.mark.parametrize(
    "loss", [mean, mean_of_each, mean_of_what_counts, mean_of_what_a_mask_keeps]
)
def test_means_that_are_summed(tmp_path, loss):
    (finding,) = told(tmp_path, loss, gradient_accumulation_steps=4, max_grad_norm=0.1)
    assert finding.title == "gradients are 4 times too large"
    assert finding.confidence == "likely"


@pytest.mark.parametrize("loss", [share, share_by_a_mean, divided, divided_twice])
def test_shares_of_the_window(tmp_path, loss):
    assert not told(tmp_path, loss)


@needs("transformers", "5.23", "asks for `loss_is_scaled_for_ga`")
def test_means_that_the_trainer_divides(tmp_path):
    assert not told(tmp_path, mean, scaled=False)


def test_a_window_of_one(tmp_path):
    assert not told(tmp_path, mean, gradient_accumulation_steps=1)
