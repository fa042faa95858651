"""Losses with a value where they have none: means of nothing, targets of 0, texts that no path
spells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nanstop.records.vocabulary import IGNORED_LABEL, LOSSES_OF_ELEMENTS
from nanstop.remedies.forms.calls import Call


def _labelled(call: Call) -> Tensor | None:
    """Return a mean loss over labels, of none 0."""
    target, weight = call.argument(1, "target"), call.argument(2, "weight")
    ignored = call.kwargs.get("ignore_index", IGNORED_LABEL)
    is_mean = call.kwargs.get("reduction", "mean") == "mean"
    if not is_mean or not isinstance(target, Tensor) or target.is_floating_point():
        return None
    counted = target != ignored
    if weight is None:
        total = counted.sum()
    else:
        total = torch.where(
            counted, weight[target.clamp(min=0)], torch.zeros_like(weight[:1])
        ).sum()
    summed = call.function(*call.args, **{**call.kwargs, "reduction": "sum"})
    return summed / torch.where(total == 0, torch.ones_like(total), total)


def _of_elements(call: Call) -> Tensor | None:
    """Return a mean loss, of no element 0."""
    read = call.read
    if read is None or read.numel() or call.kwargs.get("reduction", "mean") != "mean":
        return None
    return call.function(*call.args, **{**call.kwargs, "reduction": "sum"})


def _ctc(call: Call) -> Tensor | None:
    return call.function(*call.args[:6], **{**call.kwargs, "zero_infinity": True})


def _divergence(call: Call) -> Tensor | None:
    """Return a divergence without a derivative at targets of 0, where that of t log(t) is
    infinite.
    """
    target = call.argument(1, "target")
    is_number = isinstance(target, Tensor) and target.is_floating_point()
    if not is_number or call.kwargs.get("log_target"):
        return None
    kept = torch.where(target == 0, target.detach(), target)
    if len(call.args) > 1:
        return call.function(call.args[0], kept, *call.args[2:], **call.kwargs)
    return call.function(*call.args, **{**call.kwargs, "target": kept})


LOSSES: Mapping[str, Callable[[Call], Any]] = {
    **dict.fromkeys(("cross_entropy", "nll_loss"), _labelled),
    **dict.fromkeys(LOSSES_OF_ELEMENTS, _of_elements),
    "ctc_loss": _ctc,
    "kl_div": _divergence,
}
