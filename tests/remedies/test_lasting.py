"""A remedy for the rest of a run is awake wherever the step computes, also with what no module
of its own reads.
"""

import pytest
import torch
from torch import nn

from fnstep import FnView
from nanstop.records import Atom
from nanstop.remedies.lasting import lasting
from nanstop.replay.held import kept_awake
from nanstop.replay.undo import without_gradients

FP32 = (Atom(remedy="fp32_trainables"),)


class Adapted(nn.Module):
    """Reads a parameter of a container, as PEFT's adapters of an embedding do, before any other
    module is called.
    """

    def __init__(self):
        super().__init__()
        self.tables = nn.ParameterDict({"default": nn.Parameter(torch.randn(8, 4))})
        self.head = nn.Linear(4, 1)

    def forward(self, ids):
        return self.head(self.tables["default"][ids].to(self.head.weight.dtype))


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Adapted()

    def forward(self, ids):
        return self.inner(ids)


def steps(model, loss, *, num=3, look=False):
    """Train under the remedy; return the formats of weights and gradients that each update met."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    met = []
    optimizer.register_step_pre_hook(
        lambda *_: met.append({(p.dtype, p.grad.dtype) for p in model.parameters()})
    )
    with lasting(FnView(model, optimizer), FP32):
        for _ in range(num):
            loss(model).backward()
            if look:
                with kept_awake(model), without_gradients(model.parameters()):
                    pass
            optimizer.step()
            optimizer.zero_grad()
            assert {p.dtype for p in model.parameters()} == {torch.float16}
    return met


def test_parameters_of_a_container_are_awake_in_the_forward_that_reads_them():
    torch.manual_seed(0)
    model, seen = Outer().half(), []
    tables = model.inner.tables

    def loss(model):
        out = model(torch.arange(4)).float().square().sum()
        seen.append(tables["default"].dtype)
        return out

    handle = model.inner.head.register_forward_pre_hook(
        lambda *_: seen.append(tables["default"].dtype)
    )
    met = steps(model, loss)
    handle.remove()
    assert set(seen) == {torch.float32}
    assert met == [{(torch.float32, torch.float32)}] * 3


@pytest.mark.parametrize("look", [False, True])
def test_what_the_script_read_at_rest_does_not_stop_the_update(look):
    """Its graph was made in the script's format, and so is its gradient."""
    torch.manual_seed(0)
    model = Adapted().half()

    def loss(model):
        outside = model.tables["default"].float().square().sum()  # before any forward
        return outside + model(torch.arange(4)).float().sum()

    assert steps(model, loss, look=look) == [{(torch.float32, torch.float32)}] * 3


def test_moments_that_another_optimizer_has_grown_are_the_optimizers_own_afterwards():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def update():
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    update()
    optimizer.state[model.weight]["exp_avg_sq"][0, 0] = torch.nan
    with lasting(FnView(model, optimizer), (Atom(remedy="optimizer_swap", value="adamw"),)):
        update()
        saved = optimizer.state_dict()["state"]
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(saved[n][key], after[n][key]) for n in saved for key in saved[n])
    update()
    assert model.weight.isfinite().all()
