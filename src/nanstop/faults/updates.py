"""Updates that go wrong although every number is finite: one function a finding, as in ``zoo.plants``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanstop.faults.parts import WIDTH, Model, diagonal, ones
from nanstop.faults.specimen import Batch, Specimen, run_plain


def half_loop(scale: float | None) -> Specimen:
    """A small loss under float16 autocast, with a loss scale or without."""
    model = Model(layer=diagonal(0.5))

    def loss_fn(batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return 1e-8 * model(batch["x"]).float().pow(2).sum()

    return Specimen(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        loss_fn=loss_fn,
        batches=({"x": ones(rows=1, tokens=1)},),
        scaler=None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale),
        autocast="float16",
    )


def resumed_at(second: float, step: int = 10_000) -> Specimen:
    """AdamW that has counted ``step`` steps, its second moments all ``second``."""
    model = Model(layer=diagonal(0.5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(float(step)),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.full_like(parameter, second),
        }
    return Specimen(
        model=model,
        optimizer=optimizer,
        loss_fn=lambda batch: model(batch["x"]).pow(2).mean(),
        batches=({"x": ones()},),
    )


def updated(when: str) -> Specimen:
    """Each weight is updated "in backward", as soon as its gradient is there, or "after backward"."""
    model = Model(layer=diagonal(0.5))
    own = {p: torch.optim.SGD([p], lr=1e-4) for p in model.parameters()}

    def update(parameter: Tensor) -> None:
        own[parameter].step()  # type: ignore[index]
        own[parameter].zero_grad(set_to_none=False)  # type: ignore[index]

    if when == "in backward":
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
    return Specimen(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        loss_fn=lambda batch: model(batch["x"]).pow(2).mean(),
        batches=({"x": ones()},),
    )


def split_batch(counts: tuple[int, int]) -> Specimen:
    """Two micro-batches, each a mean over its own tokens: ``counts`` of them."""
    model = Model(layer=nn.Linear(WIDTH, WIDTH, bias=False))
    torch.manual_seed(0)
    batches = tuple({"x": torch.randn(count, WIDTH)} for count in counts)
    return Specimen(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        loss_fn=lambda batch: model(batch["x"]).pow(2).mean(),
        batches=batches,
    )


def moves_beyond_rate(specimen: Specimen) -> bool:
    """Return whether one update moves a weight by more than twice the learning rate."""
    before = [p.detach().clone() for p in specimen.model.parameters()]
    run_plain(specimen)
    moved = max(
        float((new - old).abs().max().detach())
        for old, new in zip(before, specimen.model.parameters(), strict=True)
    )
    return moved > 2.0 * specimen.optimizer.param_groups[0]["lr"]


def moves_in_backward(specimen: Specimen) -> bool:
    """Return whether a backward changes a weight."""
    before = [p.detach().clone() for p in specimen.model.parameters()]
    specimen.loss_fn(specimen.batches[0]).backward()
    return not all(map(torch.equal, before, specimen.model.parameters()))


def depends_on_the_split(specimen: Specimen) -> bool:
    """Return whether the mean of the micro-batches' gradients is not that of the whole batch."""
    parameters = list(specimen.model.parameters())
    whole = {"x": torch.cat([batch["x"] for batch in specimen.batches])}
    parts = [torch.autograd.grad(specimen.loss_fn(b), parameters) for b in specimen.batches]
    mean = [torch.stack(each).mean(0) for each in zip(*parts, strict=True)]
    true = torch.autograd.grad(specimen.loss_fn(whole), parameters)
    return not all(torch.allclose(a, b, rtol=1e-4) for a, b in zip(mean, true, strict=True))
