"""A script is run up to its first training;
a job is done there, and nothing of the script runs after it.
"""

from pathlib import Path

import pytest

from nanstop.commands.check import job
from nanstop.commands.check.result import Preflight
from nanstop.commands.doctor.doctor import doctor
from nanstop.errors import NanstopError
from nanstop.process.inject.dry_run import dry_run
from nanstop.process.inject.progress import PROGRESS, Progress, tell, told

TESTS = Path(__file__).parents[2]
TRAINER = f"""
import atexit, sys
sys.path.insert(0, {str(TESTS)!r})
import tiny, torch
from transformers import Trainer, TrainingArguments
torch.set_num_threads(1)
args = TrainingArguments(**tiny.training_args("out"))
trainer = Trainer(model=tiny.llama(), args=args, train_dataset=tiny.TokenRows())
print("about to train")
try:
    trainer.train()
except BaseException:
    print("caught")
finally:
    trainer.save_model("out/final")
    print("saved")
"""
LOOP = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).bfloat16()
optimizer = torch.optim.AdamW(model.parameters())
for index in range(3):
    loss = model(torch.ones(2, 4, dtype=torch.bfloat16)).pow(2).mean()
    loss.backward()
    CLIP
    optimizer.step()
    optimizer.zero_grad()
    print("step", index)
torch.save(model.state_dict(), "model.pt")
"""
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda text: (tmp_path / "train.py").write_text(text)


@pytest.mark.slow
def test_a_trainer_is_met_before_it_trains(script, tmp_path, capfd):
    script(TRAINER)
    seen = dry_run(["train.py"], job.__name__, Preflight)
    out, err = capfd.readouterr()
    assert (seen.facts.host, seen.facts.model_type, seen.facts.num_micro) == ("Trainer", "llama", 2)
    assert out == ""
    assert "about to train" in err
    assert "saved" not in err
    assert "caught" not in err
    assert not (tmp_path / "out" / "final").exists()


@pytest.mark.parametrize("clip", [CLIP, pytest.param("pass", marks=pytest.mark.slow)])
def test_a_loop_is_met_in_its_first_window(script, tmp_path, capfd, clip):
    script(LOOP.replace("CLIP", clip))
    seen = dry_run(["train.py"], job.__name__, Preflight)
    assert seen.facts.host == "loop"
    assert seen.facts.optimizer.name == "AdamW"
    assert "step" not in capfd.readouterr().err
    assert not (tmp_path / "model.pt").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print('no training here')", "the script ended without training"),
        ("raise ValueError('no data')", "ended with exit code 1 before its training"),
    ],
)
def test_a_script_that_never_trains(script, text, message):
    script(text)
    with pytest.raises(NanstopError, match=message):
        dry_run(["train.py"], job.__name__, Preflight)


def test_a_script_that_is_not_there(script):
    script("")
    with pytest.raises(NanstopError, match=r"no such script: trian\.py") as raised:
        dry_run(["trian.py"], job.__name__, Preflight)
    assert "did you mean `train.py`?" in raised.value.hint


class Followed:
    """What is shown while one waits, in order."""

    def __init__(self):
        self.seen = []

    def __call__(self, progress, seconds):
        self.seen.append((progress.done, progress.total))

    def clear(self):
        self.seen.append("clear")


def test_how_far_a_job_is_can_be_followed_and_what_its_script_prints_is_kept(script, capfd):
    script(
        LOOP.replace("CLIP", CLIP)
        .replace("range(3)", "range(40)")
        .replace(".bfloat16()", "")
        .replace(", dtype=torch.bfloat16", "")
    )
    followed = Followed()
    found = doctor(["train.py"], followed)
    assert found.num_reaching
    *parts, last = followed.seen
    assert last == "clear"
    assert (0, 0) in parts  # the script imports torch
    assert all(done <= total for done, total in (one for one in parts if one != "clear"))
    assert capfd.readouterr().err == ""


def test_what_a_followed_script_wrote_is_shown_where_it_did_not_train(script, capfd):
    script("print('before')\nraise ValueError('no data')")
    followed = Followed()
    with pytest.raises(NanstopError, match="ended with exit code 1 before its training"):
        dry_run(["train.py"], job.__name__, Preflight, follow=followed)
    said = capfd.readouterr().err
    assert said.startswith("before\n")
    assert "ValueError: no data" in said
    assert followed.seen[-1] == "clear"


def test_a_job_tells_how_far_it_is_only_where_somebody_waits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tell(Progress(done=1, total=2))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv(PROGRESS, str(tmp_path / "told.json"))
    tell(Progress(done=1, total=2))
    assert told(tmp_path / "told.json") == Progress(done=1, total=2)
    (tmp_path / "told.json").write_text('{"done": 1, "to')
    assert told(tmp_path / "told.json") == Progress()
