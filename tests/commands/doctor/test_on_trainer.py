"""Audits of real trainers: what each guard does is observed, and the trainer is afterwards what
it was before.
"""

import math
import sys

import pytest
import torch
from transformers import Trainer, TrainerCallback

import hf_cases
import nanstop
from nanstop.commands.doctor.doctor import CLIP, FILTER, SCALER, WATCH, judge
from nanstop.commands.doctor.on_trainer import TrainerAudit

CLIPPING = f"{CLIP} (max_grad_norm=1)"
STOPS, LATE, WORSE, HIDES, NOTHING = (
    "stops the write",
    "stops after the write",
    "makes it worse",
    "hides",
    "does nothing",
)


pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing")


class StopsInTheLog(TrainerCallback):
    """Too late: the log is written after the update."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if any(isinstance(v, float) and not math.isfinite(v) for v in (logs or {}).values()):
            control.should_training_stop = True


class DropsGradients(TrainerCallback):
    """Works: gradients of None are no update."""

    def __init__(self):
        self.seen = 0

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if not all(bool(g.isfinite().all()) for g in gradients):
            self.seen += 1
            model.zero_grad(set_to_none=True)


class OnlySpeaks(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if not math.isfinite((logs or {}).get("grad_norm", 0.0)):
            sys.stderr.write("WARNING: the gradient is not finite\n")


class Saves(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        control.should_training_stop = True


class Counts(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.steps_seen = state.global_step


def audited(trainer):
    return judge(TrainerAudit(trainer).run())


def acts(found):
    return {row.guard.name: row.acts for row in found.guards}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.mark.slow
def test_a_plain_trainer_hides_spreads_and_goes_on(tmp_path):
    trainer = hf_cases.build(
        "trainer", tmp_path, save_strategy="steps", save_steps=1, logging_steps=2
    )
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    rng, attributes = torch.get_rng_state(), set(vars(trainer))
    found = audited(trainer)
    assert acts(found) == {
        FILTER: (HIDES, HIDES, HIDES, NOTHING, NOTHING),
        CLIPPING: (WORSE, WORSE, WORSE, WORSE, STOPS),
        "Trainer": (NOTHING,) * 5,
    }
    assert [row.reaches_weights for row in found.failures] == [True, True, True, True, False]
    after = trainer.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in weights.items())
    assert torch.equal(rng, torch.get_rng_state())
    assert set(vars(trainer)) == attributes
    assert trainer.optimizer is None
    assert found.notes == (
        "every step is logged here; what waits for a log waits 2 steps in yours",
    )
    assert trainer.args.max_steps == 5
    assert not list(tmp_path.iterdir())
    assert not any(p.grad is not None or p._backward_hooks for p in trainer.model.parameters())


@pytest.mark.slow
def test_callbacks_that_act_in_time_too_late_and_not_at_all(tmp_path):
    trainer = hf_cases.build("trainer", tmp_path)
    works = DropsGradients()
    for callback in (StopsInTheLog(), works, OnlySpeaks(), Counts()):
        trainer.add_callback(callback)
    found = audited(trainer)
    seen = acts(found)
    assert seen["callback DropsGradients"][:4] == (STOPS,) * 4
    assert seen["callback Counts"] == (NOTHING,) * 5
    assert seen["callback StopsInTheLog"][0] == STOPS or found.num_reaching == 0
    assert found.num_reaching == 0
    assert works.seen == 0, "a copy of the callback was at work"


@pytest.mark.slow
def test_a_callback_that_comes_too_late(tmp_path):
    trainer = hf_cases.build("trainer", tmp_path)
    for callback in (StopsInTheLog(), OnlySpeaks(), Saves()):
        trainer.add_callback(callback)
    seen = acts(found := audited(trainer))
    assert seen["callback StopsInTheLog"][:4] == (LATE,) * 4
    assert seen["callback OnlySpeaks"][:4] == ("only logs",) * 4
    assert found.num_reaching == 4
    assert found.failures[0].outcome.endswith("then training stops")
    assert found.notes[0].endswith("at evaluation, saving or the ends only: Saves")


@pytest.mark.slow
def test_a_scaler_acts(tmp_path):
    found = audited(hf_cases.build("trainer", tmp_path, precision="scaler"))
    assert acts(found)[SCALER] == (STOPS, STOPS, STOPS, STOPS, NOTHING)
    assert found.num_reaching == 0
    assert found.failures[2].stopped_by == (SCALER,)


@pytest.mark.slow
def test_the_norm_for_the_log_destroys_gradients_where_clipping_is_off(tmp_path):
    """transformers 5 clips to infinity to get the norm: inf / inf is NaN, for every gradient."""
    seen = acts(found := audited(hf_cases.build("trainer", tmp_path, max_grad_norm=0.0)))
    assert seen["gradient norm for the log (max_grad_norm=0)"] == (WORSE,) * 5
    assert found.num_reaching == 5


@pytest.mark.slow
def test_nothing_of_dpo_acts(tmp_path):
    found = audited(hf_cases.build("dpo", tmp_path))
    assert acts(found)["DPOTrainer"] == (NOTHING,) * 5
    assert found.num_reaching == 4


@pytest.mark.slow
def test_every_failure_can_be_planted_in_grpo(tmp_path):
    found = audited(hf_cases.build("grpo", tmp_path))
    assert all(row.tried for row in found.failures)
    assert found.num_reaching >= 4


@pytest.mark.slow
def test_nanstop_in_the_script_stops_them_all(tmp_path):
    trainer = hf_cases.build("trainer", tmp_path / "out")
    with nanstop.watch(trainer, out=tmp_path / "incidents"):
        found = audited(trainer)
    assert acts(found)[WATCH][:4] == (STOPS,) * 4
    assert found.num_reaching == 0


@pytest.mark.slow
def test_a_check_in_the_users_own_loss(tmp_path):
    class Careful(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            loss = super().compute_loss(model, inputs, **kwargs)
            return (
                loss
                if torch.isfinite(loss)
                else torch.nan_to_num(loss.detach()) * 0
                + sum(p.sum() * 0 for p in model.parameters())
            )

    trainer = hf_cases.build("trainer", tmp_path)
    trainer.__class__ = Careful
    found = audited(trainer)
    line = next(row for row in found.guards if row.guard.kind == "line")
    assert line.guard.name.startswith("test_on_trainer.py:")
    assert line.acts[:2] == (STOPS, STOPS)
    assert [row.reaches_weights for row in found.failures[:2]] == [False, False]


def test_a_training_that_fails_by_itself_is_no_basis(tmp_path):
    trainer = hf_cases.build("trainer", tmp_path)
    hf_cases.Fault(trainer, bad={0}, error=RuntimeError("broken"))
    with pytest.raises(nanstop.NanstopError, match="the training itself fails: RuntimeError"):
        audited(trainer)
