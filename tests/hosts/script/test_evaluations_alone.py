"""A trainer of a script that evaluates or predicts, and does not train meanwhile."""

import math

import pytest
import torch

from loop_scripts import investigated, run_script
from nanstop.records import Diagnosis, Report
from nanstop.report.text.run_end import RunEnd

pytest.importorskip("transformers.trainer")  # what is not imported yet is not replaced

SCRIPT = """
import torch
from transformers import Trainer, TrainingArguments
import tiny

model = tiny.llama()
DTYPE and model.to(DTYPE)
options = TrainingArguments(FOLDER, max_steps=1, use_cpu=True, report_to=[], save_strategy="no")


def spoil():
    if BAD:
        model.lm_head.weight.data[5] = torch.nan


class Own(Trainer):
    def evaluate(self, *args, **kwargs):
        TIMES.append(1)
        return super().evaluate(*args, **kwargs)


trainer = Own(model, options, train_dataset=tiny.TokenRows(), eval_dataset=tiny.TokenRows())
CALLS
"""
CALLS = {
    "alone": "spoil(); loss = trainer.evaluate()['eval_loss']",
    "a prediction": "spoil(); loss = trainer.predict(tiny.TokenRows()).metrics['test_loss']",
    "after a training": "trainer.train(); spoil(); loss = trainer.evaluate()['eval_loss']",
}


@pytest.mark.parametrize("calls", CALLS)
def test_a_loss_without_a_number_is_told(tmp_path, calls):
    times = []
    source = SCRIPT.replace("CALLS", CALLS[calls])
    values = {"FOLDER": str(tmp_path / "out"), "BAD": True, "TIMES": times, "DTYPE": None}
    if calls == "alone":
        values["DTYPE"] = torch.float16  # of which a training would have findings
    ending, news = investigated(tmp_path / "script.py", source, **values)
    assert math.isnan(ending["loss"])
    (report,) = (one for one in news if isinstance(one, Report))
    assert report.diagnoses[0].code == "NS401"
    was_so = "before the first step" in report.diagnoses[0].cause
    assert was_so == (calls != "after a training")
    assert len(times) == (calls != "a prediction")
    assert not any(isinstance(one, Diagnosis) for one in news)  # of a training that there is not
    assert isinstance(news[-1], RunEnd)


@pytest.mark.parametrize("calls", CALLS)
def test_a_healthy_one_is_as_without(tmp_path, calls):
    source = SCRIPT.replace("CALLS", CALLS[calls])
    values = {"FOLDER": str(tmp_path / "out"), "BAD": False, "TIMES": [], "DTYPE": None}
    plain = run_script(tmp_path / "plain.py", source, **values)
    ending, news = investigated(tmp_path / "script.py", source, **values)
    assert ending["loss"] == plain["loss"]
    assert all(isinstance(one, RunEnd) for one in news)
    assert not {"evaluate", "predict", "prediction_step", "train"} & set(vars(ending["trainer"]))
