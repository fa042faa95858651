"""Plain user scripts with a planted fault, each beside its healthy twin:
found, named, cured or left out, and finished.
"""

from __future__ import annotations

import contextlib
import json
import math

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from transformers import Trainer, TrainerCallback, TrainingArguments

import hf_cases as cases
import nanstop
import tiny
from versions import needs

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]
NAN = float("nan")


class InOrder(Trainer):
    def _get_train_sampler(self, *_args, **_details):
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Points(torch.utils.data.Dataset):
    """``bad``: samples with a NaN among their inputs."""

    def __init__(self, bad=(), size=64) -> None:
        self.bad, self.size = bad, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index):
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        y = x.sum()
        if index in self.bad:
            x[2] = NAN
        return {"x": x, "labels": y}


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 1)

    def forward(self, x, labels=None):
        y = self.b(torch.relu(self.norm(self.a(x)))).squeeze(-1)
        return {"loss": (y - labels).square().mean(), "logits": y}


def points(out, bad=(), *, model=None, trainer=InOrder, **settings):
    cases.seed()
    details = {k: settings.pop(k) for k in ("eval_dataset", "data_collator") if k in settings}
    settings = {"per_device_train_batch_size": 4} | settings
    return trainer(
        model=model or Perceptron(),
        args=TrainingArguments(**tiny.training_args(out, **settings)),
        train_dataset=Points(bad),
        **details,
    )


def rare_overflow(out, marked, *, dtype=torch.float16, trainer=InOrder, **settings):
    """A Llama whose gated product leaves float16 at one token, which only the ``marked`` samples
    have.
    """
    model = tiny.llama()
    with torch.no_grad():
        rows = model.model.embed_tokens.weight
        rows[:, 0], rows[2], rows[2, 0] = 0.0, 0.0, 0.02
        mlp = model.model.layers[0].mlp
        for weight, value in ((mlp.gate_proj.weight, 80.0), (mlp.up_proj.weight, 800.0)):
            weight[0], weight[0, 0] = 0.0, value
        mlp.down_proj.weight[:, 0] = 1e-6

    class Rows(tiny.TokenRows):
        def __getitem__(self, index):
            ids = super().__getitem__(index)["input_ids"].clone()
            if index in marked:
                ids[5] = 2
            return {"input_ids": ids, "labels": ids}

    cases.seed()
    settings = {"optim": "sgd", "learning_rate": 1e-4} | settings
    args = TrainingArguments(**tiny.training_args(out, **settings))
    return trainer(model=model.to(dtype), args=args, train_dataset=Rows())


def train(trainer, **policy):
    watch = nanstop.watch(trainer, policy=nanstop.Policy(**policy), out=trainer.args.output_dir)
    cases.seed()
    trainer.train()
    return watch


def rows_of(watch):
    return json.loads((watch.folder / "summary.json").read_text())["incidents"]


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def weights(trainer):
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters()}


def assert_finite(trainer):
    assert all(p.isfinite().all() for p in trainer.model.parameters())


# ---- number formats, repaired


QUICK = [("sft", True), ("grpo", None)]
OVERFLOWING = [
    pytest.param(
        kind,
        checkpointing,
        marks=[] if (kind, checkpointing) in QUICK else [pytest.mark.slow],
    )
    for kind in ("sft", "dpo", "reward", "grpo", "rloo")
    for checkpointing in (None, *((True, False) if kind in ("sft", "dpo") else ()))
]


def overflowing(kind, out, checkpointing, *, precision="scaler"):
    trainer = cases.build(kind, out, precision=precision, checkpointing=checkpointing)
    mlp = trainer.model.model.layers[1].mlp
    with torch.no_grad():
        mlp.gate_proj.weight[0], mlp.up_proj.weight[0] = 60.0, 60.0
        mlp.down_proj.weight[:, 0] = 1e-6
    return trainer


