"""TRL's trainers on a GPU: watching changes nothing, and a redo is bitwise."""

from __future__ import annotations

import os

import pytest
import torch

import hf_cases
from doubles.session import ScriptedSession

pytest.importorskip("trl")

# TRL 1.16 uses names that transformers 5.23 has replaced.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*gradient_checkpointing")]
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
KINDS = ("sft", "dpo", "reward", "kto", "grpo", "rloo")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_watched_and_redone_runs_are_bitwise_those_of_a_plain_one(kind, precision, tmp_path):
    def finished(name: str, **given):
        (tmp_path / name).mkdir()
        trainer = hf_cases.build(kind, tmp_path / name, precision=precision, use_cpu=False)
        assert next(trainer.model.parameters()).is_cuda
        found = hf_cases.run(trainer, **given)
        return found, torch.cuda.get_rng_state()

    plain, plain_rng = finished("plain")
    healthy, redone = ScriptedSession("redo"), ScriptedSession("redo")
    watched, watched_rng = finished("watched", session=healthy)
    assert plain.differences(watched) == []
    assert torch.equal(plain_rng, watched_rng)
    assert healthy.failures == []
    again, again_rng = finished("again", session=redone, fault={"bad": (3,)})
    assert len(redone.failures) == 1
    assert plain.differences(again) == []
    assert torch.equal(plain_rng, again_rng)
