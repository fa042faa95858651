"""Architectures of different kinds, built small as the benchmark builds all of them:
silent in health, exact when broken.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import architectures
import architectures_plan
import architectures_plants
import architectures_table
import architectures_trials as trials

from versions import needs

pytestmark = [
    needs("transformers", "5.0", "the benchmark is of the architectures of today"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:This process:DeprecationWarning"
    ),  # fork, from Python 3.12 on
]

KINDS = ["llama", "mixtral", "mamba", "qwen3_next", "gemma3_text", "gpt2"]
"""Dense, mixture of experts, state space, linear attention, sliding window, tied with learned
positions.
"""
MORE = ["deepseek_v3", "gpt_oss", "jamba", "rwkv", "recurrent_gemma", "falcon_h1", "xlnet"]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def maker(model_type):
    return lambda: trials.build(model_type)


def check_healthy(model_type, form):
    health = trials.healthy(maker(model_type), form)
    assert (health.sick, health.incidents, health.findings, health.same) == ("", [], [], True)


def check_planted(model_type, form):
    plant = architectures_plants.planted(maker(model_type), form, seed=1)
    assert plant.truth, plant.reason
    assert plant.found == plant.truth


@pytest.mark.parametrize("model_type", KINDS)
def test_healthy_steps_are_silent(model_type):
    check_healthy(model_type, "bfloat16 weights")


@pytest.mark.parametrize("model_type", KINDS)
def test_planted_overflow_is_named(model_type):
    check_planted(model_type, "float16 weights")


@pytest.mark.slow
def test_plan_agrees_with_float32():
    parity, plan = architectures_plan.planned(maker("gemma3_text"), seconds=30.0)
    assert parity.parity, parity
    assert trials.healthy(maker("gemma3_text"), "float32", plan).incidents == []


@pytest.mark.slow
@pytest.mark.parametrize("form", architectures.PLANTED)
@pytest.mark.parametrize("model_type", KINDS + MORE)
def test_every_form(model_type, form):
    check_planted(model_type, form)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", KINDS + MORE)
def test_every_kind_is_silent_in_float32(model_type):
    check_healthy(model_type, "float32")


class Overflows(nn.Module):
    """An infinite mask passes through healthy modules;
    one product leaves its format where it is told to.
    """

    def __init__(self, factor):
        super().__init__()
        self.inner, self.last = nn.Identity(), nn.Identity()
        self.weight = nn.Parameter(torch.ones(4))
        self.factor = factor

    def forward(self, x):
        mask = self.inner(torch.full((4,), float("-inf")))
        x = self.inner(x * self.weight * self.factor)
        return self.last(torch.where(mask.isinf(), x, mask)).sum()


def test_witness_knows_the_module_and_excuses_a_mask():
    batch = {"x": torch.ones(4)}
    usual = architectures_plants.witness(
        healthy := Overflows(1.0), lambda b: healthy(b["x"]), batch
    )
    assert not usual.failed
    assert usual.exempt
    broken = nn.Sequential(Overflows(1e38 * 10))
    usual = architectures_plants.witness(
        ordinary := nn.Sequential(Overflows(1.0)), lambda b: ordinary(b["x"]), batch
    )
    seen = architectures_plants.witness(broken, lambda b: broken(b["x"]), batch, usual.exempt)
    assert (seen.failed, seen.module) == (True, "0")


def test_a_class_that_cannot_be_built_is_a_row():
    row = architectures.in_child("git", ["health"], seconds=30.0)
    assert row["reason"].startswith("ValueError")
    assert architectures.missing(row, ["health"]) == []


def test_a_class_that_takes_too_long_is_a_row(monkeypatch):
    def endless(*_):
        while True:
            pass

    monkeypatch.setattr(architectures, "examine", endless)
    monkeypatch.setattr(architectures, "_WAITS", 120.0)  # it has one core among many others
    row = architectures.in_child("llama", ["health"], seconds=1.0)
    assert row["stopped"] == "not finished in 1 s"


def test_page_says_what_the_results_say():
    results = json.loads(architectures.RESULTS.read_text())
    assert architectures_table.PAGE.read_text() == architectures_table.page(results)
