"""A script fails under ``nanstop run``, is changed, and is run again up to its failure: gone?"""

import json
import subprocess
import sys

import pytest

from commands.fix.failing import SCRIPTS
from e2e.scripts import run

LOG = "torch.log(p)"
STABLE = "torch.log_softmax(net(x), -1)"
STEP = 2
TRAINER = """
import sys

import torch
import transformers
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
DIVISOR = "keep.sum()"


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x, keep, labels=None):
        loss = (self.linear(x)[:, 0].square() * keep).sum() / keep.sum()
        return {"loss": loss}


rows = [
    {"x": torch.randn(4), "keep": float(not 12 <= number < 16), "labels": 0}
    for number in range(40)
]
arguments = transformers.TrainingArguments(
    output_dir=sys.argv[1],
    per_device_train_batch_size=4,
    num_train_epochs=1,
    report_to=[],
    use_cpu=True,
    save_steps=2,
    logging_steps=1,
    disable_tqdm=True,
    data_seed=0,
)


class InOrder(transformers.Trainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


InOrder(model=Mean(), args=arguments, train_dataset=rows).train()
"""


def nanstop(folder, *words):
    command = [sys.executable, "-m", "nanstop", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def last(ended):
    return ended.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """A folder with a script that failed, and its incident."""
    folder = tmp_path_factory.mktemp("failed")
    (folder / "train.py").write_text(SCRIPTS["entropy"] + "\ntorch.save(net, 'weights.pt')\n")
    ended = run(folder, "train.py")
    assert [row["step"] for row in ended.rows] == [STEP]
    (folder / "weights.pt").unlink()
    return folder


def changed(folder, name, *replacements):
    text = (folder / "train.py").read_text()
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    (folder / name).write_text(text)
    return name


@pytest.mark.slow
def test_a_script_that_was_not_changed_still_fails(failed):
    ended = nanstop(failed, "replay", "incidents/0000", "train.py")
    assert ended.returncode == 3, ended.stderr
    assert last(ended) == f"incidents/0000: the script still fails as it did, at step {STEP}"
    assert "train.py:" in ended.stdout
    assert not (failed / "weights.pt").exists()
    assert nanstop(failed, "prove", "incidents", "train.py").returncode == 3


def test_a_stable_line_is_proven(failed):
    name = changed(failed, "stable.py", (LOG, STABLE))
    ended = nanstop(failed, "prove", "incidents", name)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert last(ended) == (
        f"incidents/0000: gone: step {STEP} passes, and so did 3 updates from there on"
    )
    assert nanstop(failed, "replay", "incidents", name).returncode == 0


def test_the_cure_of_the_report_is_proven(failed):
    ended = nanstop(failed, "prove", "--cure", "incidents", "train.py")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "(cure: " in last(ended)
    assert "gone: step 2 passes" in last(ended)


@pytest.mark.slow
def test_a_script_whose_data_comes_otherwise_proves_nothing(failed):
    name = changed(failed, "other.py", ("manual_seed(0)", "manual_seed(1)"), (LOG, STABLE))
    ended = nanstop(failed, "prove", "--json", "incidents", name)
    assert ended.returncode == 3
    found = json.loads(ended.stdout)
    assert (found["verdict"], found["replayed"]["differs"]["step"]) == ("not comparable", 0)


@pytest.mark.slow
def test_a_script_that_fails_otherwise_is_not_cured(failed):
    worse = "return (x[0, 0] / (0.0 * x[0, 0]) if step == 3 else 1.0) * -("
    name = changed(failed, "worse.py", (LOG, STABLE), ("return -(", worse))
    ended = nanstop(failed, "prove", "incidents", name)
    assert ended.returncode == 3
    assert last(ended) == "incidents/0000: not gone: the script fails otherwise now, see above"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("range(5)", "range(2)"), "training is over after 2 updates, before step 2"),
        pytest.param(
            ("loss.backward()", "loss.backward()\n    assert step < 1, 'no more'"),
            "ended after 1 update, before step 2 of the incident: AssertionError: no more",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("loss.backward()", "sys.exit(4)"),
            "ended with exit code 4 before its training",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_script_that_does_not_come_to_the_step_is_an_error(failed, change, said):
    ended = nanstop(failed, "prove", "incidents", changed(failed, "short.py", change))
    assert ended.returncode == 2
    assert said in ended.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("incident", "train.py"), "did you mean `incidents`?"),
        (("incidents/0007", "train.py"), "unknown incident folder"),
        (("incidents", "trian.py"), "trian.py"),
        (("incidents",), "missing argument"),
    ],
)
@pytest.mark.parametrize("verb", ["replay", "prove"])
def test_what_is_not_there_is_a_clear_error(failed, call, monkeypatch, verb, words, said):
    monkeypatch.chdir(failed)
    code, _, err = call(verb, *words)
    assert code == 2
    assert said in err.lower()
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_trainer_is_run_again_and_saves_nothing(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAINER)
    ended = run(tmp_path, "train.py", "out")
    assert [row["step"] for row in ended.rows] == [3]
    assert nanstop(tmp_path, "replay", "incidents", "train.py", "again").returncode == 3
    script.write_text(TRAINER.replace("/ keep.sum()", "/ keep.sum().clamp(min=1)"))
    proven = nanstop(tmp_path, "prove", "--steps", "4", "incidents", "train.py", "again")
    assert proven.returncode == 0, proven.stdout + proven.stderr
    assert "and so did 5 updates" in last(proven)
    assert not list((tmp_path / "again").rglob("*.safetensors"))
