"""Defects of compiled code that nobody planted, each published and met here in a training step.

First the code alone, eager and compiled, on the same inputs; then a training that comes to them in
its fourth step, watched, beside the same training without compilation.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import nanstop
from gpu.machine import Machine, Row

STRIKES, STEPS = 3, 8
"""The step that comes to the defect, from 0, and how many there are."""
WIDTH = 768


class Normed(nn.Module):
    """A norm over features, of which padded rows hold one large number. Their variance is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))[..., 0]


class Pooled(nn.Module):
    """The mean of each packed sequence, from where they begin and end."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        mask = x[..., 0] > -1e4
        ends = functional.pad(mask.sum(-1, dtype=torch.int32).cumsum(0), (1, 0))
        sums = functional.pad(x.flatten(0, 1).cumsum(0), (0, 0, 1, 0))
        first, last = ends[:-1], ends[1:]
        means = (sums[last] - sums[first]) / (last - first)[:, None]
        return self.head(means)[..., 0]


class Prefixed(nn.Module):
    """Attention under a mask of blocks that is made of running sums."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.out = nn.Linear(64, 192), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        there = x[..., 0] > -1e4
        starts = torch.cat([torch.zeros_like(there[:, :-50]), torch.ones_like(there[:, -50:])], 1)
        blocks = starts.to(torch.int32).cumsum(1)
        seen = blocks[:, None, :] <= blocks[:, :, None]
        seen = seen & (there[:, None, :] & there[:, :, None])
        query, key, value = self.mixed(x).chunk(3, -1)
        scores = (query @ key.transpose(-1, -2)).masked_fill(~seen, float("-inf"))
        return self.out(scores.softmax(-1) @ value)[..., 0]


@dataclass(frozen=True)
class Defect:
    """``rows``: the inputs of a step, from whether it is to come to the defect; a toy's are few."""

    title: str
    source: str
    model: Callable[[], nn.Module]
    rows: Callable[[bool, bool], Tensor]
    dynamic: bool | None = False


def _padded(strikes: bool, toy: bool) -> Tensor:
    rows = torch.randn(4, 8 if toy else 64, WIDTH)
    if strikes:
        rows[0, -2:] = 1e37
    return rows


def _packed(strikes: bool, toy: bool) -> Tensor:
    return torch.randn(1, 16384 if strikes and not toy else 512, 8)


DEFECTS = (
    Defect(
        "LayerNorm of a row of 1e37",
        "https://github.com/pytorch/pytorch/issues/173793",
        Normed,
        _padded,
    ),
    Defect(
        "padded sum of a long mask",
        "https://github.com/pytorch/pytorch/issues/189895",
        Pooled,
        _packed,
    ),
    Defect(
        "running sums of a mask",
        "https://github.com/huggingface/lerobot/issues/4178",
        Prefixed,
        lambda strikes, _: torch.randn(4, 291 if strikes else 60, 64),
        dynamic=True,
    ),
)


def run(machine: Machine) -> Iterator[Row]:
    """Return a row for each defect: whether it is there, and what nanstop says of it."""
    for one in DEFECTS:
        if machine.goes_on(one.title):
            torch.compiler.reset()
            yield {"defect": one.title, "source": one.source} | _there(machine, one)
    if machine.toy:
        machine.lack("the defects: they are those of code for a GPU")


def _there(machine: Machine, one: Defect) -> Row:
    torch.manual_seed(0)
    with torch.device(machine.device):
        model = one.model()
    x = one.rows(True, machine.toy).to(machine.device)
    eager, compiled = model(x), torch.compile(model, dynamic=one.dynamic)(x)
    found: Row = {
        "eager": bool(eager.isfinite().all()),
        "compiled": bool(compiled.isfinite().all()),
        "apart": float((eager - compiled).detach().abs().nan_to_num(torch.inf).max()),
    }
    if found["eager"] and not found["compiled"]:
        torch.compiler.reset()
        found |= _watched(machine, one)
    return found


def _watched(machine: Machine, one: Defect) -> Row:
    """Return what nanstop says of a training that comes to a defect, and its last loss beside that
    of the same training without compilation.
    """
    losses = {}
    for compiled in (False, True):
        torch.manual_seed(0)
        with torch.device(machine.device):
            model = one.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        called = torch.compile(model, dynamic=one.dynamic) if compiled else model
        with tempfile.TemporaryDirectory() as out:
            with nanstop.watch(model, optimizer, out=out) as watch:
                for step in range(STEPS):
                    x = one.rows(step == STRIKES, machine.toy).to(machine.device)
                    losses[compiled] = watch.step(lambda x, called=called: _loss(called(x), x), x)
                    watch.update()
            reports = watch.incidents
    first = reports[0] if reports else None
    place = first.localization.first_bad if first and first.localization else None
    return {
        "codes": [one.code for report in reports for one in report.diagnoses],
        "op": place.op if place is not None else None,
        "cure": " + ".join(map(str, first.proof.minimal)) if first and first.proof else None,
        "verdict": first.proof.verdict if first and first.proof else None,
        "done": first.audit[-1].action.kind if first and first.audit else None,
        "weights finite": all(bool(p.isfinite().all()) for p in model.parameters()),
        "last loss": float(losses[True]),
        "without compilation": float(losses[False]),
    }


def _loss(found: Tensor, x: Tensor) -> Tensor:
    there = x[..., 0] < 1e30
    target = torch.tanh(x.clamp(-5, 5).mean(-1))
    if found.shape != target.shape:
        return (found - 0.5).square().mean()
    return (found - target)[there].square().mean()
