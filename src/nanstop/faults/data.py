"""Batches that no training can use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

from nanstop.faults.parts import WIDTH, Model, TokenModel, diagonal, next_token_loss, ones, trained
from nanstop.faults.specimen import Batch, Entry, Specimen, loss_fails, pair, run_plain
from nanstop.records.vocabulary import IGNORED_LABEL


def pixels(element: float) -> Specimen:
    """One element of the batch is ``element``."""
    model = Model(layer=diagonal(1.0))
    x = ones()
    x[1, 2, 3] = element
    return trained(
        model, lambda batch: model(batch["pixels"]).pow(2).mean(), batches=({"pixels": x},)
    )


def batch_is_bad(specimen: Specimen) -> bool:
    """Return whether a batch holds a value that is not finite."""
    return any(not bool(v.isfinite().all()) for batch in specimen.batches for v in batch.values())


def token_id(largest: int, label: int | None = None) -> Specimen:
    """A table of 20 rows, a batch whose largest id is ``largest``, and every label ``label``."""
    torch.manual_seed(0)
    model = TokenModel(num_rows=20)
    ids = torch.tensor([[1, 5, 6, 7], [2, 3, 4, largest]])
    labels = ids.clamp(max=19) if label is None else torch.full_like(ids, label)
    return trained(
        model,
        lambda batch: next_token_loss(model(batch["input_ids"]), batch["labels"]),
        batches=({"input_ids": ids, "labels": labels},),
    )


def raises_index_error(specimen: Specimen) -> bool:
    """Return whether the loss raises IndexError."""
    return run_plain(specimen).error.startswith("IndexError")


def measured(size: float) -> Specimen:
    """One sample of four comes in units that make it ``size`` times larger."""
    torch.manual_seed(0)
    model = Model(layer=diagonal(1.0))
    x = torch.randn(4, 6, WIDTH)
    x[1] *= size
    return trained(
        model, lambda batch: model(batch["features"]).pow(2).mean(), batches=({"features": x},)
    )


def labelled(share: float) -> Specimen:
    """Rows of which this share hold labels, under a loss that divides by at least 1."""
    torch.manual_seed(0)
    model = TokenModel(num_rows=20)

    def loss_fn(batch: Batch) -> Tensor:
        logits, labels = model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total / (labels != IGNORED_LABEL).sum().clamp(min=1)

    ids = torch.randint(1, 20, (16, 6))
    labels = ids.clone()
    labels[int(share * len(ids)) :] = IGNORED_LABEL
    return trained(model, loss_fn, batches=({"input_ids": ids, "labels": labels},) * 4)


def learns_nothing(specimen: Specimen) -> bool:
    """Return whether a finite loss has no gradient."""
    run = run_plain(specimen)
    return run.healthy and run.num_nonzero_gradients == 0


def weighed(count: float) -> Specimen:
    """The loss weighs its columns by the inverse of how often each was met, the third ``count``
    times.
    """
    model = Model(layer=diagonal(1.0))
    counts = torch.ones(WIDTH)
    counts[2] = count
    weights = 1.0 / counts
    return trained(
        model, lambda batch: (model(batch["x"]) * weights).mean(), batches=({"x": ones()},)
    )


FAULTS: Mapping[str, Entry] = {
    "NS501": pair(pixels, math.inf, 2.0, batch_is_bad),
    "NS502": pair(token_id, 20, 19, raises_index_error),
    "NS503": Entry(partial(token_id, 19, label=-100), partial(token_id, 19, label=3), loss_fails),
    "NS504": pair(measured, 1e25, 1.0, loss_fails),
    "NS505": pair(labelled, 0.0, 1.0, learns_nothing, quiet=True),
    "NS506": pair(weighed, 0.0, 1.0, loss_fails),
}
