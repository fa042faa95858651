"""An update is held against the step that its gradients and its state make exactly."""

import math
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from fnstep import FnStep
from nanstop.prove.failing_step import FailingStep
from nanstop.prove.reference.exact_update import fault_of_update, moves_of
from nanstop.prove.updates_after import UpdatesAfter
from nanstop.records import Atom, FailureKey
from nanstop.records.line_forms import GUARDED, KEPT
from nanstop.remedies.apply import applied

KEY = FailureKey(kind="nan", phase="optimizer", op="aten.addcdiv_.default", module="")
ADAMW = torch.optim.AdamW


def updating(make, dtype=torch.float32, scale=1.0, steps=0):
    """An update of a network whose loss cannot grow, however far its weights are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)
    batch = {"x": torch.randn(16, 8, dtype=dtype)}

    def loss(net, given):
        return torch.tanh(net(given["x"]).float()).square().mean() * scale

    step = FnStep(model, loss, [batch], make(model.parameters()))
    for _ in range(steps):
        step.run(0)
        step.update()
        step.view.optimizer.zero_grad()
    return FailingStep(step=step, micro=0, micros=(0,), phase="optimizer", update=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: ADAMW(p, lr=1e-2),
        lambda p: ADAMW(p, lr=1e-2, foreach=True),
        lambda p: torch.optim.RMSprop(p, lr=1e-2),
    ],
)
def test_a_healthy_update_is_the_exact_one_and_nothing_is_left_of_the_look(make, dtype):
    failing = updating(make, dtype, steps=2)
    root, optimizer = failing.step.view.root, failing.step.view.optimizer
    before = [p.detach().clone() for p in root.parameters()]
    state = [t.clone() for s in optimizer.state.values() for t in s.values() if t is not None]
    assert len(moves_of(failing, nullcontext)) == 4
    assert fault_of_update(failing, nullcontext) == ""
    assert all(map(torch.equal, before, root.parameters()))
    now = [t for s in optimizer.state.values() for t in s.values() if t is not None]
    assert all(map(torch.equal, state, now))
    assert {p.dtype for p in root.parameters()} == {dtype}


def test_an_update_that_its_format_makes_wrong_is_found():
    found = fault_of_update(updating(lambda p: ADAMW(p, lr=1e-3), torch.float16), nullcontext)
    assert "off what the same gradients move it exactly" in found


@pytest.mark.parametrize("scale", [2048.0, 65536.0])
def test_a_forgotten_loss_scale_is_not_cured_by_a_wider_format(scale):
    failing = updating(lambda p: torch.optim.SGD(p, lr=10.0), torch.float16, scale=scale)
    found = UpdatesAfter(failing).under((Atom(remedy="fp32_trainables"),))
    assert found.outcome == "other_failure"
    assert "times as long as the weights" in found.message


def test_float32_trainables_make_the_exact_update():
    failing = updating(lambda p: ADAMW(p, lr=1e-3), torch.float16)
    found = UpdatesAfter(failing).under((Atom(remedy="fp32_trainables"),))
    assert found.outcome == "pass", found.message
    assert math.isfinite(found.loss)


class BoundedRatio(torch.optim.Optimizer):
    """A step by signs where no curvature is known: the clamp bounds what is infinite."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            curvature = torch.zeros_like(p)
            p.grad.flatten()[0] = 0.0
            ratio = (p.grad.abs() / curvature).clamp(max=1.0)
            p.addcmul_(p.grad.sign(), ratio, value=-0.01)


RATIO = next(
    n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "ratio =" in text
)


def test_a_form_moves_as_before_what_has_a_value_without_it():
    failing = updating(BoundedRatio)
    at = f"{__file__}:{RATIO}"
    after = UpdatesAfter(failing)
    found = after.under((Atom(remedy="form", target=at, value=GUARDED),))
    assert found.outcome == "other_failure"
    assert "has a value without it" in found.message
    assert after.under((Atom(remedy="form", target=at, value=KEPT),)).outcome == "pass"


def test_moments_that_a_remedy_keeps_itself_are_those_of_one_update_each_time():
    failing = updating(lambda p: ADAMW(p, lr=1e-3), steps=1)
    for state in failing.step.view.optimizer.state.values():
        state["exp_avg"].mul_(-3.0)  # so that a second update is another one
    swap = Atom(remedy="optimizer_swap", value="adamw")
    assert fault_of_update(failing, partial(applied, failing.step.view, (swap,))) == ""
