"""Gradients of exactly 0: objectives that have none, and losses that are at their least for now
(NS701).
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fnstep import FnStep
from loop_scripts import run_script
from nanstop.decide.policy import Policy
from nanstop.detect.zero_gradients.causes import none_arrives
from nanstop.detect.zero_gradients.gradient_end import gradient_end
from nanstop.detect.zero_gradients.standstill import Standstill
from nanstop.records import GradientPath
from nanstop.session.factory import opener
from nanstop.store.incidents import Store

torch.set_num_threads(1)

HEAD = """
import copy

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2, bias=False))
nn.init.zeros_(critic[2].weight)
target = copy.deepcopy(critic)


def zero(step):
    return torch.zeros(16)


def grouped(step):
    # Four attempts at each of four tasks, all as good as the others.
    rewards = torch.arange(4.0).repeat_interleave(4).view(4, 4)
    mean, spread = rewards.mean(1, keepdim=True), rewards.std(1, keepdim=True)
    return ((rewards - mean) / (spread + 1e-4)).flatten()


def sparse(step):
    return zero(step) if step < late else (torch.rand(16) < 0.3).float()


def policy_gradient(advantages):
    x, action = torch.randn(16, 4), torch.randint(2, (16, 1))
    return -(policy(x).log_softmax(-1).gather(1, action)[:, 0] * advantages).mean()


def ratio_clipped(advantages):
    x, action = torch.randn(16, 4), torch.randint(2, (16, 1))
    logp = policy(x).log_softmax(-1).gather(1, action)[:, 0]
    ratio = (logp - logp.detach()).exp()
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


def q_learning(rewards):
    x, after, action = torch.randn(16, 4), torch.randn(16, 4), torch.randint(2, (16, 1))
    with torch.no_grad():
        wanted = rewards + 0.99 * target(after).max(1).values
    return F.smooth_l1_loss(critic(x).gather(1, action)[:, 0], wanted)


def masked(_):
    x = torch.randn(16, 4)
    return (policy(x).square() * torch.zeros(16, 1)).sum()


def counted_in_half(_):
    x, mask = torch.randn(16, 4), torch.ones(16, 4500, dtype=torch.float16)
    return (policy(x).square().sum(-1, keepdim=True) * mask).sum() / mask.sum()


def hidden_in_half(advantages):
    # -1e9 is -Inf in float16, and its exponential is 0 as it should be.
    x, action = torch.randn(16, 4), torch.randint(2, (16, 1))
    hidden = torch.tensor([0.0, 0.0, -1e9]).half().softmax(-1)[:2].float() * 2
    logp = (policy(x) * hidden).log_softmax(-1).gather(1, action)[:, 0]
    return -(logp * advantages).mean()


def fitted(_):
    x = torch.randn(16, 4)
    return F.mse_loss(critic(x), torch.zeros(16, 2))


optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()], 1e-3)
late = num_steps
for step in range(num_steps):
    optimizer.zero_grad()
    objective(step).backward()
    optimizer.step()
