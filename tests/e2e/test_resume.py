"""Remedies travel with checkpoints:
a resumed run starts under those that the first one had adopted.
"""

from __future__ import annotations

import pytest
import torch

import nanstop
import tiny
from doubles.session import ScriptedSession
from e2e.scripts import HEAD, run
from nanstop.hosts.trainer.watch import watch_trainer
from nanstop.store.incidents import load_summary
from nanstop.store.plan_file import load_plan

torch.set_num_threads(1)
TOLD = ("loss_raw", "grad_norm", "loss_logged")


def overflowing():
    model = tiny.llama()
    model.model.layers[1].post_attention_layernorm.weight.data.fill_(3e4)
    model.model.layers[1].mlp.up_proj.weight.data *= 0.1
    return model.half()


def trainer(out, model=overflowing, **settings):
    from transformers import Trainer, TrainingArguments

    args = tiny.training_args(out, optim="sgd", save_strategy="steps", save_steps=3) | settings
    torch.manual_seed(0)
    return Trainer(model=model(), args=TrainingArguments(**args), train_dataset=tiny.TokenRows())


def losses(one):
    return [log["loss"] for log in one.state.log_history if "loss" in log]


@pytest.mark.slow
def test_a_plan_is_saved_with_the_checkpoint_and_in_force_after_it(tmp_path, capsys):
    whole = trainer(tmp_path / "run", max_steps=6)
    with nanstop.watch(whole, out=tmp_path / "n") as watch:
        whole.train()
    (report,) = watch.incidents
    plan = load_plan(tmp_path / "run" / "checkpoint-3" / "nanstop-plan.yaml")
    assert plan.remedies == report.proof.minimal

    resumed = trainer(tmp_path / "run", max_steps=6)
    with nanstop.watch(resumed, out=tmp_path / "m") as again:
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert again.incidents == ()
    assert losses(resumed) == losses(whole)
    assert "resumed under" in capsys.readouterr().err


def test_a_resumed_run_goes_on_counting_and_tells_what_it_watched(tmp_path, capsys):
    whole = trainer(tmp_path / "run", tiny.llama, max_steps=6)
    whole.train()
    resumed = trainer(tmp_path / "run", tiny.llama, max_steps=6)
    checkpoint = str(tmp_path / "run" / "checkpoint-3")
    for start in (3, 3, 0):  # resumed, resumed again, begun anew
        session = ScriptedSession()
        watch = watch_trainer(resumed, lambda _view, _facts, opened=session: opened)
        resumed.train(resume_from_checkpoint=checkpoint if start else None)
        watch.close()
        steps = list(range(start, 6))
        values = session.series.values  # of two micro-batches a step
        told = {name: sorted({at for one, at, _ in values if one == name}) for name in TOLD}
        assert told == {
            "loss_raw": steps,
            "grad_norm": steps,
            "loss_logged": [step + 1 for step in steps],
        }
        assert [step for step, _ in session.series.logged] == told["loss_logged"]
        assert not start or losses(resumed) == losses(whole)
    with nanstop.watch(resumed, out=tmp_path / "n"):
        resumed.train(resume_from_checkpoint=checkpoint)
    assert "nanstop: 3 steps watched" in capsys.readouterr().err
    assert load_summary(tmp_path / "n" / "summary.json").steps == 6


@pytest.mark.slow
def test_a_damaged_plan_does_not_stop_the_run(tmp_path):
    first = trainer(tmp_path / "run", max_steps=3)
    with nanstop.watch(first, out=tmp_path / "n"):
        first.train()
    (tmp_path / "run" / "checkpoint-3" / "nanstop-plan.yaml").write_text("schema: 99\n")
    resumed = trainer(tmp_path / "run", max_steps=5)
    with nanstop.watch(resumed, out=tmp_path / "m") as again:
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert len(again.incidents) == 1
    assert all(bool(p.isfinite().all()) for p in resumed.model.parameters())


IN_TURN = """
import copy

def train(net, optimizer, num_steps):
    for step in range(num_steps):
        x = torch.randn(8, 4)
        optimizer.zero_grad()
        F.mse_loss(net(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()

def made():
    net = nn.Linear(4, 1)
    return net, torch.optim.AdamW(net.parameters(), 1e-3)

net, optimizer = made()
train(net, optimizer, 4)
saved = copy.deepcopy(optimizer.state_dict())
saved["state"][0]["exp_avg_sq"][0, 2] = float("nan")
net, optimizer = made()
optimizer.load_state_dict(saved)
train(net, optimizer, 4)
"""


@pytest.mark.slow
def test_the_update_of_a_second_training_that_broke_its_weights_is_found(tmp_path):
    (tmp_path / "script.py").write_text(HEAD + IN_TURN)
    ended = run(tmp_path, "script.py")
    (row,) = ended.rows
    assert (row["code"], row["phase"], row["step"]) == ("NS403", "optimizer", 0)
