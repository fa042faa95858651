"""The seed scenarios end to end:
they fail as published, are explained, proven cured, and finish at float32's loss.
"""

import json
import math

import pytest

from nanstop.demo.scenarios import SCENARIOS, run_scenario
from versions import needs


def finished(name, variant=None):
    """The result of a scenario, after what must hold of all of them."""
    said = []
    result = run_scenario(name, variant=variant, echo=said.append)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert result["verdict"] == "proven"
    assert result["lost_steps"] == 0
    assert result["steps"] == SCENARIOS[name].steps
    assert result["checkpoint_finite"] is True
    assert math.isclose(result["final_loss"], result["reference_loss"], rel_tol=0.01)
    assert said
    return result


def test_s1_gemma3_dpo():
    result = finished("s1-gemma3-dpo-fp16")
    assert result["symptom"][0]["loss"] == 0.0
    assert result["symptom"][0]["rewards/chosen"] == "nan"
    assert result["code"] == "NS201"
    assert result["phase"] == "forward"
    assert result["op"] == "aten._to_copy.default"
    assert result["module"].endswith("layers.1.post_feedforward_layernorm")
    assert "modeling_gemma3.py:" in result["source"]
    assert "post_feedforward_layernorm` in float32" in result["remedy"]


@pytest.mark.slow
def test_s3_grpo_sigfpe():
    result = run_scenario("s3-grpo-sigfpe", echo=lambda _: None)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert (result["symptom"], result["exit"], result["survived"]) == ("SIGFPE", 136, True)
    assert (result["code"], result["op"], result["step"]) == ("NS601", "aten.mm.default", 0)
    assert result["module"].endswith("mlp.down_proj")
    assert "modeling_qwen2.py:" in result["source"]
    assert (result["minimal"], result["sufficient_fix"]) == (["bf16"], ["bf16"])
    assert (result["differing_keys"], result["verdict"]) == (13, "proven")
    assert result["trials"] <= 12
    assert result["codes"] == ["NS601", "NS108"]
    assert "nvidia-cublas-cu12 >= 12.4.5.8" in result["known_defect"]


@pytest.mark.slow
def test_s5_qwen2_sft():
    result = finished("s5-qwen2-sft-fp16")
    assert result["code"] == "NS201"
    assert result["module"].endswith("layers.1.self_attn")
    assert "layers.1.self_attn` in float32" in result["remedy"] or "sdpa" in result["remedy"]


@pytest.mark.slow
def test_s4_reward():
    result = finished("s4-reward-half-head")
    assert 1e33 < result["symptom"][0]["loss"] < 1e35
    assert "the real loss before it was 0.69" in result["decoded"][0]
    assert result["code"] == "NS402"
    assert "NS102" in result["codes"]
    assert result["phase"] == "optimizer"
    assert "trainable parameters" in result["remedy"]


@needs("bitsandbytes", "0.50", "8-bit optimizers on the CPU")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "code", "beside", "remedy"),
    [
        ("half-trainables", "NS402", "NS102", "trainable parameters"),
        ("zero-rows", "NS301", "NS103", "re-initialise the untrained rows"),
        ("8bit-optimizer", "NS402", None, "adamw and float32 state"),
    ],
)
def test_s2_names_the_cause_that_was_planted(variant, code, beside, remedy):
    result = finished("s2-gemma-qlora-newtokens", variant)
    assert result["symptom"][0]["loss"] < 7
    assert result["code"] == code
    assert remedy in result["remedy"]
    assert beside is None or beside in result["codes"]
