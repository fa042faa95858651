"""The seed scenario S1 under a plan made from the trainer itself:
nothing fails, and it trains as in float32.
"""

import pytest
import torch

import nanstop
import plan_models as models
from nanstop.demo.dpo import PLANTED, build
from nanstop.demo.scenario import Setup
from nanstop.records import PrecisionPlan, Region
from nanstop.remedies.forward import Wrapper

pytestmark = pytest.mark.slow


def losses(trainer):
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


@pytest.mark.filterwarnings("ignore")
def test_dpo_trains_in_float16_as_in_float32(tmp_path):
    exact = build(Setup(out=tmp_path / "exact", steps=4, float32=True))
    exact.train()

    trainer = build(Setup(out=tmp_path / "run", steps=4))
    before = models.state(trainer.model)
    plan = nanstop.plan(trainer)
    assert models.same(before, models.state(trainer.model))
    assert trainer.state.global_step == 0
    (region,) = plan.record.regions
    assert region.modules == (f"base_model.model.{PLANTED}",)
    assert plan.record.calibration.data == "the first window of the training"

    plan.save(tmp_path / "plan.yaml")
    with nanstop.watch(trainer, out=tmp_path / "n", plan=tmp_path / "plan.yaml") as watch:
        trainer.train()
        with pytest.raises(nanstop.NanstopError, match="watched already"):
            nanstop.watch(trainer, plan=plan)
    assert watch.incidents == ()
    assert losses(trainer) == pytest.approx(losses(exact), rel=0.01)
    assert all(bool(torch.isfinite(p).all()) for p in trainer.model.parameters())
    own = (vars(module).get("forward") for module in trainer.model.modules())
    assert not any(isinstance(forward, Wrapper) for forward in own)


@pytest.mark.filterwarnings("ignore")
def test_a_plan_that_does_not_fit_is_refused_before_training(tmp_path):
    trainer = build(Setup(out=tmp_path, steps=1))
    plan = PrecisionPlan(dtype="float16", regions=(Region(modules=("model.layers.9.mlp",)),))
    with pytest.raises(nanstop.NanstopError, match=r"unknown module in the plan: `model.layers.9"):
        nanstop.watch(trainer, out=tmp_path / "n", plan=plan)
    with pytest.raises(nanstop.NanstopError, match="brings its own batches"):
        nanstop.plan(trainer, lr=1e-5)
