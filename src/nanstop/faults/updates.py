"""Set-ups whose updates go wrong although every number may be finite."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from nanstop.faults.parts import WIDTH, Model, diagonal, ones, trained
from nanstop.faults.specimen import (
    Batch,
    Entry,
    Specimen,
    gradients_are_zero,
    pair,
    run_plain,
    update_breaks,
)


def small_gradients(stored: torch.dtype) -> Specimen:
    """AdamW on a head in ``stored``, gradients of 0.001: eps and the square are 0 in float16."""
    head = nn.Linear(WIDTH, 1).to(stored)
    nn.init.constant_(head.weight, 0.5)
    model = Model(head=head)

    def loss_fn(batch: Batch) -> Tensor:
        return model(batch["x"].to(stored)).float().mean() * 1e-3

    return trained(model, loss_fn, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))


def small_steps(stored: torch.dtype) -> Specimen:
    """AdamW at a rate of 1e-6 on weights of a usual size, stored in ``stored``."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=False)
    nn.init.normal_(layer.weight, std=0.02)
    model = Model(layer=layer).to(stored)
    return trained(
        model,
        lambda batch: model(batch["x"].to(stored)).float().pow(2).mean(),
        batches=({"x": torch.randn(16, 64)},),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-6),
    )


def stands_still(specimen: Specimen) -> bool:
    """Return whether most weights with a gradient are the same after an update."""
    before = [p.detach().clone() for p in specimen.model.parameters()]
    num_moving = run_plain(specimen).num_nonzero_gradients
    moved = zip(specimen.model.parameters(), before, strict=True)
    return sum(int((p != old).sum()) for p, old in moved) < num_moving / 2


def half_loop(scale: float | None) -> Specimen:
    """A small loss under float16 autocast, with a loss scale or without."""
    model = Model(layer=diagonal(0.5))

    def loss_fn(batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return 1e-8 * model(batch["x"]).float().pow(2).sum()

    return trained(
        model,
        loss_fn,
        batches=({"x": ones(rows=1, tokens=1)},),
        scaler=None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale),
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
    return trained(model, optimizer=optimizer)


def moves_beyond_rate(specimen: Specimen) -> bool:
    """Return whether one update moves a weight by more than twice the learning rate."""
    before = [p.detach().clone() for p in specimen.model.parameters()]
    run_plain(specimen)
    moved = max(
        float((new - old).abs().max().detach())
        for old, new in zip(before, specimen.model.parameters(), strict=True)
    )
    return moved > 2.0 * specimen.optimizer.param_groups[0]["lr"]


def updated(when: str) -> Specimen:
    """Each weight is updated "in backward", once its gradient is there, or "after backward"."""
    model = Model(layer=diagonal(0.5))
    own = {p: torch.optim.SGD([p], lr=1e-4) for p in model.parameters()}

    def update(parameter: Tensor) -> None:
        own[parameter].step()  # type: ignore[index]
        own[parameter].zero_grad(set_to_none=False)  # type: ignore[index]

    if when == "in backward":
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
    return trained(model)


def moves_in_backward(specimen: Specimen) -> bool:
    """Return whether a backward changes a weight."""
    before = [p.detach().clone() for p in specimen.model.parameters()]
    specimen.loss_fn(specimen.batches[0]).backward()
    return not all(map(torch.equal, before, specimen.model.parameters()))


def split_batch(counts: tuple[int, int]) -> Specimen:
    """Two micro-batches, each a mean over its own tokens: ``counts`` of them."""
    model = Model(layer=nn.Linear(WIDTH, WIDTH, bias=False))
    torch.manual_seed(0)
    batches = tuple({"x": torch.randn(count, WIDTH)} for count in counts)
    return trained(model, batches=batches)


def depends_on_the_split(specimen: Specimen) -> bool:
    """Return whether the mean of the micro-batches' gradients is not that of the whole batch."""
    parameters = list(specimen.model.parameters())
    whole = {"x": torch.cat([batch["x"] for batch in specimen.batches])}
    parts = [torch.autograd.grad(specimen.loss_fn(b), parameters) for b in specimen.batches]
    mean = [torch.stack(each).mean(0) for each in zip(*parts, strict=True)]
    true = torch.autograd.grad(specimen.loss_fn(whole), parameters)
    return not all(torch.allclose(a, b, rtol=1e-4) for a, b in zip(mean, true, strict=True))


FAULTS: Mapping[str, Entry] = {
    "NS110": pair(small_gradients, torch.float16, torch.float32, update_breaks),
    "NS111": pair(small_steps, torch.bfloat16, torch.float32, stands_still, quiet=True),
    "NS112": pair(half_loop, None, 65536.0, gradients_are_zero, quiet=True),
    "NS115": pair(resumed_at, 0.0, 1.0, moves_beyond_rate, quiet=True),
    "NS116": pair(updated, "in backward", "after backward", moves_in_backward, quiet=True),
    "NS117": pair(split_batch, (2, 20), (11, 11), depends_on_the_split, quiet=True),
}
