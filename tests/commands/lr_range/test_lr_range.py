"""``nanstop lr-range`` on scripts:
the sweep runs in place of the training, and what cannot be swept is said.
"""

import importlib
from pathlib import Path

import pytest

from nanstop import cli
from nanstop.commands.lr_range.curve import LrRange
from nanstop.commands.lr_range.lr_range import lr_range, render, result_file
from nanstop.commands.lr_range.sweep import sweep
from nanstop.errors import NanstopError
from nanstop.records.codec import from_json

TRAINING = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import tiny, torch
from transformers import Trainer, TrainingArguments
torch.set_num_threads(1)
args = TrainingArguments(**tiny.training_args("out", save_strategy="steps", save_steps=2))
trainer = Trainer(model=tiny.llama(), args=args, train_dataset=tiny.TokenRows())
print("about to train")
trainer.train()
trainer.save_model("out/final")
print("trained")
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Write ``train.py`` into a fresh working folder."""
    monkeypatch.chdir(tmp_path)
    return lambda text: (tmp_path / "train.py").write_text(text)


@pytest.mark.slow
def test_a_trainers_script(script, capfd, tmp_path, incident_folder):
    script(TRAINING)
    code = cli.main(["lr-range", "--steps", "40", "--low", "1e-5", "train.py"])
    out, err = capfd.readouterr()
    found = from_json(LrRange, result_file().read_text())
    assert code == (0 if found.status == "found" else 1)
    assert out == render(found, str(result_file())) + "\n"
    assert "about to train" in err
    assert "trained" not in err.split("about to train")[1]
    assert found.rates[0] == pytest.approx(1e-5)
    assert len(found.rates) == len(found.losses) <= 40
    assert not list((tmp_path / "out").iterdir())
    assert [one.name for one in incident_folder.iterdir()] == ["lr_range.json"]


LOOP = """
import os, sys, torch
torch.manual_seed(0)
torch.set_num_threads(1)
rows = torch.randn(256, 8)
targets = rows @ torch.randn(8, 1)
net = torch.nn.Linear(8, 1, bias=False)
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
limit = 2.0 / torch.linalg.eigvalsh(2.0 * rows.T @ rows / 256)[-1].item()
print(f"limit {limit}", file=sys.stderr)
try:
    for step in range(STEPS):
        for micro in range(2):
            picked = torch.randint(0, 256, (128,))
            loss = (net(rows[picked]) - targets[picked]).square().mean() / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1e9)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        schedule.step()
        torch.save(net.state_dict(), "checkpoint.pt")
finally:
    torch.save(net.state_dict(), "final.pt")
    open("over", "w").close()
"""


def test_a_loop_is_swept_on_its_own_batches_and_saves_nothing(script, capfd, tmp_path):
    script(LOOP.replace("STEPS", "2000"))
    found = lr_range(["train.py"], low=1e-4, high=100.0)
    limit = float(capfd.readouterr().err.split("limit ")[1].split()[0])
    assert found.status == "found"
    assert limit < found.diverges < 6.0 * limit
    assert found.high < limit
    assert found.losses[0] == pytest.approx(found.first_loss, rel=0.5)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["nanstop", "train.py"]


@pytest.mark.slow
def test_a_loop_that_ends_before_the_sweep_says_so(script):
    script(LOOP.replace("STEPS", "30"))
    found = lr_range(["train.py"], low=1e-4, high=100.0)
    assert len(found.losses) == 29
    assert "the script's training ended after 29 of 100 steps" in found.message
    assert Path("over").exists()
    assert not Path("final.pt").exists()


@pytest.mark.slow
def test_a_loop_that_is_watched_by_itself_is_swept(script):
    script(
        "import nanstop, torch\ntorch.manual_seed(0)\nnet = torch.nn.Linear(8, 1)\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "with nanstop.watch(net, optimizer) as watch:\n    for _ in range(300):\n"
        "        watch.step(lambda rows: net(rows).square().mean(), torch.randn(32, 8))\n"
        "        watch.update(clip=1.0)\n"
    )
    found = lr_range(["train.py"], low=1e-4, high=1e3)
    assert found.status == "found"
    assert found.diverges is not None


LBFGS = """
optimizer = torch.optim.LBFGS(net.parameters())
def closure():
    optimizer.zero_grad()
    loss = net(rows).square().mean()
    loss.backward()
    return loss
for _ in range(50):
    optimizer.step(closure)
"""
BY_GRAD = """
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(50):
    loss = net(rows).square().mean()
    for p, g in zip(net.parameters(), torch.autograd.grad(loss, list(net.parameters()))):
        p.grad = g
    optimizer.step()
"""
INSIDE = """
inner = {p: torch.optim.SGD([p], 0.1) for p in net.parameters()}
def update(p):
    inner[p].step()
    inner[p].zero_grad()
for p in net.parameters():
    p.register_post_accumulate_grad_hook(update)
for _ in range(50):
    net(rows).square().mean().backward()
"""
ONE = """
optimizer = torch.optim.SGD(net.parameters(), 0.1)
net(rows).square().mean().backward()
optimizer.step()
"""
NET = "import torch\nnet, rows = torch.nn.Linear(8, 1), torch.randn(32, 8)\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LBFGS, "cannot be swept: the optimizer calls a closure"),
        (INSIDE, "cannot be swept: the updates happen inside backward"),
        (ONE, "has one step only"),
    ],
)
def test_a_loop_that_cannot_be_swept_is_said_to_be(script, text, message):
    script(NET + text)
    with pytest.raises(NanstopError, match=message) as raised:
        lr_range(["train.py"])
    if "cannot be swept" in message:
        module, _, name = raised.value.hint.partition("(")[0].rpartition(".")
        assert getattr(importlib.import_module(module), name) is sweep


@pytest.mark.slow
def test_a_loop_that_asks_for_its_gradients_is_swept(script):
    script(NET + BY_GRAD)
    found = lr_range(["train.py"])
    assert len(found.losses) > 10
    assert all(loss > 0.0 for loss in found.losses)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print('no training here')", "the script ended without training"),
        ("raise ValueError('no data')", "ended with exit code 1 before its training"),
    ],
)
def test_a_script_without_a_sweep(script, text, message):
    script(text)
    with pytest.raises(NanstopError, match=message):
        lr_range(["train.py"])


def test_bad_plans_scripts_and_folders(script, tmp_path, capfd):
    script("")
    assert cli.main(["lr-range", "trian.py"]) == cli.USAGE
    assert "did you mean `train.py`?" in capfd.readouterr().err
    assert (
        cli.main(["lr-range", "--low", "2", "--high", "1", "train.py", "--low", "3"]) == cli.USAGE
    )
    assert "not 2.0 to 1.0" in capfd.readouterr().err
    with pytest.raises(NanstopError, match=r"cannot write .*train.py/inside"):
        lr_range(["train.py"], folder=tmp_path / "train.py" / "inside")


def test_the_text_says_what_it_rests_on():
    found = LrRange(
        status="found",
        low=1e-4,
        high=1e-3,
        begins=1e-4,
        steepest=1e-3,
        lowest=5e-3,
        first_loss=4.0,
        lowest_loss=3.0,
        rates=(1e-4, 1e-2),
        losses=(4.0, 3.0),
    )
    text = render(found)
    assert text.startswith("learning rate: 1.0e-04 to 1.0e-03\n")
    assert "does not diverge up to 1.0e-02" in text
    flat = LrRange(status="flat", message="only noise", first_loss=4.0)
    assert render(flat).startswith("not established: only noise")
