"""Each set-up fails as published without nanstop, and its cure, applied by hand, is the one that
is claimed.
"""

import math

import pytest
import torch

from nanstop.demo import dpo, qlora, reward, sft
from nanstop.demo.quiet import quiet
from nanstop.demo.scenario import Setup
from versions import needs

WHOLE = torch.float32


@pytest.fixture(autouse=True)
def silence():
    with quiet():
        yield


def train(trainer):
    """(log lines, whether all weights are finite at the end)."""
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return logs, all(bool(p.isfinite().all()) for p in trainer.model.parameters())


def healthy(trainer):
    logs, finite = train(trainer)
    return finite and all(0 < log["loss"] < 50 and math.isfinite(log["grad_norm"]) for log in logs)


def setup_for(tmp_path, steps, **settings):
    return Setup(out=tmp_path, steps=steps, **settings)


def test_s1_logs_zero_and_nan_from_the_first_step(tmp_path):
    logs, finite = train(dpo.build(setup_for(tmp_path, 2)))
    assert [log["loss"] for log in logs] == [0.0, 0.0]
    assert all(math.isnan(log["grad_norm"]) for log in logs)
    assert all(math.isnan(log["rewards/chosen"]) for log in logs)
    assert not finite


@pytest.mark.slow
def test_s1_is_cured_by_the_planted_norm_in_float32(tmp_path):
    trainer = dpo.build(setup_for(tmp_path, 2))
    norm = trainer.model.base_model.model.get_submodule(dpo.PLANTED)
    norm.register_forward_pre_hook(lambda _, arguments: (arguments[0].float(),))
    assert healthy(trainer)


@pytest.mark.slow
def test_s4_logs_an_astronomical_loss_then_zero(tmp_path):
    logs, finite = train(reward.build(setup_for(tmp_path, 50)))
    assert 1e33 < logs[0]["loss"] < 1e35
    assert math.isnan(logs[0]["grad_norm"])
    assert logs[1]["loss"] == 0.0
    assert not finite


def test_s4_leaves_only_the_head_in_half(tmp_path):
    trainer = reward.build(setup_for(tmp_path, 25))
    formats = {name: p.dtype for name, p in trainer.model.named_parameters() if p.requires_grad}
    half = [name for name, dtype in formats.items() if dtype == torch.float16]
    assert [name.rpartition("score.")[2] for name in half] == ["modules_to_save.default.weight"]
    assert len(formats) > 1


@pytest.mark.slow
def test_s4_is_cured_by_the_head_in_float32(tmp_path):
    trainer = reward.build(setup_for(tmp_path, 25))
    head = trainer.model.base_model.model.score.modules_to_save.default.float()
    head.register_forward_pre_hook(lambda _, arguments: (arguments[0].float(),))
    assert healthy(trainer)


def test_s5_logs_zero_and_nan_in_eager_attention_only(tmp_path):
    logs, _ = train(sft.build(setup_for(tmp_path, 2)))
    assert [log["loss"] for log in logs] == [0.0, 0.0]
    assert all(math.isnan(log["grad_norm"]) for log in logs)
    fused = sft.build(setup_for(tmp_path, 2))
    fused.model.set_attn_implementation("sdpa")
    assert healthy(fused)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_s5_inference_with_the_fused_kernel_is_fine(kernel):
    ids = torch.arange(5, 37).view(1, 32)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        logits = sft.biased_qwen2(kernel)(input_ids=ids).logits
    assert bool(logits.isfinite().all()) is (kernel == "sdpa")


STEPS = 8
BREAKS_AT = {"half-trainables": 1, "zero-rows": 6, "8bit-optimizer": 2}
VARIANTS = sorted(BREAKS_AT)


def full_trainables(trainer):
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def other_optimizer(trainer):
    """AdamW that computes and keeps its state in torch, in the parameters' own format."""
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    trainer.optimizer = torch.optim.AdamW(trained, lr=trainer.args.learning_rate)


def trained_rows(trainer):
    rows = trainer.model.get_input_embeddings().base_layer.weight.data
    rows[-4:] = rows[-8:-4]


CURES = {
    "half-trainables": full_trainables,
    "zero-rows": trained_rows,
    "8bit-optimizer": other_optimizer,
}


EIGHT_BIT = needs("bitsandbytes", "0.50", "8-bit optimizers on the CPU")
FAILING = [pytest.param(v, marks=[EIGHT_BIT] if v != "half-trainables" else []) for v in VARIANTS]


@pytest.mark.parametrize("variant", FAILING)
def test_s2_fails_when_it_should(tmp_path, variant):
    logs, finite = train(qlora.build(setup_for(tmp_path, STEPS, variant=variant)))
    bad = [not math.isfinite(log["grad_norm"]) for log in logs]
    assert bad == [step >= BREAKS_AT[variant] for step in range(STEPS)]
    assert not finite


@pytest.mark.slow
@pytest.mark.parametrize("cure", VARIANTS)
@pytest.mark.parametrize("variant", FAILING)
def test_s2_has_one_cause_in_each_variant(tmp_path, variant, cure):
    trainer = qlora.build(setup_for(tmp_path, STEPS, variant=variant))
    CURES[cure](trainer)
    assert healthy(trainer) is (variant == cure)
