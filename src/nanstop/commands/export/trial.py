"""A checkpoint in one format, loaded as its user loads it, on the inputs of an export."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanstop.commands.export.result import FormatTrial
from nanstop.errors import NanstopError
from nanstop.hosts.model.load import load_as_user
from nanstop.hosts.model.view import PlainView
from nanstop.numerics.tensors import format_name, tensors
from nanstop.records import FORMAT_MAX, PrecisionPlan
from nanstop.remedies.lasting import lasting
from nanstop.remedies.plan import atoms_of

ModelInput = dict[str, Tensor]


@dataclass(slots=True)
class _Seen:
    """What the modules of a model gave out, in the order in which they ended."""

    largest: float = 0.0
    first_bad: str = ""

    def take(self, name: str, outputs: Any) -> None:
        for tensor in tensors(outputs):
            if not tensor.is_floating_point() or tensor.numel() == 0:
                continue
            largest = float(tensor.abs().amax())  # NaN where any is
            if largest < float("inf"):
                self.largest = max(self.largest, largest)
            elif not self.first_bad and not _is_mask(tensor):
                self.first_bad = name or "the model itself"


def _is_mask(tensor: Tensor) -> bool:
    """Return whether a tensor is finite but for places that are left out by -inf."""
    return not bool((tensor.isnan() | tensor.isposinf()).any())


@contextmanager
def _observed(model: nn.Module, seen: _Seen) -> Iterator[None]:
    def ended(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda _module, _inputs, outputs: seen.take(name, outputs)

    with ExitStack() as undo:
        for name, module in model.named_modules():
            undo.callback(module.register_forward_hook(ended(name)).remove)
        yield


def tried(
    folder: Path,
    dtype: torch.dtype,
    batches: Sequence[ModelInput],
    *,
    device: str,
    plan: PrecisionPlan | None = None,
) -> tuple[FormatTrial, tuple[Tensor, ...]]:
    """Return what a checkpoint does in a format, and its logits at the tokens of each batch.

    Errors: ``NanstopError`` for what cannot be loaded; what it raises when it runs, or lack of
    memory, is a problem of the trial.
    """
    name = format_name(dtype)
    trial = FormatTrial(dtype=name, under_plan=plan is not None, limit=FORMAT_MAX[name])
    seen = _Seen()
    try:
        model = load_as_user(folder, dtype).to(device)
        with ExitStack() as undo:
            if plan is not None:
                view = PlainView(model)
                undo.enter_context(lasting(view, atoms_of(plan, view)))
            undo.enter_context(torch.no_grad())
            undo.enter_context(_observed(model, seen))
            logits = tuple(_logits(model, batch, device) for batch in batches)
    except NanstopError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:160]
        return replace(trial, problem=f"{type(error).__name__}: {said}"), ()
    finite = all(not bool((one.isnan() | one.isposinf()).any()) for one in logits)
    where = "" if finite else seen.first_bad or "the logits"
    return replace(trial, finite=finite, largest=seen.largest, first_bad=where), logits


def _logits(model: nn.Module, batch: ModelInput, device: str) -> Tensor:
    """Return what a model says of each token that is not padding, on the CPU."""
    output = model(**{name: value.to(device) for name, value in batch.items()})
    found = getattr(output, "logits", None)
    if found is None:
        found = getattr(output, "last_hidden_state", None)
    if not isinstance(found, Tensor):
        raise NanstopError(f"{type(model).__name__} returns no logits")
    mask = batch.get("attention_mask")
    found = found.cpu()
    return found[mask.bool()] if mask is not None and mask.shape == found.shape[:2] else found


def distance(logits: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return how far logits are from exact ones, as a share of these, of the worst batch."""
    pairs = zip((one.float() for one in logits), (one.float() for one in exact), strict=True)
    return max(float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in pairs)
