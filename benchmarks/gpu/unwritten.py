"""Rows of a grouped product that belong to no expert: nobody writes them, nor their gradients
(PyTorch issues 193633 and 154557, transformers pull request 45621).

The product alone, then a mixture of experts whose router sends tokens to an expert that is not
there, as with experts on other ranks: unwatched, and watched.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

import nanstop
from gpu.machine import Machine, Row

EXPERTS, WIDTH, INNER, CHOSEN = 4, 64, 128, 2
TOKENS, STEPS = 512, 12


class Experts(nn.Module):
    """What the absent expert makes of a token is weighed with 0."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS + 1)
        self.up = nn.Parameter(0.1 * torch.randn(EXPERTS, WIDTH, INNER))
        self.down = nn.Parameter(0.1 * torch.randn(EXPERTS, INNER, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.router(x).softmax(-1).topk(CHOSEN, -1)
        experts = chosen.flatten()
        order = experts.argsort(stable=True)
        ends = torch.bincount(experts, minlength=EXPERTS + 1)[:EXPERTS].cumsum(0).to(torch.int32)
        rows = x[order // CHOSEN].to(torch.bfloat16)
        hidden = functional.silu(functional.grouped_mm(rows, self.up.bfloat16(), offs=ends))
        out = functional.grouped_mm(hidden, self.down.bfloat16(), offs=ends).float()
        weights = scores.flatten().where(experts < EXPERTS, 0.0)[order]
        return x + torch.zeros_like(x).index_add(0, order // CHOSEN, out * weights[:, None])


def run(machine: Machine) -> Iterator[Row]:
    """Return a row for the product alone, and one for the training."""
    if not hasattr(functional, "grouped_mm"):
        machine.lack("a product of groups: this torch has none")
        return
    with torch.device(machine.device):
        yield _product()
        yield {"what": "training"} | _plain() | _watched()


def _product() -> Row:
    """Return how many rows behind the last group are left as they were, and of the gradient."""
    ends = torch.tensor([64, 96, 128, 192], dtype=torch.int32)
    shape, bad = (256, WIDTH), float("nan")
    rows = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(EXPERTS, WIDTH, WIDTH, dtype=torch.bfloat16)
    del [torch.full(shape, bad, dtype=torch.bfloat16) for _ in range(8)][:]
    out = functional.grouped_mm(rows, weight, offs=ends)
    del [torch.full(shape, bad, dtype=torch.bfloat16) for _ in range(8)][:]
    (grad,) = torch.autograd.grad(out[:192].sum(), rows)
    return {
        "what": "product of 256 rows, 192 of them in groups",
        "rows not finite": int((~out.isfinite()).any(-1).sum()),
        "of the gradient": int((~grad.isfinite()).any(-1).sum()),
    }


def _made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts(), nn.Linear(WIDTH, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x)[:, 0] - x.mean(-1)).square().mean()


def _is_finite(model: nn.Module) -> bool:
    return all(bool(p.isfinite().all()) for p in model.parameters())


def _plain() -> Row:
    model, optimizer = _made()
    last = torch.zeros(())
    for _ in range(STEPS):
        last = _loss(model, torch.randn(TOKENS, WIDTH))
        last.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"plain loss": float(last.detach()), "plain weights finite": _is_finite(model)}


def _watched() -> Row:
    model, optimizer = _made()
    last = torch.zeros(())
    with (
        tempfile.TemporaryDirectory() as out,
        nanstop.watch(model, optimizer, out=out) as watch,
    ):
        for _ in range(STEPS):
            last = watch.step(lambda x: _loss(model, x), torch.randn(TOKENS, WIDTH))
            watch.update()
    first = watch.incidents[0] if watch.incidents else None
    place = first.localization.first_bad if first and first.localization else None
    return {
        "findings": [one.code for one in watch.findings],
        "codes": [one.code for report in watch.incidents for one in report.diagnoses],
        "op": place.op if place is not None else None,
        "cure": " + ".join(map(str, first.proof.minimal)) if first and first.proof else None,
        "verdict": first.proof.verdict if first and first.proof else None,
        "done": first.audit[-1].action.kind if first and first.audit else None,
        "last loss": float(last.detach()),
        "weights finite": _is_finite(model),
    }