print([p.double().sum().item() for p in (*policy.parameters(), *critic.parameters())])
"""

NONE = {
    "groups without a difference": "policy_gradient(grouped(step))",
    "the same, clipped": "ratio_clipped(grouped(step))",
    "no reward at all": "policy_gradient(sparse(step))",
    "a mask of zeros": "masked(step)",
    "a mask in half beside it": "hidden_in_half(grouped(step))",
}
AT_ITS_LEAST = {
    "off-policy before its first reward": "q_learning(sparse(step))",
    "a fit": "fitted(step)",
}


def told(folder, objective, num_steps):
    """What is said in a script of the gradient it has none of."""
    said = []
    source = HEAD.replace("objective(step)", objective)
    opened = opener(Policy(), Store(folder / "out"), said.append)
    run_script(folder / "train.py", source, opened, num_steps=num_steps)
    assert not [one for one in said if isinstance(one, str)]
    return [(one.code, one.title, one.confidence) for one in said if hasattr(one, "code")]


@pytest.mark.parametrize("objective", NONE.values(), ids=NONE)
def test_an_objective_without_a_gradient_is_told_after_many_updates_or_at_the_end(
    tmp_path, objective
):
    title = "the objective has no gradient"
    assert told(tmp_path, objective, 63) == [("NS701", title, "likely")]
    assert told(tmp_path, objective, 64) == [("NS701", title, "possible")]


ENDS = {
    "a hinge that is content": ("relu", 3, "y = m(b['x']).tanh() - 2.0", "return y.relu().sum()"),
    "a mask of zeros": ("mul", 2, "y = m(b['x']) * b['mask']", "return y.sum()"),
    "a bound": ("clamp", 2, "y = m(b['x']).clamp(max=-50.0)", "return y.pow(2).mean()"),
    "labels that are left out": (
        "cross_entropy",
        3,
        "y, s = m(b['x']), b['labels']",
        "return F.cross_entropy(y, s, reduction='sum')",
    ),
}


@pytest.mark.parametrize(("op", "number", "first", "last"), ENDS.values(), ids=ENDS)
def test_the_operation_at_which_every_gradient_ends(tmp_path, op, number, first, last):
    source, file = f"def loss(m, b):\n    {first}\n    {last}\n", str(tmp_path / "loss.py")
    Path(file).write_text(source)
    spelled = {"F": torch.nn.functional}
    exec(compile(source, file, "exec"), spelled)
    batch = {"x": torch.randn(3, 4), "mask": torch.zeros(3, 1), "labels": torch.full((3,), -100)}
    step = FnStep(torch.nn.Linear(4, 2), spelled["loss"], [batch])
    end = gradient_end(step)
    assert (end.op, end.source.file, end.source.line) == (op, file, number)


class OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.zeros_like(grad)


def test_a_function_of_ones_own_that_passes_no_gradient_on_is_not_the_line_after_it():
    batch = {"x": torch.randn(3, 4)}
    step = FnStep(
        torch.nn.Linear(4, 2), lambda m, b: OwnFunction.apply(m(b["x"])).view(-1).sum(), [batch]
    )
    assert gradient_end(step) is None


class OfNone(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x + y

    @staticmethod
    def backward(ctx, grad):
        return torch.zeros_like(grad), None


def test_a_function_of_ones_own_that_sends_none():
    def loss(m, b):
        y = m(b["x"]).tanh()
        return OfNone.apply(y * 2.0, y.exp()).sum()

    assert gradient_end(FnStep(torch.nn.Linear(4, 2), loss, [{"x": torch.randn(3, 4)}])) is None


def test_a_factor_of_0_is_named_as_the_line_spells_it(tmp_path):
    source, file = "def loss(m, b):\n    return (b.weight * m(b.x)).sum()\n", tmp_path / "loss.py"
    file.write_text(source)
    spelled = {}
    exec(compile(source, str(file), "exec"), spelled)
    batch = SimpleNamespace(x=torch.randn(3, 4), weight=0.0)
    end = gradient_end(FnStep(torch.nn.Linear(4, 2), spelled["loss"], [batch]))
    assert (end.op, [one.text for one in end.factors]) == ("mul", ["b.weight"])


def stood(num_zero, *, begins=None, each=1):
    """What has been noted of updates without a gradient, after one with some; ``each``: a step."""
    still = Standstill()
    if begins is not None:
        still.note(0.1, begins)
    for number in range(num_zero):
        still.note(0.0, (begins or 0) + 1 + number // each)
    return still


def test_of_several_optimizers_a_step_has_several_updates_without_a_gradient():
    model = torch.nn.Linear(4, 2)
    x = torch.randn(3, 4, requires_grad=True)
    step = FnStep(model, lambda m, b: (m(b["x"]).detach().sum() * b["x"]).sum(), [{"x": x}])
    step.id = replace(step.id, step=8)
    path = GradientPath(num_trainable=10, num_tensors=2, num_reached=2)
    assert none_arrives(step, path, 0.0, stood(16, each=2)).reached_until is None
    assert none_arrives(step, path, 0.0, stood(16, begins=3, each=2)).reached_until == 3


def test_what_was_seen_of_another_training_is_forgotten():
    still = stood(6, begins=24)
    still.note(0.0, 0)
    assert (still.num_zero, still.until) == (1, None)


@pytest.mark.parametrize("is_gone", [True, False])
@pytest.mark.parametrize("num_zero", [4, 16])
def test_gradients_that_do_not_arrive_any_more(is_gone, num_zero):
    def loss(model, batch):
        x = batch["x"]
        y = model(x)
        return ((y.detach() if is_gone else y * torch.zeros(1)) * x.sum(-1, keepdim=True)).mean()

    model, x = torch.nn.Linear(4, 2), torch.randn(3, 4, requires_grad=True)
    step = FnStep(model, loss, [{"x": x}])
    step.id = replace(step.id, step=40)
    path = GradientPath(num_trainable=10, num_tensors=2, num_reached=2)
    found = none_arrives(step, path, 0.0, stood(num_zero, begins=24))
    if is_gone and num_zero == 16:
        assert (found.num_reached, found.unreached, found.reached_until) == (
            0,
            ("weight", "bias"),
            24,
        )
    else:
        assert found is None or found.num_reached == 2
    assert model.weight.grad is None


@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.float32])
def test_an_entry_of_the_batch_that_takes_every_gradient_away_is_named(kind):
    def loss(model, batch):
        table = torch.ones(1, 2)  # a 1 among the ids is out of its range
        y = model(batch["x"]) + table[batch["ids"]]
        return (y * batch["mask"][:, None]).sum() / batch["count"].clamp(min=1)

    model, zeros = torch.nn.Linear(4, 2), torch.zeros(3, dtype=torch.int64)
    batch = {"x": torch.randn(3, 4), "ids": zeros, "mask": zeros.to(kind), "count": zeros.sum()}
    path = GradientPath(num_trainable=10, num_tensors=2, num_reached=2)
    found = none_arrives(FnStep(model, loss, [batch]), path, 0.0, stood(4))
    assert found.zeros == ("mask",)
    assert found.num_reached == 2


@pytest.mark.parametrize(("share", "dropped"), [(1.0, ("1",)), (0.5, ())])
def test_a_dropout_that_takes_every_gradient_away_is_named(share, dropped):
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Dropout(share))
    path = GradientPath(num_trainable=10, num_tensors=2, num_reached=2)
    step = FnStep(model, lambda m, b: m(b["x"]).sum(), [{"x": torch.randn(3, 4)}])
    found = none_arrives(step, path, 0.0, stood(4))
    assert (found.dropped if found is not None else ()) == dropped
    assert model[1].p == share


def test_a_count_that_overflows_is_told_where_the_loss_is_divided_by_it(tmp_path):
    found = told(tmp_path, "counted_in_half(step)", 12)
    assert [one[:2] for one in found] == [("NS209", "overflow in `sum` became a finite number")]


@pytest.mark.parametrize("objective", AT_ITS_LEAST.values(), ids=AT_ITS_LEAST)
def test_a_loss_that_is_at_its_least_has_a_gradient_elsewhere(tmp_path, objective):
    assert told(tmp_path, objective, 130) == []


def test_the_experiment_leaves_no_trace(tmp_path, capsys):
    source = HEAD.replace(
        "objective(step)", "q_learning(torch.zeros(16) if step < 20 else torch.rand(16))"
    )
    run_script(tmp_path / "plain.py", source, num_steps=30)
    opened = opener(Policy(), Store(tmp_path / "out"), lambda _: None)
    run_script(tmp_path / "watched.py", source, opened, num_steps=30)
    plain, watched = capsys.readouterr().out.splitlines()
    assert plain == watched


def test_a_hook_that_empties_gradients_is_what_is_told(tmp_path):
    hooks = (
        "for p in policy.parameters():\n    p.register_hook(torch.zeros_like)\n\nlate = num_steps"
    )
    source = HEAD.replace("late = num_steps", hooks)
    said = []
    opened = opener(Policy(), Store(tmp_path / "out"), said.append)
    run_script(
        tmp_path / "train.py",
        source.replace("objective(step)", "policy(torch.randn(16, 4)).square().mean()"),
        opened,
        num_steps=30,
    )
    reports = [one for one in said if hasattr(one, "diagnoses")]
    assert [one.diagnoses[0].code for one in reports] == ["NS307"]
    assert not [one for one in said if hasattr(one, "code")]
