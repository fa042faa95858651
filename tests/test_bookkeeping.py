"""What an action leaves behind:
redo is as if the fault had never been, skip and rollback as the host's own would be.
"""

import math

import pytest
import torch

import hf_cases as cases

SMALL = [(kind, "fp32", None) for kind in cases.MAKERS] + [
    ("trainer", "bf16", None),
    ("sft", "fp16", None),
    ("trainer", "scaler", None),
    ("trainer", "fp32", False),
    ("dpo", "fp32", True),
]
LARGE = [
    (kind, precision, checkpointing)
    for kind in cases.MAKERS
    for precision in ("fp32", "bf16", "fp16", "scaler")
    for checkpointing in (None, False, True)
    if (kind, precision, checkpointing) not in SMALL
]
# TRL 1.16 uses names that transformers 5.23 has replaced.
# KTO runs a forward without gradients, of which reentrant checkpointing warns.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]
MATRIX = SMALL + [pytest.param(*case, marks=pytest.mark.slow) for case in LARGE]


def redone(folder, kind, bad, answer="redo", on_stop="raise", **settings):
    session = cases.ScriptedSession(answer, on_stop=on_stop)
    trainer = cases.build(kind, folder, **settings)
    return cases.run(trainer, session=session, fault={"bad": bad}), session


