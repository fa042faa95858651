"""What the numbers of an operand are: probabilities, scores, or what lies between 0 and 1.

That is read off some of its rows; whether it is so whatever the weights are is another question.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from nanstop.detect.objective.labels import LIKELIHOODS, picked

Given = Literal["probabilities", "between_0_and_1", "scores", "one_class", "across", "unsigned"]

MOST_ROWS = 64
"""Rows of an operand that are read: all of them are to be alike."""
LEAST_TARGETS = 32
"""Of -1, 0 and 1, a small batch may have no -1."""
TOLERANCE = 1e-2
"""Of a sum of probabilities: those of bfloat16 sum to 1 within it."""
_APART, _WHOLE = 0.05, 1e-4
"""By how much logarithms of sums are off that are none of probabilities, and of a length by how
much it is at most.
"""
LOG_SHARES = "_log_softmax"
NORMALISE = frozenset({LOG_SHARES, "log_softmax", "logsumexp"})
SHARES = "_softmax"
ALIGNMENTS = frozenset({"_ctc_loss", "_cudnn_ctc_loss"})
BINARY = "binary_cross_entropy_with_logits"
SIGNED = "soft_margin_loss"
SUMS = frozenset({"sum", "mean"})
"""What a mask leaves goes on to these; what a target has signed does not."""
SCORED = frozenset({"gather", "index"})
"""Operations that may take one score of each row."""
SQUASHES = frozenset({"softplus", "log_sigmoid_forward"})


def reader(base: str) -> Callable[[Any], Given | None] | None:
    """Return what reads the operand of an op, None for ops that end no objective."""
    if base in NORMALISE or base == SHARES:
        return lambda args: _normalised(args[0], _dim(args[1]), base)
    if base == "exp":  # of probabilities: a softmax of them that is spelled out
        return lambda args: _exponents(args[0])
    if base in LIKELIHOODS:
        return lambda args: likelihood(args[0], 1 if args[0].dim() > 1 else 0)
    if base in ALIGNMENTS:
        return lambda args: likelihood(args[0], -1)
    if base in SCORED:
        return lambda args: _picked_scores(args[0]) if picked(base, args) is not None else None
    if base == "mul":
        return _meets_labels
    if base in SQUASHES or base == BINARY:
        return lambda args: _between(args[0])
    return (lambda args: _unsigned(args[0], args[1])) if base == SIGNED else None


def _dim(given: Any) -> int | None:
    dims = list(given) if isinstance(given, (list, tuple)) else [given]
    return int(dims[0]) if len(dims) == 1 else None


def some_rows(values: Tensor, dim: int) -> Tensor:
    """Return some rows of an operand, its classes last, in float32."""
    rows = values.detach().movedim(dim, -1).reshape(-1, values.shape[dim])
    each = max(1, len(rows) // MOST_ROWS)
    return rows[::each][:MOST_ROWS].float()


def _normalised(values: Tensor, dim: int | None, base: str) -> Given | None:
    """Return what is odd about logits; of a softmax, whose scores may be anything, one entry."""
    if dim is None or values.dim() == 0 or not values.numel() or not values.requires_grad:
        return None
    if values.shape[dim] == 1:
        return "one_class" if values.dim() > 1 else None
    if base != SHARES and are_probabilities(some_rows(values, dim)):
        return "probabilities"
    return _between(values) if base == LOG_SHARES else None


def _exponents(values: Tensor) -> Given | None:
    """Return what is odd about the exponents of a softmax. Probabilities of one class are 1."""
    if values.dim() < 2 or values.shape[-1] < 2 or not values.requires_grad:
        return None
    rows = some_rows(values, -1)
    return "probabilities" if len(rows) > 1 and are_probabilities(rows) else None


def likelihood(values: Tensor, dim: int) -> Given | None:
    """Return what is odd about log-probabilities. Their log-sum is 0, and none is above 0."""
    if not values.numel() or values.shape[dim] < 2 or not values.requires_grad:
        return None
    rows = some_rows(values, dim)
    if are_probabilities(rows):
        return "probabilities"
    if bool((rows.amax(-1) > TOLERANCE).any()):
        return "scores"
    is_off = bool((rows.logsumexp(-1).abs() > _APART).any())
    return "across" if is_off and _are_normalised_across(values, values.shape[dim]) else None


def _are_normalised_across(values: Tensor, classes: int) -> bool:
    """Return whether logarithms are those of probabilities that sum to 1 along a dimension, in
    whatever shape: there are as many times their sum of them as it is long. One of as many as there
    are ``classes`` may be meant: a contrast of a batch with itself goes both ways.
    """
    long = values.numel() / float(values.detach().exp().sum(dtype=torch.float32))
    return round(long) not in (1, classes) and abs(long - round(long)) <= _WHOLE * long


def _between(values: Tensor) -> Given | None:
    if not values.numel() or not values.requires_grad:
        return None
    return "between_0_and_1" if _are_shares(values) and bool((values > 0.0).any()) else None


def _picked_scores(values: Tensor) -> Given | None:
    """Return "scores" where one of each row is picked that is no log-probability."""
    odd = likelihood(values, -1)
    return odd if odd == "scores" else None


def _meets_labels(args: Any) -> Given | None:
    """Return what is odd about scores that are multiplied by as many numbers between 0 and 1."""
    if not all(isinstance(one, Tensor) and one.shape == args[0].shape for one in args[:2]):
        return None
    trained = [one for one in args[:2] if one.requires_grad]
    labels = [one for one in args[:2] if not one.requires_grad]
    if len(labels) != 1 or not labels[0].numel() or not _are_shares(labels[0]):
        return None
    return _between(trained[0]) or ("unsigned" if are_binary(labels[0]) else None)


def _unsigned(values: Tensor, targets: Tensor) -> Given | None:
    """Return whether targets that are to be -1 and 1 are 0 and 1."""
    return "unsigned" if values.requires_grad and are_binary(targets) else None


def are_binary(targets: Tensor) -> bool:
    """Return whether targets are 0 and 1, some are either, and they are enough to tell."""
    if targets.requires_grad or targets.numel() < LEAST_TARGETS:
        return False
    of_0, of_1 = (int((targets == number).sum()) for number in (0, 1))
    return bool(of_0 and of_1) and of_0 + of_1 == targets.numel()


def first_numbers(values: Tensor) -> Tensor:
    """Return as many numbers of a tensor, flat, as are looked at."""
    return values.detach().flatten()[: MOST_ROWS * MOST_ROWS]


def _are_shares(values: Tensor) -> bool:
    read = first_numbers(values)
    return bool(((read >= 0.0) & (read <= 1.0)).all())


def are_probabilities(rows: Tensor) -> bool:
    sums = (rows.sum(-1) - 1.0).abs()
    return bool((rows >= 0.0).all()) and bool((sums <= TOLERANCE).all())


def is_log(logs: Tensor, values: Tensor) -> bool:
    """Return whether some rows of ``logs`` are the logarithms of those of ``values``."""
    read, given = some_rows(logs, -1).exp(), some_rows(values, -1)
    return torch.allclose(read, given, rtol=TOLERANCE, atol=TOLERANCE)
