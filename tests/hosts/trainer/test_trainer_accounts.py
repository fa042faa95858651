"""The gradients of a trainer, and of a loop that calls ``w.step``, are accounted for as well."""

import pytest
import torch
from transformers import Trainer, TrainerCallback

import nanstop
from hf_cases import build
from noticed import noticed
from versions import older_than

torch.set_num_threads(1)
COUNTS_OTHERWISE = pytest.mark.skipif(
    older_than("transformers", "5"),
    reason="divides by labels that its sum has not: the loss is 960 times a mean, not 1024",
)
ACCOUNTED = ("NS306", "NS307", "NS112", "NS114")


class Clearing(Trainer):
    """Clears gradients where each micro-batch begins."""

    def training_step(self, model, *args, **kwargs):
        model.zero_grad()
        return super().training_step(model, *args, **kwargs)


class Twice(Trainer):
    """Runs each micro-batch twice over."""

    def training_step(self, model, inputs, *args, **kwargs):
        super().training_step(model, inputs, *args, **kwargs)
        return super().training_step(model, inputs, *args, **kwargs)


class Scaled(TrainerCallback):
    """Multiplies all gradients by a number before the update."""

    def __init__(self, factor):
        self.factor = factor

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(self.factor)


def without_dropout(trainer, kind):
    """The trainer as one of ``kind``, whose micro-batches give the same gradients a second time."""
    trainer.__class__ = kind
    for module in trainer.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    return trainer


def told(trainer, out):
    with nanstop.watch(trainer, policy="observe", out=out) as watch:
        trainer.train()
    return [one for one in noticed(watch.findings, watch.incidents) if one.code in ACCOUNTED]


def codes(trainer, out):
    return [one.code for one in told(trainer, out)]


@pytest.mark.parametrize(("kind", "code"), [(Clearing, "NS306"), (Twice, "NS306"), (Trainer, None)])
def test_micro_batches_that_are_cleared_or_counted_twice(tmp_path, kind, code):
    trainer = without_dropout(build("trainer", tmp_path / "hf"), kind)
    assert codes(trainer, tmp_path / "out") == ([code] if code else [])


@pytest.mark.parametrize(
    ("kind", "line"), [(Twice, "return super().training_step("), (Trainer, "")]
)
def test_the_line_of_a_trainer_that_runs_its_micro_batches_twice(tmp_path, kind, line):
    trainer = build("trainer", tmp_path / "hf", max_steps=3, gradient_accumulation_steps=1)
    trainer = without_dropout(trainer, kind)
    found = told(trainer, tmp_path / "out")
    assert [line in one.lines[0] for one in found] == [True] * bool(line)


@pytest.mark.parametrize(("factor", "found"), [(0.0, ["NS307"]), (0.5, [])])
def test_gradients_that_a_callback_takes_away(tmp_path, factor, found):
    trainer = build("trainer", tmp_path / "hf")
    trainer.args.max_steps = 18
    trainer.add_callback(Scaled(factor))
    assert codes(trainer, tmp_path / "out") == found


def test_a_watch_puts_the_accelerators_backward_back(tmp_path):
    trainer = build("trainer", tmp_path / "hf")
    codes(trainer, tmp_path / "out")
    assert "backward" not in vars(trainer.accelerator)
    assert "on_optimizer_step" not in vars(trainer.callback_handler)


@pytest.mark.parametrize(("clip", "found"), [(1e-12, ["NS307"]), (1.0, [])])
def test_a_loop_by_hand(tmp_path, clip, found):
    net = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with nanstop.watch(net, optimizer, policy="observe", out=tmp_path) as watch:
        for _ in range(5):
            watch.step(lambda x: net(x).pow(2).mean(), torch.randn(4, 8))
            watch.update(clip=clip)
    told = noticed(watch.findings, watch.incidents)
    assert [one.code for one in told if one.code in ACCOUNTED] == found


class ImmenseLoss(Trainer):
    """Multiplies its loss until float32 has no norm of its gradients, from a step on."""

    since = 0

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        found = super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
        return found * (1e22 if self.state.global_step >= self.since else 1.0)