@pytest.mark.parametrize(("kind", "precision", "checkpointing"), MATRIX)
def test_redo_is_as_if_nothing_had_happened(tmp_path, kind, precision, checkpointing):
    settings = {"precision": precision, "checkpointing": checkpointing}
    plain = cases.run(cases.build(kind, tmp_path, **settings))
    # The first window's first micro-batch, the middle of a window, and the last window of the run.
    for bad in ((0,), (3, 8)):
        watched, session = redone(tmp_path, kind, bad, **settings)
        assert plain.differences(watched) == []
        assert [f.step.id.step for f in session.failures] == [b // 2 for b in bad]
        assert [f.signals[0].at.micro for f in session.failures] == [b % 2 for b in bad]


@pytest.mark.parametrize("log_filter", [True, False])
def test_redo_with_accumulation_remainder_and_logging_over_windows(tmp_path, log_filter):
    settings = {
        "gradient_accumulation_steps": 3,
        "max_steps": -1,
        "num_train_epochs": 1,
        "logging_steps": 4,
        "per_device_train_batch_size": 8,
        "logging_nan_inf_filter": log_filter,
        "include_num_input_tokens_seen": "all",
    }
    plain = cases.run(cases.build("trainer", tmp_path, **settings))
    watched, session = redone(tmp_path, "trainer", (4, 9), **settings)
    assert plain.differences(watched) == []
    assert [len(f.step.batches) for f in session.failures] == [3, 1]


def test_redo_keeps_what_generation_inside_the_window_wrote(tmp_path):
    """GRPO generates before each micro-batch here, and adapts its entropy bonus at the window's
    end, where it has one.
    """
    from trl import GRPOConfig

    settings = {"steps_per_generation": 1, "num_iterations": 1}
    entropy = {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 100.0}
    adapts = hasattr(GRPOConfig, "use_adaptive_entropy")
    settings |= entropy if adapts else {}
    plain = cases.run(cases.build("grpo", tmp_path, **settings))
    for bad in (2, 5):
        watched, session = redone(tmp_path, "grpo", (bad,), **settings)
        assert len(session.failures) == 1
        assert plain.differences(watched) == []
    assert len(plain.logs) == 6
    if adapts:
        assert plain.logs[0]["entropy_coef"] < plain.logs[1]["entropy_coef"]


def test_redo_puts_back_running_statistics_and_the_users_own_counters(tmp_path):
    def counting(trainer):
        trainer.model.model.norm.register_buffer("mean", torch.zeros(32))

        def average(module, args, output):
            module.mean.mul_(0.9).add_(output.detach().mean((0, 1)))

        trainer.model.model.norm.register_forward_hook(average)
        trainer.seen, trainer.history, trainer.total = 0, [], torch.zeros(())
        original = trainer.compute_loss

        def compute_loss(*args, **kwargs):
            loss = original(*args, **kwargs)
            trainer.seen += 1
            trainer.history.append(loss.item())
            trainer.total += loss.detach()
            return loss

        trainer.compute_loss = compute_loss
        return trainer

    plain_trainer = counting(cases.build("trainer", tmp_path))
    plain = cases.run(plain_trainer)
    trainer = counting(cases.build("trainer", tmp_path))
    session = cases.ScriptedSession("redo")
    watched = cases.run(trainer, session=session, fault={"bad": (5,)})
    assert plain.differences(watched) == []
    assert len(session.failures) == 1
    assert (trainer.seen, trainer.history) == (plain_trainer.seen, plain_trainer.history)
    assert torch.equal(trainer.total, plain_trainer.total)


def test_without_redo_the_fault_is_in_the_weights(tmp_path):
    watched, session = redone(tmp_path, "trainer", (3,), answer="proceed")
    assert not all(w.isfinite().all() for w in watched.weights.values())
    assert session.failures[0].bad_params == ()
    assert len(session.failures[1].bad_params) > 0
    assert session.failures[1].rewind is not None


@pytest.mark.parametrize("precision", ["fp32", "scaler"])
def test_skip_is_a_step_that_a_scaler_skipped(tmp_path, precision):
    """The reference run skips the same step by a callback, the way the host's own overflow
    handling does.
    """
    from transformers import TrainerCallback

    class SkipOne(TrainerCallback):
        kept = None

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step != 1:
                return
            wrapped, scaler = trainer.optimizer, trainer.optimizer.scaler
            if scaler is None:
                wrapped.zero_grad()
                wrapped._is_overflow = True
            else:
                self.kept = scaler.state_dict()
                found = scaler._per_optimizer_states[id(wrapped.optimizer)]["found_inf_per_device"]
                next(iter(found.values())).fill_(1.0)

        def on_step_end(self, args, state, control, **kwargs):
            trainer.optimizer._is_overflow = False
            if self.kept is not None:
                trainer.optimizer.scaler.load_state_dict(self.kept)
                self.kept = None

    # The fused AdamW skips inside its kernel, unseen by accelerate:
    # there the host itself moves the schedule on.
    settings = {"precision": precision, "optim": "adamw_torch"}
    trainer = cases.build("trainer", tmp_path, **settings)
    trainer.add_callback(SkipOne())
    reference = cases.run(trainer)
    watched, session = redone(tmp_path, "trainer", (3,), answer="skip", **settings)
    rates = [entry.get("learning_rate") for entry in watched.logs]
    assert rates == [entry.get("learning_rate") for entry in reference.logs]
    assert rates[0] > rates[1] == rates[2] > rates[3]
    reference.logs = watched.logs
    assert reference.differences(watched) == []
    assert watched.state["global_step"] == 5
    assert session.completed_steps == [0, 2, 3, 4]


def test_skip_leaves_no_running_statistic_broken(tmp_path):
    trainer = cases.build("trainer", tmp_path)
    norm = trainer.model.model.norm
    norm.register_buffer("mean", torch.zeros(32))

    def average(module, args, output):
        module.mean.mul_(0.9).add_(output.detach().mean((0, 1)))

    norm.register_forward_hook(average)
    cases.run(trainer, session=cases.ScriptedSession("skip"), fault={"bad": (3,)})
    assert norm.mean.isfinite().all()
    assert norm.mean.abs().sum() > 0


def test_skip_with_an_unfiltered_log_shows_the_bad_loss_and_does_not_poison_later_entries(tmp_path):
    watched, _ = redone(tmp_path, "trainer", (3,), answer="skip", logging_nan_inf_filter=False)
    losses = [entry["loss"] for entry in watched.logs if "loss" in entry]
    assert [math.isfinite(loss) for loss in losses] == [True, False, True, True, True]


def test_stop_ends_training_through_the_hosts_own_door(tmp_path):
    watched, session = redone(tmp_path, "trainer", (5,), answer="stop", on_stop="end")
    assert watched.state["global_step"] == 3
    assert all(w.isfinite().all() for w in watched.weights.values())
    assert session.finished == 3
    assert (session.completed_steps, session.left_out_steps) == ([0, 1], [2])


def test_rollback_is_a_run_resumed_from_the_snapshot(tmp_path):
    """Weights break between two windows;
    going back and applying the updates again gives the plain run.
    """
    plain = cases.run(cases.build("trainer", tmp_path))
    trainer = cases.build("trainer", tmp_path)
    session = cases.ScriptedSession("rollback")
    original = trainer.get_batch_samples
    calls = []

    def break_weights(*args):
        calls.append(1)
        if len(calls) == 4:
            trainer.model.lm_head.weight.data[5] = float("nan")
        return original(*args)

    trainer.get_batch_samples = break_weights
    watched = cases.run(trainer, session=session)
    assert session.failures[0].bad_params == ("lm_head.weight",)
    assert plain.differences(watched) == []


@pytest.mark.parametrize("kind", ["trainer", "grpo"])
def test_isolation_undoes_everything_a_replay_changes(tmp_path, kind):
    plain = cases.run(cases.build(kind, tmp_path))

    def replay(step, rewind):
        for with_update in (False, True):
            with step.isolated(with_update=with_update):
                losses = [step.run(micro) for micro in range(len(step.batches))]
                assert all(bool(loss.isfinite()) for loss in losses)
                if with_update:
                    step.update()
        with rewind.rewound():
            pass

    session = cases.ScriptedSession("redo", inspect=replay)
    watched = cases.run(cases.build(kind, tmp_path), session=session, fault={"bad": (3,)})
    assert plain.differences(watched) == []


def test_a_replay_gives_the_same_gradient_each_time_and_the_update_moves_the_weights(tmp_path):
    seen = []

    def replay(step, _):
        weight = step.view.root.lm_head.weight
        before = weight.detach().clone()
        for _ in range(2):
            with step.isolated(with_update=True):
                assert weight.grad is None
                step.run(1)
                seen.append(weight.grad.clone())
                step.update()
                assert not torch.equal(weight, before)
            assert torch.equal(weight, before)

    session = cases.ScriptedSession("redo", inspect=replay)
    cases.run(cases.build("trainer", tmp_path), session=session, fault={"bad": (3,)})
    assert len(seen) == 2
    assert torch.equal(*seen)
