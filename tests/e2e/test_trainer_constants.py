"""What a trainer's loss closes over and that is not finite is named as what it is, with the line
that made it; a healthy one is left as it is.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

import nanstop
import tiny

torch.set_num_threads(1)


class Classes(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": index % 4}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(8, 4)

    def forward(self, x, labels=None):
        return {"logits": self.head(x)}


def weights_of(counts):
    return counts.sum() / counts * (counts / counts)


class Weighted(Trainer):
    def __init__(self, *, counts, **given):
        super().__init__(**given)
        self.class_weights = weights_of(counts)

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        outputs = model(x=inputs["x"])
        loss = F.cross_entropy(outputs["logits"], inputs["labels"], weight=self.class_weights)
        return (loss, outputs) if return_outputs else loss


def an_attribute(counts, **given):
    return Weighted(counts=counts, **given)


def a_closure(counts, **given):
    weights = weights_of(counts)

    def loss(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs["logits"], labels, weight=weights)

    return Trainer(compute_loss_func=loss, **given)


def trained(folder, made, count):
    args = TrainingArguments(**tiny.training_args(folder, max_steps=3))
    counts = torch.tensor([11.0, 11.0, 10.0, count])
    trainer = made(counts, model=Net(), args=args, train_dataset=Classes())
    with nanstop.watch(trainer, out=folder / "out") as watch:
        trainer.train()
    return watch


@pytest.mark.parametrize(
    ("made", "name"), [(an_attribute, "self.class_weights"), (a_closure, "weights")]
)
def test_class_weights_that_are_nan(tmp_path, made, name):
    assert trained(tmp_path / "healthy", made, 8.0).incidents == ()
    report, *_ = trained(tmp_path / "bad", made, 0.0).incidents
    best, found = report.diagnoses[0], report.localization
    assert (best.code, best.confidence, found.culprit) == ("NS506", "certain", name)
    assert found.made_before
    assert found.made.text == f"{name} = weights_of(counts)"
    assert found.first_bad.source.text.endswith(f"weight={name})")
    assert report.replay.num_failed == report.replay.runs