@pytest.mark.parametrize(("since", "step"), [(0, 0), (20, 21)])
def test_a_norm_that_is_infinite_in_each_step_is_an_incident(tmp_path, since, step):
    trainer = build("trainer", tmp_path / "hf", max_steps=26, gradient_accumulation_steps=1)
    trainer.__class__, ImmenseLoss.since = ImmenseLoss, since
    with nanstop.watch(trainer, out=tmp_path / "out") as watch:
        trainer.train()
    assert "NS307" not in [one.code for one in watch.findings]
    (report,) = watch.incidents
    best = report.diagnoses[0]
    assert (best.code, best.confidence, report.incident.at.step) == ("NS307", "certain", step)
    assert "their norm is not" in best.cause
    assert report.audit[-1].action.kind == "observe"
    assert (tmp_path / "out" / report.incident.id / "report.json").is_file()


def test_a_trainer_stops_where_it_trains_nothing_and_the_policy_says_so(tmp_path):
    trainer = build("trainer", tmp_path / "hf", max_steps=26, max_grad_norm=1e-12)
    nanstop.watch(trainer, policy="stop", out=tmp_path / "out")
    with pytest.raises(nanstop.TrainingStopped, match="NS307"):
        trainer.train()
    assert trainer.state.global_step < 8


class LargeLoss(Trainer):
    """Multiplies its loss, as for half precision."""

    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) * 1024.0


class Clipping(Scaled):
    """Multiplies all gradients, then clips them."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        super().on_pre_optimizer_step(args, state, control, model=model, **kwargs)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def by_gradient_descent(folder, **settings):
    settings = {"max_steps": 6, "max_grad_norm": 0.0, "gradient_accumulation_steps": 1} | settings
    return build("trainer", folder, optim="sgd", learning_rate=0.3, **settings)


@pytest.mark.parametrize(
    ("kind", "callback", "clip", "found"),
    [
        (Trainer, Scaled(1e-3), 0.0, ["NS306"]),
        pytest.param(LargeLoss, Scaled(1 / 1024), 0.1, ["NS112"], marks=COUNTS_OTHERWISE),
        (LargeLoss, Clipping(1 / 1024), 0.0, []),
        (LargeLoss, Scaled(1 / 1024), 0.0, []),
        (LargeLoss, Scaled(1 / 1024), 1e9, []),
        (Trainer, Scaled(0.1), 0.1, []),
    ],
)
def test_what_a_trainer_does_with_the_mean_that_is_its_loss(tmp_path, kind, callback, clip, found):
    trainer = by_gradient_descent(tmp_path / "hf", max_grad_norm=clip)
    trainer.__class__ = kind
    trainer.add_callback(callback)
    assert codes(trainer, tmp_path / "out") == found


@pytest.mark.parametrize("window", [2, 4])
def test_micro_batches_that_are_shares_of_a_mean(tmp_path, window):
    trainer = by_gradient_descent(tmp_path / "hf", gradient_accumulation_steps=window)
    assert codes(trainer, tmp_path / "out") == []


class HalfCopies(TrainerCallback):
    """Stores the weights in half precision after each update, and makes them float again."""

    def __init__(self, folder, *, of_copies=False, narrow=torch.float16):
        self.folder, self.of_copies, self.narrow = folder, of_copies, narrow

    def on_step_end(self, args, state, control, model=None, **kwargs):
        path = self.folder / "half.pt"
        if self.of_copies:
            torch.save({k: v.to(self.narrow) for k, v in model.state_dict().items()}, path)
        else:
            model.to(self.narrow)
            torch.save(model.state_dict(), path)
            model.float()


@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16])
def test_weights_that_are_rounded_after_each_update(tmp_path, narrow):
    trainer = build("trainer", tmp_path / "hf", max_steps=10, learning_rate=2e-6)
    trainer.add_callback(HalfCopies(tmp_path, narrow=narrow))
    with nanstop.watch(trainer, policy="observe", out=tmp_path / "out") as watch:
        trainer.train()
    found = next(one for one in watch.findings if one.code == "NS111")
    assert found.confidence == "certain"
    assert f"rounded to {str(narrow).removeprefix('torch.')}" in found.cause
    assert any("half copy" in line for line in found.lines)


@pytest.mark.parametrize(("of_copies", "rate"), [(True, 2e-6), (False, 0.05)])
def test_weights_that_are_copied_or_hardly_lose_anything(tmp_path, of_copies, rate):
    trainer = build("trainer", tmp_path / "hf", max_steps=10, learning_rate=rate)
    trainer.add_callback(HalfCopies(tmp_path, of_copies=of_copies))
    with nanstop.watch(trainer, policy="observe", out=tmp_path / "out") as watch:
        trainer.train()
    assert "NS111" not in [one.code for one in watch.findings]
