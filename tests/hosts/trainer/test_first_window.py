"""The first window of a trainer that was built:
its real objective, and a training afterwards as if nothing had been.
"""

import pytest
import torch

import hf_cases
from nanstop import NanstopError
from nanstop.hosts.trainer.first_window import first_step
from nanstop.measure.probe import probe

torch.set_num_threads(1)

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing")
TRL_KINDS = ("grpo", "sft", "dpo", "reward", "kto", "rloo")
KINDS = ["trainer", *(pytest.param(kind, marks=pytest.mark.slow) for kind in TRL_KINDS)]


def trained(trainer):
    hf_cases.seed()
    trainer.train()
    return hf_cases.result(trainer)


def shares(rows, part, whole):
    return sum(getattr(r, part) for r in rows) / sum(getattr(r, whole) for r in rows)


@pytest.mark.parametrize("kind", KINDS)
def test_training_after_a_probe_is_bitwise_the_training_without(kind, tmp_path):
    plain = trained(hf_cases.build(kind, tmp_path / "a", max_steps=2))
    trainer = hf_cases.build(kind, tmp_path / "b", max_steps=2)
    attributes = {name: id(value) for name, value in vars(trainer).items()}
    state = torch.get_rng_state()
    found = first_step(trainer, probe)
    assert found.problems == ()
    assert found.num_micro == 2
    assert found.loss == pytest.approx(found.reference_loss, abs=1e-6)
    assert {row.phase for row in found.ranges} >= {"forward", "backward"}
    assert {name: id(value) for name, value in vars(trainer).items()} == attributes
    assert torch.equal(state, torch.get_rng_state())
    assert trained(trainer).differences(plain) == []


def test_an_emulated_scaler_s_scale_is_in_the_backward(tmp_path):
    trainer = hf_cases.build("trainer", tmp_path, precision="scaler")
    found = first_step(trainer, probe)
    assert found.problems == ()
    assert found.loss_scale == 1024.0
    backward = [r for r in found.ranges if r.phase == "backward" and r.dtype == "float16"]
    assert max(row.absmax for row in backward) > 1.0
    assert shares(found.gradients, "num_flushed", "num_nonzero") < 0.01
    assert {row.dtype for row in found.updates} == {"float32"}


def test_pure_bfloat16_at_a_learning_rate_of_1e_6_loses_nearly_every_update(tmp_path):
    trainer = hf_cases.build("trainer", tmp_path, precision="bf16", learning_rate=1e-6)
    found = first_step(trainer, probe)
    assert found.lr == 1e-6
    assert 0.97 < shares(found.updates, "num_lost", "num_total") < 0.999


def test_the_learning_rate_is_that_after_the_warm_up(tmp_path):
    trainer = hf_cases.build("trainer", tmp_path, warmup_steps=3)
    found = first_step(trainer, probe)
    assert found.lr == 1e-3
    assert shares(found.updates, "num_lost", "num_total") == 0.0


def test_a_watched_trainer_is_refused(tmp_path):
    from nanstop.hosts.trainer.watch import watch_trainer

    trainer = hf_cases.build("trainer", tmp_path)
    watch = watch_trainer(trainer, hf_cases.ScriptedSession("proceed").open)
    with pytest.raises(NanstopError, match="being watched"):
        first_step(trainer, probe)
    watch.close()


def test_what_the_first_window_raises_is_raised_and_undone(tmp_path):
    trainer = hf_cases.build("trainer", tmp_path)
    attributes = {name: id(value) for name, value in vars(trainer).items()}
    trainer.model.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError, match="division"):
        first_step(trainer, probe)
    assert {name: id(value) for name, value in vars(trainer).items()} == attributes


def test_a_window_that_fails_is_probed_as_well(tmp_path):
    trainer = hf_cases.build("trainer", tmp_path, precision="fp16")
    with torch.no_grad():
        trainer.model.model.layers[0].mlp.up_proj.weight.mul_(3e4)
        trainer.model.model.layers[0].mlp.gate_proj.weight.mul_(3e4)
    found = first_step(trainer, probe)
    assert found.loss != found.loss
    assert found.reference_loss == found.reference_loss
    first = min(found.ranges, key=lambda row: row.headroom_bits)
    assert first.headroom_bits < 0
    assert found.ranges[0] == first
    assert any("not finite" in problem for problem in found.problems)
