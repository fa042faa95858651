"""Trainings whose optimizers evaluate a closure: what they do to weights within one step, and
where a fault is planted.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn


class Sharpness(torch.optim.Optimizer):
    """SAM as its authors' step with a closure: the weights are moved up before it is evaluated."""

    def __init__(self, params, **options):
        super().__init__(params, {"rho": 0.05})
        self.base = torch.optim.Adam(self.param_groups, lr=0.02, **options)

    @torch.no_grad()
    def step(self, closure):
        weights = [p for group in self.param_groups for p in group["params"]]
        with torch.enable_grad():
            loss = closure()
        known = [p for p in weights if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in known]).norm() if known else 1.0
        for p in known:
            self.state[p]["before"] = p.data.clone()
            p.add_(p.grad * 0.05 / (norm + 1e-12))
        with torch.enable_grad():
            closure()
        for p in weights:
            if p.grad is not None:
                p.data = self.state[p]["before"]
        self.base.step()
        return loss


class RaisedBefore(Sharpness):
    """SAM whose first gradients are those of a backward of the script: it moves the weights before
    the only evaluation of its closure.
    """

    @torch.no_grad()
    def step(self, closure):
        weights = [p for group in self.param_groups for p in group["params"]]
        for p in weights:
            self.state[p].setdefault("count", torch.zeros(()))
            self.state[p]["count"] += 1
            self.state[p]["before"] = p.data.clone()
            p.data.add_(0.01 * p.data.sign())
        with torch.enable_grad():
            loss = closure()
        for p in weights:
            if p.grad is not None:
                p.data.copy_(self.state[p]["before"])
        self.base.step()
        return loss


class Descent(torch.optim.Optimizer):
    """Three small steps downhill, written through ``data``, which moves no version; what it has
    done is kept in lists.
    """

    def __init__(self, params):
        super().__init__(params, {"lr": 0.05})
        self.state[self.param_groups[0]["params"][0]]["losses"] = []

    @torch.no_grad()
    def step(self, closure):
        weights = [p for group in self.param_groups for p in group["params"]]
        known = self.state[weights[0]]["losses"]
        first = None
        for _ in range(3):
            with torch.enable_grad():
                loss = closure()
            first = loss if first is None else first
            known.append(float(loss.detach()))
            for p in weights:
                if p.grad is not None:
                    p.data -= self.param_groups[0]["lr"] * p.grad.data
        self.param_groups[0]["lr"] *= 0.9
        return first


def _lbfgs(search):
    return lambda params: torch.optim.LBFGS(
        params, lr=0.3, max_iter=5, history_size=3, line_search_fn=search
    )


OPTIMIZERS = {
    "lbfgs": _lbfgs(None),
    "searching": _lbfgs("strong_wolfe"),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.02),
    "sharpness": Sharpness,
    "raised before": RaisedBefore,
    "descent": Descent,
}
FAULTS = ("loss", "gradient", "forward")


@dataclass(frozen=True)
class Program:
    """``evaluation``: which of the closure's evaluations in step ``at`` is spoiled, from 0.
    ``without``: a step that is not made.
    """

    optimizer: str
    at: int | None = None
    evaluation: int = 0
    fault: str = "loss"
    num_steps: int = 4
    seed: int = 0
    without: int | None = None


@dataclass
class Ended:
    """What a training has come to. ``evaluated``: evaluations of the closure in each step."""

    weights: list[torch.Tensor]
    state: Any
    evaluated: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    gradients: list[Any] = field(default_factory=list)


def train(program: Program, caught: list[Exception] | None = None) -> Ended:
    """Return how a program ends; with ``caught``, by the first exception, which is added to it."""
    torch.manual_seed(program.seed)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    optimizer = OPTIMIZERS[program.optimizer](net.parameters())
    rows = torch.randn(4, 12, 3)
    ended = Ended(list(net.parameters()), None)
    for step in range(program.num_steps):
        if step == program.without:
            continue
        ended.evaluated.append(0)

        def closure(step=step):
            optimizer.zero_grad()
            is_bad = step == program.at and ended.evaluated[-1] == program.evaluation
            ended.evaluated[-1] += 1
            out = net(rows[step])
            if is_bad and program.fault == "forward":
                out = out / (out - out).abs()
            loss = (out - rows[step].sin().sum(1, keepdim=True)).square().mean()
            if is_bad and program.fault == "loss":
                loss = loss * float("nan")
            if is_bad and program.fault == "gradient":
                loss = loss + (out - out).abs().sqrt().sum()
            loss.backward()
            return loss

        try:
            loss = optimizer.step(closure)
        except Exception as error:
            if caught is None:
                raise
            caught.append(error)
            break
        ended.losses.append(float(loss.detach()))
        ended.gradients.append([None if p.grad is None else p.grad.clone() for p in ended.weights])
    ended.state = copy.deepcopy(optimizer.state_dict())
    if hasattr(optimizer, "base"):
        ended.state["base"] = copy.deepcopy(optimizer.base.state_dict()["state"])
    return ended


@st.composite
def programs(draw):
    """Draw a program with one fault."""
    return Program(
        draw(st.sampled_from(sorted(OPTIMIZERS))),
        at=draw(st.integers(0, 3)),
        evaluation=draw(st.integers(0, 5)),
        fault=draw(st.sampled_from(FAULTS)),
        seed=draw(st.integers(0, 3)),
    )


def same(one: Any, other: Any) -> bool:
    """Return whether two nested values are bitwise equal; a NaN equals itself."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one.nan_to_num(nan=7.5), other.nan_to_num(nan=7.5)) and torch.equal(
            one.isnan(), other.isnan()
        )
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)
