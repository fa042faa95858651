"""The whole flow on a GPU: watching changes nothing, a redo is bitwise, and an overflow is
found, proven and cured.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch.nn import functional as F

import nanstop
import tiny
from hf_cases import ScriptedSession

pytestmark = pytest.mark.gpu
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
PRECISIONS = {
    "fp32": ({}, torch.float32),
    "bf16": ({"bf16": True}, torch.float32),
    "fp16 with scaler": ({"fp16": True}, torch.float32),
    "bf16 weights": ({}, torch.bfloat16),
}


def build(out, precision: str, **settings):
    from transformers import Trainer, TrainingArguments

    options, dtype = PRECISIONS[precision]
    model = tiny.llama(attn_implementation="eager", attention_dropout=0.1).to(dtype)
    args = tiny.training_args(out) | {"use_cpu": False, "max_steps": 6} | options | settings
    torch.manual_seed(0)
    return Trainer(model=model, args=TrainingArguments(**args), train_dataset=tiny.TokenRows())


def finished(trainer):
    """Train; return weights, optimizer moments, losses and the GPU's random state."""
    trainer.train()
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    moments = [
        value.clone()
        for state in trainer.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return weights, moments, losses, torch.cuda.get_rng_state()


def assert_same(first, second):
    for one, other in zip(first[:2], second[:2], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert first[2] == second[2]
    assert torch.equal(first[3], second[3])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_watching_changes_nothing(tmp_path, precision):
    plain = finished(build(tmp_path, precision))
    trainer = build(tmp_path, precision)
    watch = nanstop.watch(trainer, out=tmp_path / "n")
    watched = finished(trainer)
    assert_same(plain, watched)
    assert watch.incidents == ()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_redo_is_bitwise(tmp_path, precision):
    from nanstop.hosts.trainer.watch import watch_trainer

    plain = finished(build(tmp_path, precision))
    trainer = build(tmp_path, precision)
    session = ScriptedSession("redo")
    strikes = iter((False, False, False, True))

    def strike(_module, _args, output):
        if trainer.model.training and not session.failures and next(strikes, False):
            return output * float("nan")
        return output

    trainer.model.model.layers[0].mlp.register_forward_hook(strike)
    watch_trainer(trainer, session.open)
    assert_same(plain, finished(trainer))
    assert len(session.failures) == 1


@pytest.mark.parametrize("precision", ["fp16 weights", "fp16 with scaler"])
def test_overflow_is_found_and_cured(tmp_path, precision):
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Trainer, TrainingArguments

    torch.manual_seed(0)
    model = Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
        )
    )
    model.model.layers[1].post_feedforward_layernorm.weight.data.fill_(5e4)
    extra = {"optim": "sgd"}
    if precision == "fp16 weights":
        model = model.half()
    else:
        extra["fp16"] = True
    args = tiny.training_args(tmp_path) | {"use_cpu": False, "max_steps": 6} | extra
    trainer = Trainer(model=model, args=TrainingArguments(**args), train_dataset=tiny.TokenRows())
    watch = nanstop.watch(trainer, out=tmp_path / "n")
    trainer.train()
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    if precision == "fp16 weights":
        (report,) = watch.incidents
        assert report.diagnoses[0].code == "NS201"
        assert report.localization.key.module == "model.layers.1.post_feedforward_layernorm"
        assert report.proof.verdict == "proven"
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        assert len(losses) == 6
        assert all(loss > 1 for loss in losses)


def test_raw_loop_with_a_scaler(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)

    def loss_fn(batch):
        with torch.autocast("cuda", dtype=torch.float16):
            out = model(batch["x"])
        return F.mse_loss(out.float(), batch["y"]) + batch["x"].mean().log() * 0

    with nanstop.watch(model, optimizer, policy="skip", out=tmp_path / "n") as watch:
        for step in range(6):
            x = torch.rand(16, 8, device="cuda") * (-1 if step == 3 else 1)
            watch.step(loss_fn, {"x": x, "y": torch.zeros(16, 4, device="cuda")})
            watch.update(scaler=scaler)
    (report,) = watch.incidents
    assert report.incident.at.step == 3
    assert report.localization.key.op == "aten.log.default"
    assert all(bool(p.isfinite().all()) for p in model.parameters())