@pytest.mark.parametrize(("kind", "checkpointing"), OVERFLOWING)
def test_a_float16_product_is_kept_in_float32_from_the_first_step_on(tmp_path, kind, checkpointing):
    exact = overflowing(kind, tmp_path / "exact", checkpointing, precision="fp32")
    cases.seed()
    exact.train()
    trainer = overflowing(kind, tmp_path / "half", checkpointing)
    watch = train(trainer)
    (row,) = rows_of(watch)
    assert (row["code"], row["op"], row["phase"]) == ("NS201", "aten.mul.Tensor", "forward")
    assert (row["module"], row["step"], row["micro"]) == ("model.layers.1.mlp", 0, 0)
    assert row["source"].rsplit("/", 1)[-1].startswith("modeling_llama.py:")
    assert (row["verdict"], row["action"]) == ("proven", "adopt")
    assert row["remedy"] == "keep `model.layers.1.mlp` in float32"
    assert watch.report().steps == trainer.state.global_step == 5
    assert_finite(trainer)
    if kind in ("sft", "dpo", "reward"):
        assert losses(trainer)[0] == pytest.approx(losses(exact)[0], rel=1e-2)
    assert "forward" not in vars(trainer.model.model.layers[1].mlp)


def test_a_rare_overflow_is_redone_where_it_strikes_and_adopted_when_it_comes_again(tmp_path):
    exact = rare_overflow(tmp_path / "exact", (14, 22), dtype=torch.float32)
    cases.seed()
    exact.train()
    trainer = rare_overflow(tmp_path / "half", (14, 22), save_strategy="steps", save_steps=4)
    watch = train(trainer)
    (row,) = rows_of(watch)
    assert (row["code"], row["step"], row["micro"], row["count"]) == ("NS201", 3, 1, 2)
    kinds = [entry.action.kind for entry in watch.incidents[0].audit]
    assert kinds == ["redo", "adopt"]
    assert losses(trainer) == pytest.approx(losses(exact), rel=2e-3)
    for step in (4, 8):
        saved = load_file(tmp_path / "half" / f"checkpoint-{step}" / "model.safetensors")
        assert {value.dtype for value in saved.values()} == {torch.float16}
        assert all(value.isfinite().all() for value in saved.values())


def test_adamw_in_float16_is_rolled_back_and_the_checkpoints_stay_in_the_users_format(tmp_path):
    def half(out, dtype):
        cases.seed()
        args = tiny.training_args(out, optim="adamw_torch", save_strategy="steps", save_steps=4)
        model = tiny.llama().to(dtype)
        return Trainer(model=model, args=TrainingArguments(**args), train_dataset=tiny.TokenRows())

    exact = half(tmp_path / "exact", torch.float32)
    cases.seed()
    exact.train()
    trainer = half(tmp_path / "half", torch.float16)
    watch = train(trainer)
    (row,) = rows_of(watch)
    assert row["codes"][:2] == ["NS402", "NS102"]
    assert (row["step"], row["phase"], row["action"]) == (0, "optimizer", "rollback")
    assert losses(trainer) == pytest.approx(losses(exact), rel=1e-3)
    saved = load_file(tmp_path / "half" / "checkpoint-8" / "model.safetensors")
    assert all(value.isfinite().all() for value in saved.values())
    assert all(torch.equal(saved[name], p) for name, p in trainer.model.named_parameters())
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float16}


def test_a_second_training_is_cured_as_the_first_was(tmp_path):
    trainer = rare_overflow(tmp_path, (0, 5), max_steps=3)
    watch = train(trainer)
    trainer.train()
    (row,) = rows_of(watch)
    assert row["count"] == 2
    assert all(map(math.isfinite, losses(trainer)))
    assert_finite(trainer)


# ---- data, left out


@pytest.mark.parametrize("accumulation", [1, 3])
def test_samples_left_out_leave_the_gradient_of_the_others(tmp_path, accumulation):
    """The reference never had the bad samples: its collator drops them."""
    bad = (9, 13, 15)

    def collate(samples):
        kept = [sample for sample in samples if sample["x"].isfinite().all()]
        return torch.utils.data.default_collate(kept)

    settings = {
        "gradient_accumulation_steps": accumulation,
        "max_steps": -1,
        "num_train_epochs": 1,
        "data_collator": torch.utils.data.default_collate,
    }
    reference = points(tmp_path / "a", bad, **settings | {"data_collator": collate})
    cases.seed()
    reference.train()
    trainer = points(tmp_path / "b", bad, **settings)
    watch = train(trainer, allow=("drop_sample",))
    (row,) = rows_of(watch)
    assert (row["code"], row["action"], row["verdict"]) == ("NS501", "quarantine", "isolated")
    assert losses(trainer) == losses(reference)
    mine, others = weights(trainer), weights(reference)
    assert all(torch.equal(mine[name], others[name]) for name in mine)


