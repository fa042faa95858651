"""Facts of what an update rests on.

Restored state, the sum over micro-batches.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanstop.numerics.tensors import dense_parts, format_name, spread
from nanstop.records import AccumulationFacts, ResumeFacts
from nanstop.records.vocabulary import IGNORED_LABEL
from nanstop.replay.step import Batch

_MOST_SUMS, _MOST_SUMMED = 8, 4096
_SHARDED = ("optimizer_0", "global_step*", "optimizer.bin", "pytorch_model_fsdp*")
"""Files of FSDP and DeepSpeed, which keep a run's state under names of their own."""


def resumed_state(optimizer: Optimizer | None) -> ResumeFacts | None:
    """Return what the optimizer's own state tells of earlier steps, None for a fresh one.

    Reads what it keeps of the gradients of each parameter: tensors of its shape.
    """
    if optimizer is None or not optimizer.state:
        return None
    steps = [int(entry["step"]) for entry in optimizer.state.values() if "step" in entry]
    counted = optimizer.state.items() if steps else ()
    kept = [held for p, entry in counted if (held := _moments(p, entry))]
    num_zero = sum(not any(bool(one.any()) for one in held) for held in kept)
    return ResumeFacts(step=max(steps, default=0), num_moments=len(kept), num_zero=num_zero)


def _moments(parameter: Any, entry: Mapping[str, Any]) -> list[Tensor]:
    """Return what an optimizer keeps of a parameter's gradients, whatever it calls it."""
    held = (v for v in entry.values() if isinstance(v, Tensor) and v.is_floating_point())
    return [v for v in held if v.dim() and v.shape == getattr(parameter, "shape", None)]


def resumed_from(
    folder: str | None, optimizer: Optimizer | None, *, scaled: bool
) -> ResumeFacts | None:
    """Return what a checkpoint of transformers holds of a run's state.

    ``scaled``: this run has a loss scaler.
    """
    own = resumed_state(optimizer)
    if folder is None or not Path(folder).is_dir():
        return own
    place, known = Path(folder), own or ResumeFacts()
    expected = ["optimizer.pt", "scheduler.pt", *(["scaler.pt"] if scaled else [])]
    missing = [name for name in expected if not (place / name).is_file()]
    if not any(place.glob("rng_state*.pth")):
        missing.append("rng_state.pth")
    if any(next(place.glob(pattern), None) is not None for pattern in _SHARDED):
        missing = []
    return ResumeFacts(
        folder=place.name,
        step=known.step or _step_of(place),
        missing=tuple(missing),
        num_moments=known.num_moments,
        num_zero=known.num_zero,
    )


def _step_of(place: Path) -> int:
    try:
        return int(
            json.loads((place / "trainer_state.json").read_text(encoding="utf-8"))["global_step"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def accumulation_of(*roots: nn.Module) -> AccumulationFacts | None:
    """Return what of the models that are called depends on how a batch is split, None where
    nothing does.
    """
    kinds = nn.modules.batchnorm._BatchNorm
    norms = {m for root in roots for m in root.modules() if isinstance(m, kinds) and m.training}
    return AccumulationFacts(batch_norms=len(norms)) if norms else None


def sum_format(gradients: Iterable[Tensor | None]) -> str | None:
    """Return the half format that every one of some gradients fits exactly.

    Float32 sums of many do not.

    Looks at some thousand elements of the first matrices. Synchronises.
    """
    matrices = [g for g in gradients if g is not None and g.dim() > 1 and not g.is_sparse]
    # Of a sharded one what is here.
    held = [part for g in matrices[:_MOST_SUMS] for part in dense_parts(g) if part.numel()]
    known = [_sample(g) for g in held if g.is_floating_point()]
    for half in (torch.bfloat16, torch.float16) if known else ():
        if all(bool(g.any()) and bool((g == g.to(half)).all()) for g in known):
            return format_name(half)
    return None


def _sample(gradient: Tensor) -> Tensor:
    """Return up to ``_MOST_SUMMED`` elements that are not 0.

    A batch reaches a few rows of an embedding.
    """
    found = spread(gradient, _MOST_SUMMED)
    if bool(found.any()):
        return found
    flat = gradient.detach().reshape(-1)
    return flat[flat.nonzero().flatten()[:_MOST_SUMMED]]


def seen_accumulation(
    roots: Iterable[nn.Module],
    batches: Sequence[Batch],
    losses: Sequence[float],
    gradients: Iterable[Tensor | None] = (),
) -> AccumulationFacts | None:
    """Return how a loop's own losses are divided, as far as those of one window tell.

    None where nothing does.

    ``roots``: the modules that it called on pieces of one batch, ``batches``; ``gradients``: of the
    whole window.

    Means over tokens are alike however many tokens there are;
    shares of the window's tokens grow with them.
    """
    norms = accumulation_of(*roots)
    half = sum_format(gradients)
    if half is not None:
        norms = replace(norms or AccumulationFacts(), sum_format=half)
    counts = [num_supervised(labels) for labels in _labels(batches)]
    apart = len(counts) == len(losses) > 1 and min(counts) > 0 and max(counts) >= 2 * min(counts)
    if not apart or not all(math.isfinite(loss) and loss > 0.0 for loss in losses):
        return norms
    means = _spread(losses)
    shares = _spread([loss / count for loss, count in zip(losses, counts, strict=True)])
    if max(means, shares) < 3 * min(means, shares):
        return norms
    return AccumulationFacts(
        counts=tuple(counts),
        by_tokens=shares < means,
        # What else the script divides by cannot be told from its losses: taken as it should be.
        by_micros=means < shares,
        batch_norms=norms.batch_norms if norms else 0,
        sum_format=half,
    )


def _labels(batches: Sequence[Batch]) -> list[Tensor]:
    """Return each batch's labels: integers of which some are what torch's losses ignore, else what
    all entries of integers are alike.

    What the script's own loss reads has the name of a variable in the last batch only, and the same
    place in all.
    """
    if len({len(batch) for batch in batches}) != 1:
        return []
    columns = [
        [v for v in column if isinstance(v, Tensor) and v.dtype == torch.int64 and v.dim()]
        for column in zip(*(batch.values() for batch in batches), strict=True)
    ]
    whole = [column for column in columns if len(column) == len(batches)]
    for column in whole:
        if any(bool((v == IGNORED_LABEL).any()) for v in column):
            return column
    # Without one that is ignored, each counts, and of entries of one shape as many in any of them.
    shapes = {tuple(v.shape for v in column) for column in whole}
    return whole[0] if len(shapes) == 1 else []


def _spread(values: Sequence[float]) -> float:
    """Return how many doublings lie between the smallest and the largest of some positive
    numbers.
    """
    return math.log2(max(values) / min(values))


def num_supervised(labels: Tensor) -> int:
    """Return how many labels are trained on.

    Of sequences, without the first, which nothing predicts.
    """
    return int(((labels[..., 1:] if labels.dim() > 1 else labels) != IGNORED_LABEL).sum())
