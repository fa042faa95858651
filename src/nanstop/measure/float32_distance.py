"""How far a window in the run's own formats is from the same window in float32:
logits and gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanstop.measure.ranges import Formats
from nanstop.numerics.tensors import floats, format_name, has_bad, in_float64
from nanstop.records import GradientRow, LogitGap
from nanstop.replay.conditions import Under, eager
from nanstop.replay.step import Step, gradients_of

_CHUNK = 1 << 22
"""Elements of logits that are compared at a time."""


@dataclass(frozen=True, slots=True)
class WindowOutputs:
    """What a window gave: losses, gradients by parameter (with the loss scale), outputs of the
    head in call order.
    """

    losses: tuple[float, ...]
    grads: Mapping[str, Tensor]
    logits: tuple[Tensor, ...]


def run_window(
    step: Step,
    *,
    under: Under = nullcontext,
    along: Under = nullcontext,
    micros: Iterable[int] | None = None,
) -> WindowOutputs:
    """Run the micro-batches of a window, all by default, and undo it. Synchronises the device.

    The head is heard in the first one. ``along``: a ``Path`` that is recorded or played.
    """
    head = step.view.head()
    heard: list[Tensor] = []
    losses: list[float] = []
    with step.isolated(), under(), eager(), along():
        for micro in range(len(step.batches)) if micros is None else micros:
            with _heard(step.view.root, head, heard) if micro == 0 else nullcontext():
                losses.append(float(step.run(micro)))
        grads = gradients_of(step.view.root)
    return WindowOutputs(tuple(losses), grads, tuple(heard))


def _heard(root: nn.Module, head: str | None, into: list[Tensor]) -> AbstractContextManager[object]:
    if head is None:
        return nullcontext()

    def keep(_module: nn.Module, _args: Any, output: Any) -> None:
        # Checkpointing may call it again in the backward pass: that is no new answer.
        first = torch._C._current_graph_task_id() == -1
        if isinstance(output, Tensor) and output.is_floating_point() and first:
            into.append(output.detach())

    return root.get_submodule(head).register_forward_hook(keep)


@torch.no_grad()
def logit_gap(own: WindowOutputs, reference: WindowOutputs) -> LogitGap | None:
    """Return the distance of the head's outputs, None where it was not called or not called
    alike.
    """
    pairs = list(zip(own.logits, reference.logits, strict=False))
    if not pairs or len(own.logits) != len(reference.logits):
        return None
    if any(a.shape != b.shape or a.dim() == 0 or a.numel() == 0 for a, b in pairs):
        return None
    by_token = [_distances(a.flatten(0, -2), b.flatten(0, -2)) for a, b in map(_matrices, pairs)]
    distances = torch.cat(by_token)
    return LogitGap(logprob_max=float(distances.max()), logprob_mean=float(distances.mean()))


def _matrices(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    first, second = pair
    return (first[None], second[None]) if first.dim() == 1 else (first, second)


def _distances(own: Tensor, reference: Tensor) -> Tensor:
    """Return the distance of each row of [tokens, vocabulary], in float32."""
    rows = max(1, _CHUNK // own.shape[-1])
    found = []
    for a, b in zip(own.split(rows), reference.split(rows), strict=True):
        a, b = a.float(), b.float()  # noqa: PLW2901
        true = torch.log_softmax(b, -1)
        gap = (torch.log_softmax(a, -1) - true).abs()
        found.append((gap * true.exp()).sum(-1))
    return torch.cat(found)


@torch.no_grad()
def gradient_rows(
    own: WindowOutputs, reference: WindowOutputs, formats: Formats, scale: float
) -> tuple[GradientRow, ...]:
    """Return what each gradient that is finite lost; ``scale``: that of the loss, in both windows.

    Synchronises the device.
    """
    rows = []
    for name, true in reference.grads.items():
        grad = own.grads.get(name)
        for exact, kept in zip(
            floats(true), floats(grad) if grad is not None else (), strict=False
        ):
            if exact.shape == kept.shape and not has_bad(kept):
                owner = name.rpartition(".")[0]
                dtype = formats.gradient(owner, format_name(kept.dtype))
                rows.append(_gradient_row(name, exact, kept, dtype, scale))
    return tuple(rows)


def _gradient_row(name: str, exact: Tensor, kept: Tensor, dtype: str, scale: float) -> GradientRow:
    exact = in_float64(exact)
    nonzero = (exact != 0) & exact.isfinite()
    flushed = nonzero & (kept.to(exact.device) == 0)
    num_nonzero, num_flushed = torch.stack([nonzero.sum(), flushed.sum()]).tolist()
    size = torch.where(nonzero, (exact / scale).abs(), 0.0)
    return GradientRow(
        parameter=name,
        dtype=dtype,
        absmax=float(size.max()),
        num_nonzero=num_nonzero,
        num_flushed=num_flushed,
    )