def test_a_micro_batch_is_left_out_and_a_window_of_nothing_else_is_skipped(tmp_path):
    trainer = points(tmp_path, (*range(12, 16), *range(24, 32)))
    watch = train(trainer, allow=("drop_micro",))
    (row,) = rows_of(watch)
    assert (row["code"], row["step"], row["micro"], row["count"]) == ("NS501", 1, 1, 2)
    assert watch.report().steps == 8
    assert_finite(trainer)


@needs("trl", "1.0", "counts its buffered slices after the loss")
def test_generation_goes_on_at_the_right_place_after_a_micro_batch_was_left_out(tmp_path):
    """GRPO counts its buffered slices inside ``training_step``."""
    plain = cases.build("grpo", tmp_path / "plain")
    cases.seed()
    plain.train()
    trainer = cases.build("grpo", tmp_path / "faulty")
    original = trainer.compute_loss

    def compute_loss(model, inputs, *args, **details):
        loss = original(model, inputs, *args, **details)
        first = trainer.state.global_step == 2 and trainer._step % 2 == 0
        return loss + torch.log(loss.detach() * 0) if first else loss

    trainer.compute_loss = compute_loss
    watch = train(trainer, allow=("drop_micro",))
    (row,) = rows_of(watch)
    assert (row["step"], row["micro"], row["action"]) == (2, 0, "quarantine")
    assert trainer._step == plain._step


def test_an_id_out_of_range_is_one_lost_update(tmp_path):
    class Rows(tiny.TokenRows):
        def __getitem__(self, index):
            ids = super().__getitem__(index)["input_ids"].clone()
            if index in (0, 11, 31):
                ids[3] = 99
            return {"input_ids": ids, "labels": ids}

    cases.seed()
    args = TrainingArguments(**tiny.training_args(tmp_path))
    trainer = InOrder(model=tiny.llama(), args=args, train_dataset=Rows())
    watch = train(trainer)
    (row,) = rows_of(watch)
    assert (row["code"], row["module"], row["count"]) == ("NS502", "model.embed_tokens", 3)
    assert [entry.at.step for entry in watch.incidents[0].audit] == [0, 2, 7]
    assert row["remedy"].startswith("leave out sample 0 of micro-batch 0")
    assert trainer.state.global_step == 8
    assert_finite(trainer)


@needs("transformers", "5.6", "a method that clips")
@pytest.mark.parametrize("precision", ["fp16", "scaler"])
def test_a_trainer_that_clips_by_means_of_its_own_is_watched_as_well(tmp_path, precision):
    calls = []

    def build(out, **bad):
        trainer = cases.build("trainer", out, precision=precision)
        trainer._clip_grad_norm = lambda model: clip(trainer, model)
        return trainer

    def clip(trainer, model):
        calls.append(trainer.state.global_step)
        trainer.optimizer.scaler and trainer.optimizer.scaler.unscale_(trainer.optimizer.optimizer)
        return nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    plain = cases.run(build(tmp_path / "plain"))
    session = cases.ScriptedSession("redo")
    watched = cases.run(build(tmp_path / "bad"), session=session, fault={"bad": (3,)})
    assert plain.differences(watched) == []
    assert [failure.step.id.step for failure in session.failures] == [1]
    assert calls == [0, 1, 2, 3, 4, 0, 1, 1, 2, 3, 4]


def test_a_step_of_the_users_own_that_cannot_be_run_again_is_left_out(tmp_path):
    class Own(InOrder):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = self.compute_loss(model, dict(inputs)) / self.args.gradient_accumulation_steps
            loss.backward()
            return loss.detach()

    trainer = points(tmp_path, (13,), trainer=Own)
    watch = train(trainer)
    (row,) = rows_of(watch)
    assert (row["step"], row["micro"], row["action"]) == (1, 1, "skip")
    assert trainer.state.global_step == 8
    assert_finite(trainer)


def test_an_exception_that_nothing_cures_ends_the_script_as_its_own_in_the_end(tmp_path):
    class Broken(InOrder):
        def compute_loss(self, model, inputs, *args, **details):
            return super().compute_loss(model, inputs, *args, **details) + torch.eye(2)[9].sum()

    trainer = points(tmp_path, trainer=Broken)
    with pytest.raises(IndexError, match="index 9 is out of bounds"):
        train(trainer)
    (row,) = rows_of(trainer._nanstop_watch)
    assert (row["action"], row["count"]) == ("stop", 4)


def test_an_ordinary_mistake_of_the_script_is_none_of_ours(tmp_path):
    class Mistaken(InOrder):
        def compute_loss(self, *_args, **_details):
            return list(_details)[9]

    trainer = points(tmp_path, trainer=Mistaken)
    with pytest.raises(IndexError, match="list index out of range"):
        train(trainer)
    assert trainer._nanstop_watch.incidents == ()


