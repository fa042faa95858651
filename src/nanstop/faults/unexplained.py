"""A cause that nothing names: what stands behind the findings of 0xx."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nanstop.faults.parts import Model, diagonal, trained
from nanstop.faults.specimen import Entry, Specimen, gradient_fails, pair


class HiddenWrite(torch.autograd.Function):
    """The identity; its backward writes ``poison`` into the gradient, unseen, through NumPy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, poison: float) -> Tensor:
        ctx.poison = poison
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        made = gradients[0].clone()
        made.numpy()[0] = ctx.poison
        return made, None


def hidden_write(poison: float) -> Specimen:
    """A gradient buffer is filled through NumPy, behind torch's back."""
    model = Model(layer=diagonal(1.0))
    return trained(model, lambda batch: HiddenWrite.apply(model(batch["x"]), poison).pow(2).mean())


FAULTS: Mapping[str, Entry] = {
    "NS000": pair(hidden_write, math.nan, 0.5, gradient_fails),
}
