"""A run under a form ends bitwise as if its line had been changed by hand."""

import pytest
import torch
import transformers
from torch import nn

import nanstop
from e2e.forms.spoiled_step import WIDTH
from e2e.scripts import run

LOOP = """
import sys

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
for step in range(24):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    if step in (3, 7, 8, 20):
        x[1] *= 2000
    loss = {loss}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.save(net.state_dict(), sys.argv[1])
"""


@pytest.mark.slow
def test_a_loop_ends_as_if_its_line_had_been_changed_by_hand(tmp_path):
    chosen = "gather(1, torch.arange(4)[:, None]).mean()"
    failing = f"-torch.log(torch.softmax(net(x), -1)).{chosen}"
    stable = f"-torch.log_softmax(net(x), -1).{chosen}"
    script, changed = tmp_path / "train.py", tmp_path / "changed.py"
    script.write_text(LOOP.format(loss=failing))
    # The form is in force for the first failing step and, adopted, from the second one on.
    by_hand = f"{stable} if step == 3 or step >= 7 else {failing}"
    changed.write_text(LOOP.format(loss=by_hand))
    watched = run(tmp_path, "train.py", "watched.pt")
    run(tmp_path, "changed.py", "changed.pt", watched=False)
    assert [row["action"] for row in watched.rows] == ["redo", "adopt"]
    assert {row["remedy"] for row in watched.rows} == {"compute `train.py:14` in log space"}
    ours, theirs = (torch.load(tmp_path / f"{name}.pt") for name in ("watched", "changed"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


CHECKPOINTED = """
import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        h = self.linear(x)
        spread = h.var(-1, keepdim=True) - 1e-4
        return {form} * h


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.out = nn.ModuleList([Block(), Block()]), nn.Linear(16, 2)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant={reentrant})
        return self.out(x)


torch.manual_seed(0)
net = Net()
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
for step in range(12):
    x = torch.randn(4, 16).requires_grad_() * (1e-3 if step in (4, 7, 9) else 3.0)
    loss = net(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.save(net.state_dict(), sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_form_holds_in_what_checkpointing_runs_again(tmp_path, reentrant):
    """Torch takes a mode off the stack while it handles ``backward``."""
    clamped = "torch.sqrt(spread.clamp(min=torch.finfo(spread.dtype).tiny))"
    for name, form in {"train.py": "torch.sqrt(spread)", "changed.py": clamped}.items():
        (tmp_path / name).write_text(CHECKPOINTED.format(form=form, reentrant=reentrant))
    watched = run(tmp_path, "train.py", "watched.pt", options=("--allow", "form"))
    run(tmp_path, "changed.py", "changed.pt", watched=False)
    assert watched.rows[-1]["action"] == "adopt"
    ours, theirs = (torch.load(tmp_path / f"{name}.pt") for name in ("watched", "changed"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


class Classifier(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        scores = model(inputs["x"])
        loss = -self.log_probabilities(scores)[torch.arange(len(scores)), inputs["labels"]].mean()
        return (loss, scores) if return_outputs else loss

    def log_probabilities(self, scores):
        return torch.log(torch.softmax(scores, -1))


class Patched(Classifier):
    """The stable line where the other one fails, and always from the second failure on."""

    failures = 0

    def log_probabilities(self, scores):
        failing = super().log_probabilities(scores)
        self.failures += not failing.isfinite().all()
        stable = self.failures >= 2 or not failing.isfinite().all()
        return torch.log_softmax(scores, -1) if stable else failing


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 5)

    def forward(self, x, labels=None):
        return self.linear(x)


def trained(kind, folder, *, watched):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    data = [
        {
            "x": torch.randn(WIDTH, generator=generator) * (3000 if row in (9, 33, 34) else 1),
            "labels": row % 5,
        }
        for row in range(48)
    ]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_train_epochs=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        learning_rate=1e-2,
        optim="sgd",
        disable_tqdm=True,
    )
    trainer = kind(model=Scores(), args=arguments, train_dataset=data)
    if watched:
        nanstop.watch(trainer)
    trainer.train()
    return trainer.model.state_dict()


def test_a_trainer_ends_as_if_its_line_had_been_changed_by_hand(tmp_path):
    ours = trained(Classifier, tmp_path / "watched", watched=True)
    theirs = trained(Patched, tmp_path / "changed", watched=False)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