# ---- what the policy says


@pytest.mark.parametrize(
    ("word", "action", "steps", "count"), [("skip", "skip", 8, 1), ("stop", "stop", 2, 1)]
)
def test_words_of_the_policy(tmp_path, word, action, steps, count):
    trainer = points(tmp_path, (13,))
    watch = train(trainer, on_failure=word, on_stop="end")
    (row,) = rows_of(watch)
    assert (row["action"], row["count"]) == (action, count)
    assert trainer.state.global_step == steps
    assert_finite(trainer)


def test_an_observed_failure_is_one_incident_and_never_a_checkpoint(tmp_path):
    trainer = points(tmp_path, (13,), save_strategy="steps", save_steps=1)
    watch = train(trainer, on_failure="observe")
    (row,) = rows_of(watch)
    assert (row["code"], row["action"], row["step"]) == ("NS501", "observe", 1)
    assert not all(p.isfinite().all() for p in trainer.model.parameters())
    trainer.save_model(str(tmp_path / "final"))
    saved = sorted(tmp_path.glob("*/*.safetensors"))
    assert [file.parent.name for file in saved] == ["checkpoint-1"]
    for file in saved:
        assert all(value.isfinite().all() for value in load_file(file).values())


def test_a_run_that_only_fails_stops_with_the_weights_it_had(tmp_path):
    trainer = points(tmp_path, range(16, 64))
    watch = train(trainer, max_skips_in_a_row=3, on_stop="end")
    (row,) = rows_of(watch)
    assert (row["step"], row["count"], row["action"]) == (2, 4, "stop")
    assert trainer.state.global_step == 6
    assert_finite(trainer)


def test_weights_that_came_broken_are_one_incident(tmp_path):
    model = Perceptron()
    with torch.no_grad():
        model.b.weight[0, 3] = NAN
    watch = train(points(tmp_path, model=model))
    (row,) = rows_of(watch)
    assert (row["code"], row["module"], row["step"], row["count"]) == ("NS401", "b", 0, 8)
    assert row["action"] == "skip"


# ---- around training


def test_a_failing_evaluation_is_named_and_changes_nothing(tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 2}
    plain = points(tmp_path / "plain", eval_dataset=Points(size=16), **settings)
    cases.seed()
    plain.train()
    trainer = points(tmp_path / "bad", eval_dataset=Points((5,), size=16), **settings)
    watch = train(trainer)
    (row,) = rows_of(watch)
    assert (row["code"], row["phase"], row["count"]) == ("NS501", "evaluate", 4)
    assert (row["action"], row["step"]) == ("observe", 2)
    assert losses(trainer) == losses(plain)


def test_an_evaluation_before_training_is_watched_too(tmp_path):
    trainer = points(tmp_path, eval_dataset=Points((5,), size=16))
    watch = nanstop.watch(trainer, out=tmp_path)
    trainer.evaluate()
    (row,) = rows_of(watch)
    assert (row["code"], row["phase"], row["step"]) == ("NS501", "evaluate", 0)
    trainer.train()
    assert watch.report().steps == 8
    assert json.loads((tmp_path / "summary.json").read_text())["exit"] == 0


