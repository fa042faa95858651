"""``nanstop doctor`` on scripts, as a stranger runs it:
loops and trainers, exit codes, and what is left behind.
"""

import json
from pathlib import Path

import pytest

from nanstop import cli

LOOP = """
import sys
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
scaler = torch.amp.GradScaler("cpu", enabled="scaler" in sys.argv, init_scale=1024)
for step in range(60):
    x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))
    optimizer.zero_grad()
    for half in (slice(3), slice(3, 6)):
        loss = F.cross_entropy(net(x[half]), y[half])
        if "loss" in sys.argv and not torch.isfinite(loss):  # checks the loss
            continue
        scaler.scale(loss / 2).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    if "norm" in sys.argv and not norm.isfinite():  # checks the norm
        scaler.update()
        continue
    scaler.step(optimizer)
    scaler.update()
    if "late" in sys.argv and loss.isnan():  # checks too late
        raise FloatingPointError("the loss is NaN")
    torch.save(net.state_dict(), f"net{step % 2}.pt")
print("trained")
"""
TRAINER = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
import tiny, torch
from transformers import Trainer, TrainingArguments
torch.set_num_threads(1)
args = TrainingArguments(**tiny.training_args("out", save_strategy="steps", save_steps=1))
trainer = Trainer(model=tiny.llama(), args=args, train_dataset=tiny.TokenRows())
trainer.train()
trainer.save_model("out/final")
"""
STOPS, WORSE, NOTHING = "stops the write", "makes it worse", "does nothing"


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text):
        (tmp_path / "train.py").write_text(text)
        return text.splitlines()

    return write


def line_of(lines, comment):
    return f"train.py:{next(i for i, line in enumerate(lines, 1) if comment in line)}"


def doctor(capfd, *arguments):
    """Return exit code, outcome and the acts of each guard."""
    code = cli.main(["doctor", "--json", "train.py", *arguments])
    found = json.loads(capfd.readouterr().out)
    return code, found, {row["guard"]["name"]: row["acts"] for row in found["guards"]}


def test_a_loop_that_checks_its_norm_is_safe(script, capfd, tmp_path):
    lines = script(LOOP)
    code, found, acts = doctor(capfd, "norm")
    assert code == 0
    assert acts[line_of(lines, "checks the norm")] == [STOPS] * 5
    assert acts["the loop"] == [NOTHING] * 5
    assert [row["reaches_weights"] for row in found["failures"]] == [False] * 5
    assert [one.name for one in tmp_path.iterdir() if one.suffix != ".py"] in ([], ["incidents"])


@pytest.mark.slow
def test_a_loop_that_checks_its_loss_is_not(script, capfd):
    lines = script(LOOP)
    code, found, acts = doctor(capfd, "loss")
    assert code == 1
    assert acts[line_of(lines, "checks the loss")] == [STOPS, STOPS, *[NOTHING] * 3]
    assert acts["gradient clipping (max_norm=1)"] == [NOTHING, NOTHING, WORSE, WORSE, STOPS]
    assert [row["reaches_weights"] for row in found["failures"]] == [
        False,
        False,
        True,
        True,
        False,
    ]


@pytest.mark.slow
def test_a_scaler_of_a_loop(script, capfd):
    script(LOOP)
    code, found, acts = doctor(capfd, "scaler")
    assert code == 0
    assert acts["loss scaler"] == [STOPS] * 4 + [NOTHING]
    assert found["failures"][0]["stopped_by"] == ["loss scaler"]


@pytest.mark.slow
def test_a_check_after_the_update_comes_too_late(script, capfd):
    lines = script(LOOP.replace("loss.isnan()", "net[0].weight.isnan().any()"))
    code, found, acts = doctor(capfd, "late")
    assert code == 1
    assert acts[line_of(lines, "checks too late")][0] == "stops after the write"
    assert found["failures"][0]["outcome"].endswith("then training raises")


@pytest.mark.slow
def test_a_trainers_script(script, capfd, tmp_path):
    script(TRAINER)
    assert cli.main(["doctor", "train.py"]) == 1
    out = capfd.readouterr().out
    assert out.splitlines()[0] == "guards of Trainer, observed in 20 short trainings"
    assert out.splitlines()[-1] == "4 of 5 injected failures reach the weights"
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


@pytest.mark.slow
def test_nanstop_in_a_trainers_script(script, capfd):
    script(
        TRAINER.replace(
            "trainer.train()", "import nanstop\nnanstop.watch(trainer).folder\ntrainer.train()"
        )
    )
    code, found, acts = doctor(capfd)
    assert code == 0
    assert acts["nanstop.watch"][:4] == [STOPS] * 4
    assert not any(row["reaches_weights"] for row in found["failures"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print('nothing')", "the script ended without training"),
        (
            "import torch\np = torch.nn.Linear(2, 2)\ntorch.optim.SGD(p.parameters())",
            "without training",
        ),
        pytest.param(
            LOOP.replace("range(60)", "range(2)"),
            "ended before a failure could be planted",
            marks=pytest.mark.slow,
        ),
        ("raise ValueError", "ended with exit code 1"),
    ],
)
def test_what_cannot_be_audited(script, capfd, text, message):
    script(text)
    assert cli.main(["doctor", "train.py"]) == cli.USAGE
    assert message in capfd.readouterr().err


def test_a_script_that_is_not_there(script, capfd):
    script("")
    assert cli.main(["doctor", "trian.py"]) == cli.USAGE
    assert "did you mean `train.py`?" in capfd.readouterr().err
