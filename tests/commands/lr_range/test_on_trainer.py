"""A sweep in place of a trainer's own training:
the planned rates reach the optimizer, and nothing is saved.
"""

import json
import math

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import tiny
from nanstop.commands.lr_range import job
from nanstop.commands.lr_range.curve import rates
from nanstop.commands.lr_range.result import Sweep
from nanstop.hosts.patch_table import Table
from nanstop.process.inject import dry_run_child
from nanstop.process.inject.dry_run import DryRun
from nanstop.records.codec import from_json


class Seen(TrainerCallback):
    """The rate of each update, as the optimizer has it when it steps."""

    def __init__(self):
        self.rates, self.losses = [], []

    def on_optimizer_step(self, args, state, control, optimizer, **_):
        self.rates.append([group["lr"] for group in optimizer.param_groups])

    def on_log(self, args, state, control, logs, **_):
        self.losses += [logs["loss"]] if "loss" in logs else []


class EndedError(Exception):
    """Instead of the end of the process."""


def ended():
    raise EndedError


@pytest.fixture
def swept(tmp_path, monkeypatch):
    """Train under the stand-in; return the losses written down, what the optimizer saw, and the
    output folder.
    """
    torch.set_num_threads(1)

    def run(low, high, steps, train=Trainer.train, **options):
        dry_run = DryRun(
            job=job.__name__,
            options={"low": low, "high": high, "steps": steps},
            out=str(tmp_path / "answer.json"),
        )
        args = TrainingArguments(**tiny.training_args(tmp_path / "out", **options))
        trainer = Trainer(model=tiny.llama(), args=args, train_dataset=tiny.TokenRows())
        trainer.add_callback(seen := Seen())
        table = Table()
        dry_run_child.install(table, Trainer, dry_run)
        monkeypatch.setattr(dry_run_child, "end", ended)
        try:
            with pytest.raises(EndedError):
                trainer.train()
            trainer.save_model(tmp_path / "final")
        finally:
            table.undo()
        assert not (tmp_path / "final").exists()
        assert Trainer.train is train
        answer = json.loads((tmp_path / "answer.json").read_text())
        assert (answer["error"], answer["crash"]) == (None, "")
        measured = from_json(Sweep, answer["result"])
        assert (measured.problem, measured.ended) == ("", "")
        return measured.losses, seen, tmp_path / "out"

    return run


def test_each_update_has_its_rate_and_each_rate_its_loss(swept):
    losses, seen, _ = swept(1e-6, 1e-3, 20, lr_scheduler_type="cosine", warmup_steps=5)
    planned = rates(1e-6, 1e-3, 20)
    assert [pair[0] for pair in seen.rates] == pytest.approx([*planned, planned[-1]])
    assert len(losses) == 21
    # The trainer's own log has the loss of each window too, rounded.
    assert losses == pytest.approx(seen.losses, abs=2e-3)


def test_nothing_is_saved_and_it_ends_where_the_loss_explodes(swept):
    losses, _, out = swept(
        1e-3, 1e6, 40, save_strategy="steps", save_steps=2, optim="sgd", max_grad_norm=0.0
    )
    assert 10 < len(losses) < 41
    assert not math.isfinite(losses[-1]) or losses[-1] > 2.0 * losses[0]
    assert not list(out.glob("checkpoint*"))