def test_an_interrupt_in_the_middle_of_an_investigation_ends_the_run_as_its_own(
    tmp_path, monkeypatch
):
    from nanstop.session.failing import proving

    trainer = rare_overflow(tmp_path, (12,))
    seen = {}

    def interrupted(failing, *_args, **_details):
        seen.update(weights(trainer))
        with failing.step.isolated():
            failing.step.run(0)
            raise KeyboardInterrupt

    monkeypatch.setattr(proving, "prove_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(trainer)
    (row,) = rows_of(trainer._nanstop_watch)
    assert (row["code"], row["step"]) == ("NS201", 3)
    assert trainer.state.global_step == 3
    mine = weights(trainer)
    assert all(torch.equal(mine[name], seen[name]) for name in mine)
    assert json.loads((tmp_path / "summary.json").read_text())["exit"] == 1


def test_a_standing_remedy_does_not_outlive_a_run_that_is_broken_off(tmp_path):
    """bfloat16 holds until the update; the user's interrupt comes just before that."""

    class Steep(InOrder):
        def compute_loss(self, model, inputs, *args, **details):
            loss = super().compute_loss(model, inputs, *args, **details)
            return loss * (1e6 if bool((inputs["input_ids"] == 2).any()) else 1.0)

    class Interrupt(TrainerCallback):
        formats, methods = frozenset(), {}

        def on_train_begin(self, args, state, control, optimizer=None, **_):
            self.methods = dict(vars(optimizer))

        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            if state.global_step == 3:
                self.formats = frozenset(p.dtype for p in model.parameters())
                raise KeyboardInterrupt

    trainer, interrupt = rare_overflow(tmp_path, (14,), trainer=Steep), Interrupt()
    trainer.add_callback(interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        train(trainer, allow=("bf16",))
    assert interrupt.formats == {torch.bfloat16}
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float16}
    assert vars(trainer.optimizer).get("step") is interrupt.methods.get("step")
    assert_finite(trainer)


def test_a_budget_that_ends_says_so(tmp_path):
    watch = train(rare_overflow(tmp_path, (12,)), budget_trials=1)
    (report,) = watch.incidents
    assert report.proof.verdict != "proven"
    assert "the budget ended" in report.proof.next_experiment
    assert report.audit[0].action.kind == "skip"


# ---- healthy


def test_frightening_but_legal_values_are_no_incident_and_change_nothing(tmp_path):
    class Frightening(InOrder):
        def compute_loss(self, model, inputs, *args, **details):
            outputs = model(**inputs)
            nothing = torch.full_like(outputs.logits, NAN)
            nothing = torch.where(nothing.isnan(), torch.zeros(()), nothing)
            self.last = torch.log(torch.zeros(3)).max()
            hidden = outputs.logits.masked_fill(nothing == 0, -math.inf).exp().sum()
            return outputs.loss + nothing.sum() + hidden

    def build(out):
        cases.seed()
        args = TrainingArguments(**tiny.training_args(out))
        return Frightening(model=tiny.llama(), args=args, train_dataset=tiny.TokenRows())

    plain = build(tmp_path / "plain")
    cases.seed()
    plain.train()
    trainer = build(tmp_path / "watched")
    watch = train(trainer)
    assert watch.incidents == ()
    assert losses(trainer) == losses(plain)
    mine, others = weights(trainer), weights(plain)
    assert all(torch.equal(mine[name], others[name]) for name in mine)


class Smoothed(nn.Module):
    """Classes of which one is hidden, by a buffer or by what its forward leaves in one: smoothed
    labels give it a share of the loss, which is infinite, and no gradient.
    """

    def __init__(self, *, is_left: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.is_left = nn.Linear(8, 6), is_left
        self.register_buffer("hidden", torch.tensor([0.0] * 5 + [0.0 if is_left else -math.inf]))

    def forward(self, x, labels=None):
        scores = self.a(x)
        if self.is_left:
            self.hidden[5] = -math.inf
        scores = scores + self.hidden
        at = x[:, :5].argmax(1)
        return {"loss": nn.functional.cross_entropy(scores, at, label_smoothing=0.1)}


@pytest.mark.parametrize(("is_left", "kind"), [(False, "continue"), (True, "skip")])
def test_what_a_buffer_came_with_is_no_reason_to_lose_an_update(tmp_path, is_left, kind):
    args = TrainingArguments(**tiny.training_args(tmp_path, max_steps=1, optim="sgd"))
    trainer = Trainer(Smoothed(is_left=is_left), args=args, train_dataset=Points(size=8))
    before = weights(trainer)["a.weight"]
    watch = train(trainer)
    assert [row["action"] for row in rows_of(watch)] == [kind]
    assert torch.equal(before, weights(trainer)["a.weight"]) == is_left


@pytest.mark.parametrize(("is_left", "kind"), [(False, "continue"), (True, "skip")])
def test_what_a_buffer_came_with_costs_a_loop_no_update(is_left, kind):
    net = Smoothed(is_left=is_left)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = net.a.weight.detach().clone()
    with nanstop.watch(net, optimizer) as watch:
        watch.step(lambda x: net(x)["loss"], torch.randn(4, 8))
        watch.update()
    assert [row["action"] for row in rows_of(watch)] == [kind]
    assert torch.equal(before, net.a.weight) == is_left


class Sharp(InOrder):
    """SAM as its own step: a batch whose first gradients are 0 moves the weights by 0 / 0, and what
    moves them back is NaN as well.
    """

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs) * inputs["x"].isfinite().all()
        (loss * float(self.state.global_step != 3)).backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        moves = [0.05 * p.grad / norm for p in model.parameters()]
        for p, move in zip(model.parameters(), moves, strict=True):
            p.data.add_(move)
        model.zero_grad()
        self.accelerator.backward(self.compute_loss(model, inputs))
        for p, move in zip(model.parameters(), moves, strict=True):
            p.data.sub_(move)
        return loss.detach()


@pytest.mark.parametrize(("allow", "num_steps"), [((), 4), (("form",), 6)])
def test_weights_that_a_step_breaks_itself_have_the_line_that_did_it(tmp_path, allow, num_steps):
    settings = {"max_steps": 6, "optim": "sgd", "learning_rate": 1e-2}
    args = TrainingArguments(**tiny.training_args(tmp_path, **settings))
    trainer = Sharp(Perceptron(), args=args, train_dataset=Points())
    stops = contextlib.nullcontext() if allow else pytest.raises(nanstop.TrainingStopped)
    watch = nanstop.watch(trainer, policy=nanstop.Policy(allow=allow), out=tmp_path)
    with stops:
        trainer.train()
    (incident,) = watch.incidents
    first = incident.diagnoses[0]
    assert (first.code, incident.incident.at.step) == ("NS206", 3)
    assert incident.localization.first_bad.source.text.startswith("moves = ")
    assert incident.proof.verdict == "proven"
    assert trainer.state.global_step == num_steps
    assert not allow or all(p.isfinite().all() for p in trainer.model.parameters())


class Switched(nn.Module):
    """Two heads, of which an attribute says which is in use, as adapters are switched."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.policy, self.reference, self.in_use = nn.Linear(8, 4), nn.Linear(8, 4), "policy"

    def forward(self, x, labels=None):
        del labels
        return getattr(self, self.in_use)(x).log_softmax(-1)


class Kept(Trainer):
    is_switched = True

    def compute_loss(self, model, inputs, *_args, **_details):
        model.in_use = "reference" if self.is_switched else "policy"
        with torch.no_grad():
            wanted = model(inputs["x"])
        model.in_use = "policy"
        scores = model(inputs["x"])
        return (scores.exp() * (scores - wanted)).sum(-1).mean() - 0.1 * scores[:, 0].mean()


@pytest.mark.parametrize(("is_switched", "codes"), [(True, set()), (False, {"NS118"})])
def test_what_a_loss_switches_between_two_calls_is_no_evidence(tmp_path, is_switched, codes):
    args = TrainingArguments(**tiny.training_args(tmp_path, max_steps=6, optim="sgd"))
    trainer = Kept(Switched(), args=args, train_dataset=Points())
    trainer.is_switched = is_switched
    watch = train(trainer)
    assert {one.code for one in watch.findings} & {"NS118"} == codes


class Adapted(nn.Module):
    """Scores that are large, and what is learned beside them where it is switched on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base, self.adapter, self.in_use = nn.Linear(8, 4), nn.Linear(8, 4), "policy"
        nn.init.constant_(self.base.bias, 100.0)
        for p in self.adapter.parameters():
            nn.init.zeros_(p)
        self.base.requires_grad_(requires_grad=False)

    def forward(self, x, labels=None):
        del labels
        return self.base(x) + self.adapter(x) * (self.in_use == "policy")


class OfPairs(Trainer):
    is_switched = True

    def compute_loss(self, model, inputs, *_args, **_details):
        scores = model(inputs["x"])
        model.in_use = "reference" if self.is_switched else "policy"
        with torch.no_grad():
            wanted = model(inputs["x"])
        model.in_use = "policy"
        gain = scores - wanted
        return -F.logsigmoid(0.1 * (gain[:, 0] - gain[:, 1])).mean()


@pytest.mark.parametrize(
    ("rate", "is_switched", "codes"),
    [(1e-6, True, set()), (1e-6, False, set()), (1e-2, True, set()), (1e-2, False, {"NS118"})],
)
def test_a_policy_that_has_not_yet_moved_is_not_compared_with_itself(
    tmp_path, rate, is_switched, codes
):
    """Its distance is 0 but for rounding, and a run again lacks what is switched."""
    args = TrainingArguments(
        **tiny.training_args(tmp_path, max_steps=6, optim="sgd", learning_rate=rate)
    )
    trainer = OfPairs(Adapted(), args=args, train_dataset=Points())
    trainer.is_switched = is_switched
    watch = train(trainer)
    assert {one.code for one in watch.findings} & {"NS118"} == codes
