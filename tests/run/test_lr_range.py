"""``nanstop lr-range`` on scripts: the sweep runs in place of the training, and what cannot be swept is said."""

from pathlib import Path

import pytest

from nanstop import cli
from nanstop.errors import NanstopError
from nanstop.report.codec import from_json
from nanstop.run.lr_range import lr_range, render, result_file
from nanstop.search.lr_range import LrRange

TRAINING = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print('no training here')", "without training by a transformers or TRL trainer"),
        ("raise ValueError('no data')", "ended with exit code 1 before the sweep could begin"),
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
