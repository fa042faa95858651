"""The watch on a trainer: what is an incident, what is not, and what happens when nothing can be
done.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from contextlib import nullcontext

import pytest
import torch

import hf_cases as cases
import nanstop
from nanstop.detect.numeric_errors import is_numeric, phase_of
from nanstop.errors import NanstopError, TrainingStopped
from nanstop.hosts import compat
from nanstop.hosts.trainer.watch import watch_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing")


def watched(folder, answer="proceed", *, kind="trainer", fault=None, change=None, **settings):
    session = cases.ScriptedSession(answer)
    trainer = cases.build(kind, folder, **settings)
    if change is not None:
        change(trainer)
    return cases.run(trainer, session=session, fault=fault), session, trainer


def test_an_infinite_norm_of_finite_gradients_is_no_incident(tmp_path):
    """Three million squared leaves float16: the norm overflows, the gradients do not."""

    def scale_up(trainer):
        trainer.model.lm_head.weight.register_hook(lambda grad: torch.full_like(grad, 3e4))

    _, session, _ = watched(tmp_path, precision="fp16", change=scale_up, max_steps=1)
    assert session.failures == []
    assert session.series.of("grad_norm") == [float("inf")]


def test_a_norm_for_the_log_spoils_no_gradient(tmp_path):
    """With clipping off transformers clips to infinity:
    inf / inf would be NaN for every gradient.
    """

    def scale_up(trainer):
        trainer.model.lm_head.weight.register_hook(lambda grad: torch.full_like(grad, 1e30))

    _, session, trainer = watched(tmp_path, change=scale_up, max_grad_norm=0.0, max_steps=2)
    assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())
    # Earlier versions clip by no norm at all then, and log none.
    has_norm = any("grad_norm" in entry for entry in trainer.state.log_history)
    assert ({"infinite_norm_at": 0} in session.learnt) is has_norm
    assert {"infinite_norm_at": 1} not in session.learnt


def test_a_norm_that_is_finite_is_not_noted(tmp_path):
    _, session, _ = watched(tmp_path, max_grad_norm=0.0, max_steps=1)
    assert not any("infinite_norm_at" in one for one in session.learnt)


def test_a_bad_gradient_with_a_finite_loss_is_named(tmp_path):
    def spoil(trainer):
        weight = trainer.model.model.layers[1].mlp.down_proj.weight
        weight.register_hook(lambda grad: grad / 0.0)

    result, session, _ = watched(tmp_path, "skip", change=spoil, max_steps=1)
    (failure,) = session.failures
    assert [(s.source, s.name) for s in failure.signals] == [
        ("grad", "model.layers.1.mlp.down_proj.weight")
    ]
    assert all(w.isfinite().all() for w in result.weights.values())


def test_a_scaler_may_overflow_three_times_in_a_row_but_not_four(tmp_path):
    def overflow(trainer):
        trainer.model.lm_head.weight.register_hook(lambda grad: grad + float("inf"))

    plain_trainer = cases.build("trainer", tmp_path, precision="scaler")
    overflow(plain_trainer)
    plain = cases.run(plain_trainer)
    result, session, _ = watched(tmp_path, precision="scaler", change=overflow)
    assert [f.step.id.step for f in session.failures] == [3]
    assert session.failures[0].signals[0].source == "scaler"
    # After three skips of the scaler's own, 1024 has become 128.
    assert session.failures[0].signals[0].value == 128.0
    assert session.series.of("scale") == [1024.0, 512.0, 256.0, 128.0, 64.0]
    assert plain.differences(result) == []


def test_a_bad_loss_under_a_scaler_is_an_incident_at_once(tmp_path):
    _, session, _ = watched(tmp_path, "redo", precision="scaler", fault={"bad": (2,)})
    assert [f.step.id.step for f in session.failures] == [1]


def test_a_failure_that_no_redo_cures_ends_as_a_skip(tmp_path):
    def break_for_good(trainer):
        original = trainer.compute_loss

        def compute_loss(*args, **kwargs):
            loss = original(*args, **kwargs)
            return loss * float("nan") if trainer.state.global_step == 2 else loss

        trainer.compute_loss = compute_loss

    result, session, _ = watched(tmp_path, "redo", change=break_for_good)
    assert [f.step.id.step for f in session.failures] == [2, 2, 2]
    assert session.completed_steps == [0, 1, 3, 4]
    assert all(w.isfinite().all() for w in result.weights.values())


def test_a_redo_that_itself_fails_is_a_skip(tmp_path, caplog):
    class Failing(cases.ScriptedSession):
        def failed(self, step, alarm, **details):
            decision = super().failed(step, alarm, **details)
            step.window.micros[0].rng = None
            return decision

    session = Failing("redo")
    result = cases.run(cases.build("trainer", tmp_path), session=session, fault={"bad": (5,)})
    assert "could not be redone" in caplog.text
    assert session.completed_steps == [0, 1, 3, 4]
    assert all(w.isfinite().all() for w in result.weights.values())


class TestExceptions:
    ERROR = RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")

    @pytest.mark.parametrize("kind", ["trainer", "grpo"])
    def test_redo_is_as_if_it_had_not_been_raised(self, tmp_path, kind):
        plain = cases.run(cases.build(kind, tmp_path))
        losses = []
        session = cases.ScriptedSession("redo", inspect=lambda step, _: losses.extend(step.losses))
        fault = {"bad": (3,), "error": self.ERROR}
        result = cases.run(cases.build(kind, tmp_path), session=session, fault=fault)
        (failure,) = session.failures
        assert failure.error is self.ERROR
        assert failure.phase == "forward"
        assert losses[0].isfinite()
        assert losses[1:] == [None]
        assert plain.differences(result) == []

    @pytest.mark.parametrize("kind", ["trainer", "grpo"])
    @pytest.mark.parametrize("precision", ["fp32", "scaler"])
    def test_skip_gives_up_the_windows_update_and_nothing_else(self, tmp_path, kind, precision):
        fault = {"bad": (2,), "error": self.ERROR}
        settings = {"kind": kind, "precision": precision}
        result, session, trainer = watched(tmp_path, "skip", fault=fault, **settings)
        assert len(session.failures) == 1
        assert session.completed_steps == [0, 2, 3, 4]
        assert result.state["global_step"] == 5
        assert all(w.isfinite().all() for w in result.weights.values())
        steps = {float(s["step"]) for s in trainer.optimizer.state.values()}
        assert steps == {4.0}
        if kind == "grpo":
            assert trainer._step == 10

    def test_it_is_raised_unchanged_when_nothing_is_done(self, tmp_path):
        with pytest.raises(RuntimeError, match="probability tensor") as caught:
            watched(tmp_path, "proceed", fault={"bad": (3,), "error": self.ERROR})
        assert caught.value is self.ERROR

    def test_others_are_not_incidents(self, tmp_path):
        session = cases.ScriptedSession("redo")
        fault = {"bad": (3,), "error": KeyError("image")}
        with pytest.raises(KeyError, match="image"):
            cases.run(cases.build("trainer", tmp_path), session=session, fault=fault)
        assert session.failures == []
        assert session.exceptions == [(1, 1, fault["error"])]
        assert session.finished == 1

    @pytest.mark.parametrize("is_bad", [True, False])
    def test_what_a_loss_raises_itself_is_one_where_a_bad_number_is_why(self, tmp_path, is_bad):
        """Nothing is done about it: the script has asked to end."""

        def guard(trainer):
            original = trainer.compute_loss

            def compute_loss(model, inputs, **rest):
                loss = original(model, inputs, **rest)
                if trainer.state.global_step == 2 and is_bad:
                    loss = loss / 0.0
                if trainer.state.global_step == 2 and torch.isfinite(loss) != is_bad:
                    raise ValueError("the loss is not as it should be")
                return loss

            trainer.compute_loss = compute_loss

        session = cases.ScriptedSession("redo")
        trainer = cases.build("trainer", tmp_path)
        guard(trainer)
        with pytest.raises(ValueError, match="as it should be"):
            cases.run(trainer, session=session)
        assert len(session.failures) == is_bad
        assert len(session.exceptions) == (not is_bad)
        assert session.finished == 1

    @pytest.mark.parametrize("phase", ["generate", "evaluate"])
    def test_generation_is_watched(self, tmp_path, phase):
        session = cases.ScriptedSession("redo")
        trainer = cases.build("grpo", tmp_path)
        # Its batches are lists of rows before it generates.
        trainer.eval_dataset = trainer.train_dataset.select(range(4))
        trainer.args.eval_on_start = phase == "evaluate"

        def generate(*_, **__):
            raise self.ERROR

        trainer._generate_and_score_completions = generate
        with pytest.raises(RuntimeError, match="probability tensor"):
            cases.run(trainer, session=session)
        (failure,) = session.failures
        assert failure.phase == phase
        assert all(isinstance(batch, Mapping) for batch in failure.step.batches)
        with failure.step.isolated(), pytest.raises(RuntimeError, match="probability tensor"):
            failure.step.run(0)

    @pytest.mark.parametrize(
        ("text", "numeric"),
        [
            ("index out of range in self", True),
            ("Attempting to unscale FP16 gradients.", True),
            ("CUDA error: device-side assert triggered", True),
            ("Function 'MulBackward0' returned nan values in its 0th output.", True),
            ("Expected parameter logits of Categorical [...], but found invalid values: nan", True),
            ("CUDA out of memory.", False),
            ("Expected all tensors to be on the same device", False),
        ],
    )
    def test_signatures(self, text, numeric):
        assert is_numeric(RuntimeError(text)) is numeric

    def test_one_that_a_library_says_in_its_own_words(self):
        def refused(cause):
            try:
                raise IndexError("coordinates should be within 0-1000") from cause
            except IndexError as error:
                return error

        assert is_numeric(refused(IndexError("index out of range in self")))
        assert not is_numeric(refused(KeyError("bbox")))

    def test_the_phase_is_read_off_the_traceback(self):
        class Bad(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                raise FloatingPointError("found nan")

        with pytest.raises(FloatingPointError) as caught:
            Bad.apply(torch.ones((), requires_grad=True)).backward()
        assert phase_of(caught.value) == "backward"
        assert phase_of(FloatingPointError("found nan")) == "forward"


class TestEvaluation:
    def run(self, folder, spoil):
        from transformers import IntervalStrategy

        session = cases.ScriptedSession("redo")
        trainer = cases.build("trainer", folder, max_steps=4)
        trainer.args.eval_strategy, trainer.args.eval_steps = IntervalStrategy.STEPS, 2
        trainer.eval_dataset = torch.utils.data.Subset(trainer.train_dataset, range(4))

        def strike(module, args, output):
            return output if module.training else spoil(output)

        trainer.model.model.norm.register_forward_hook(strike)
        return session, trainer

    def test_a_bad_loss_is_reported_once_with_a_step_that_replays(self, tmp_path):
        session, trainer = self.run(tmp_path, lambda output: output * float("nan"))
        replayed = []
        session.inspect = lambda step, _: replayed.append(step.run(0))
        cases.run(trainer, session=session)
        assert [(f.phase, f.step.id.step) for f in session.failures] == [
            ("evaluate", 2),
            ("evaluate", 4),
        ]
        assert replayed[0].isnan()

    def test_its_step_says_whether_it_runs_without_other_processes(self, tmp_path):
        session, trainer = self.run(tmp_path, lambda output: output * float("nan"))
        local = []
        session.inspect = lambda step, _: local.append(step.is_local)
        cases.run(trainer, session=session)
        assert local == [True, True]

    def test_evaluation_changes_nothing_when_it_is_healthy(self, tmp_path):
        session, trainer = self.run(tmp_path, lambda output: output)
        watched_result = cases.run(trainer, session=session)
        _, trainer = self.run(tmp_path, lambda output: output)
        assert cases.run(trainer).differences(watched_result) == []
        assert session.failures == []

    def test_an_exception_is_reported_and_raised_unchanged(self, tmp_path):
        def fail(_):
            raise IndexError("index out of range in self")

        session, trainer = self.run(tmp_path, fail)
        with pytest.raises(IndexError, match="out of range in self"):
            cases.run(trainer, session=session)
        assert [(f.phase, len(f.step.batches)) for f in session.failures] == [("evaluate", 1)]


class TestUnknownShapes:
    """A trainer that is not as nanstop knows them trains as ever, and one sentence says that
    nobody watches.
    """

    def plain(self, folder):
        return cases.run(cases.build("trainer", folder, max_steps=2))

    def test_a_trainer_that_lacks_a_seam_is_left_as_it_was(self, tmp_path, capsys):
        trainer = cases.build("trainer", tmp_path, max_steps=2)
        trainer.prediction_step = None
        before = dict(vars(trainer))
        with pytest.raises(NanstopError, match=r"transformers \S+ has no prediction_step"):
            watch_trainer(trainer, cases.ScriptedSession("redo").open)
        watch = nanstop.watch(trainer)
        assert vars(trainer) == before
        assert re.search(
            r"nanstop: this training goes on unwatched: Trainer of transformers \S+ has no",
            capsys.readouterr().err,
        )
        assert self.plain(tmp_path).differences(cases.run(trainer)) == []
        assert watch.incidents == ()

    def test_a_session_that_cannot_be_opened_ends_the_watch_and_not_the_run(self, tmp_path, caplog):
        def fail(view, facts):
            raise AttributeError("no attribute 'of_a_later_version'")

        trainer = cases.build("trainer", tmp_path, max_steps=2)
        watch = watch_trainer(trainer, fail)
        cases.seed()
        cases.Fault(trainer)
        trainer.train()
        assert self.plain(tmp_path).differences(cases.result(trainer)) == []
        (record,) = caplog.records
        assert re.match(
            r"nanstop: this training of Trainer of transformers \S+ "
            r"goes on unwatched: AttributeError",
            record.message,
        )
        assert "training_step" not in vars(trainer)
        assert watch.session is None


class TestPowerless:
    def test_several_ranks_only_observe(self, tmp_path, monkeypatch):
        monkeypatch.setattr(compat, "world_size", lambda _: 2)
        result, session, _ = watched(tmp_path, "redo", fault={"bad": (3,)})
        assert session.facts.world_size == 2
        assert session.failures[0].step.id.step == 1
        assert not all(w.isfinite().all() for w in result.weights.values())

    def test_an_update_inside_backward_cannot_be_held_back(self, tmp_path):
        def hook(trainer):
            def update(weight):
                weight.data -= 1e-4 * weight.grad

            trainer.model.lm_head.weight.register_post_accumulate_grad_hook(update)

        _, session, _ = watched(tmp_path, "redo", change=hook, fault={"bad": (3,)})
        assert "inside backward" in session.learnt[0]["veto"]
        assert session.failures[0].step.id.step == 1
        assert session.completed_steps == [0, 1, 2, 3, 4]

    def test_a_trainer_with_a_step_of_its_own_can_only_leave_updates_out(self, tmp_path):
        def own_step(trainer):
            def training_step(model, inputs, num_items_in_batch=None):
                loss = model(**inputs).loss / 2
                trainer.accelerator.backward(loss)
                return loss.detach()

            trainer.training_step = training_step

        plain_trainer = cases.build("trainer", tmp_path)
        own_step(plain_trainer)
        result, session, _ = watched(tmp_path, "redo", change=own_step)
        assert cases.run(plain_trainer).differences(result) == []
        assert session.failures == []
        result, session, _ = watched(tmp_path, "redo", change=own_step, fault={"bad": (3,)})
        assert session.failures[0].step.id.step == 1
        with pytest.raises(NanstopError, match="not replayable"):
            session.failures[0].step.isolated().__enter__()
        assert session.completed_steps == [0, 2, 3, 4]
        assert all(w.isfinite().all() for w in result.weights.values())


def test_a_batch_that_is_no_mapping_replays(tmp_path):
    def pairs(trainer):
        trainer.data_collator = lambda rows: [torch.stack([row["input_ids"] for row in rows])]
        trainer.compute_loss = lambda model, inputs, **_: model(inputs[0], labels=inputs[0]).loss
        trainer.floating_point_ops = lambda _: 0

    plain_trainer = cases.build("trainer", tmp_path, remove_unused_columns=False)
    pairs(plain_trainer)
    plain = cases.run(plain_trainer)
    settings = {"remove_unused_columns": False, "change": pairs, "fault": {"bad": (3,)}}
    result, session, _ = watched(tmp_path, "redo", **settings)
    assert plain.differences(result) == []
    assert set(session.failures[0].step.batches[0]) == {"inputs"}


class TestCheckpoints:
    def run(self, folder, step, **session_settings):
        trainer = cases.build("trainer", folder, save_strategy="steps", save_steps=2)
        session = cases.ScriptedSession("proceed", **session_settings)
        watch = watch_trainer(trainer, session.open)
        guarded = trainer._save_checkpoint

        def save(*args):
            if trainer.state.global_step == step:
                trainer.model.lm_head.weight.data[3, 3] = float("inf")
            return guarded(*args)

        trainer._save_checkpoint = save
        stops = pytest.raises(TrainingStopped, match="training stopped")
        with nullcontext() if session.go_on_after_refusal else stops:
            trainer.train()
        watch.close()
        return trainer, session

    def test_good_ones_are_written_as_ever(self, tmp_path):
        _, session = self.run(tmp_path, step=-1)
        assert session.refused == []
        assert (tmp_path / "checkpoint-2" / "model.safetensors").exists()
        assert (tmp_path / "checkpoint-5" / "optimizer.pt").exists()

    def test_a_bad_one_is_not_written_and_the_last_good_one_is_named(self, tmp_path):
        _, session = self.run(tmp_path, step=4)
        assert session.refused[0] == (
            str(tmp_path / "checkpoint-4"),
            ("lm_head.weight",),
            str(tmp_path / "checkpoint-2"),
        )
        assert not (tmp_path / "checkpoint-4").exists()

    def test_without_a_good_one_the_snapshot_is_written(self, tmp_path):
        from safetensors.torch import load_file

        trainer, session = self.run(tmp_path, step=2, go_on_after_refusal=False)
        kept = tmp_path / "checkpoint-2-last-good"
        assert session.refused[0][2] == str(kept)
        saved = load_file(kept / "model.safetensors")
        assert all(weight.isfinite().all() for weight in saved.values())
        assert trainer.model.lm_head.weight.data[3, 3].isinf()
        assert trainer.state.global_step == 2

    def test_weights_that_were_not_finite_before_and_that_nothing_reads_are_saved(self, tmp_path):
        from safetensors.torch import load_file

        trainer = cases.build("trainer", tmp_path, save_strategy="steps", save_steps=2)
        table = trainer.model.get_input_embeddings().weight
        table.data[table.shape[0] - 1] = float("nan")
        rows = [{"input_ids": torch.arange(2, 10), "labels": torch.arange(2, 10)}] * 8
        trainer.train_dataset = rows
        session = cases.ScriptedSession("proceed")
        watch = watch_trainer(trainer, session.open)
        trainer.train()
        watch.close()
        assert (session.failures, session.refused) == ([], [])
        saved = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
        assert saved["model.embed_tokens.weight"].isnan().any()

    def test_save_model_after_training_is_guarded_too(self, tmp_path):
        trainer = cases.build("trainer", tmp_path)
        session = cases.ScriptedSession("proceed")
        watch = watch_trainer(trainer, session.open)
        trainer.train()
        trainer.model.lm_head.weight.data.fill_(float("nan"))
        trainer.save_model(str(tmp_path / "final"))
        watch.close()
        assert session.refused[0][1] == ("lm_head.weight",)
        assert not (tmp_path / "final" / "model.safetensors").exists()


def test_every_loss_that_a_second_training_logs_is_kept(tmp_path):
    trainer = cases.build("trainer", tmp_path, max_steps=2)
    session = cases.ScriptedSession("proceed")
    watch = watch_trainer(trainer, session.open)
    trainer.train()
    trainer.train()
    watch.close()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert session.series.of("loss_logged")[2:] == logged
    assert len(logged) == 2


def test_weights_that_break_in_the_last_update_are_reported_at_the_end(tmp_path):
    def break_last(trainer):
        original = trainer.callback_handler.on_step_end

        def on_step_end(args, state, control):
            if state.global_step == 5:
                trainer.model.lm_head.weight.data[1] = float("nan")
            return original(args, state, control)

        trainer.callback_handler.on_step_end = on_step_end

    _, session, _ = watched(tmp_path, change=break_last)
    (failure,) = session.failures
    assert failure.step is None
    assert failure.bad_params == ("lm_head.weight",)
    assert [s.id.step for s in failure.rewind.steps][-1] == 4


def test_histories_hold_what_the_host_went_on_with(tmp_path):
    _, redone, _ = watched(tmp_path, "redo", fault={"bad": (3,)})
    assert len(redone.series.of("loss_raw")) == 10
    assert all(math.isfinite(loss) for loss in redone.series.of("loss_raw"))
    _, skipped, _ = watched(tmp_path, "skip", fault={"bad": (3,)})
    assert [math.isfinite(loss) for loss in skipped.series.of("loss_raw")].index(False) == 3


def test_ids_are_those_of_the_run(tmp_path):
    _, session, trainer = watched(tmp_path, "redo", fault={"bad": (3,)}, run_name="mine")
    assert dataclasses.asdict(session.failures[0].step.id) == {
        "run": "mine",
        "step": 1,
        "micro": None,
        "rank": 0,
    }
    assert trainer.state.global_step == 5


def test_a_buffer_that_was_never_finite_is_the_buffers_own_fault(tmp_path):
    """0 x Inf is NaN: the product is undefined, and nothing is wrong with it. The copies that put
    the buffer back before the step is run again are no operations of the step.
    """
    trainer = cases.build("trainer", tmp_path, max_steps=1)
    trainer.model.model.rotary_emb.inv_freq.fill_(math.inf)
    watch = nanstop.watch(trainer, policy="observe", out=tmp_path / "incidents")
    trainer.train()
    found = watch.incidents[0].diagnoses[0]
    assert (found.code, found.where) == ("NS506", "model.rotary_emb.inv_freq")
