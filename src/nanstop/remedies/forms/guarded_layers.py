"""A layer norm with an eps where it was given 0 and a row does not vary."""

from __future__ import annotations

from typing import Any

import torch

from nanstop.remedies.forms.calls import Call

_EPS = 1e-5


def layer_norm(call: Call) -> Any:
    """Return a layer norm with the usual eps for rows that do not vary, and without one for all
    others; None of one that has its own.
    """
    read, shape = call.read, call.argument(1, "normalized_shape")
    if read is None or call.argument(4, "eps", 1.0) != 0.0:
        return None
    dims = tuple(range(-len(shape), 0))
    is_still = read.amax(dims, keepdim=True) == read.amin(dims, keepdim=True)
    ramp = torch.arange(read.shape[dims[0] :].numel(), dtype=read.dtype, device=read.device)
    moving = call.of_another(torch.where(is_still, ramp.view(read.shape[dims[0] :]), read))
    return torch.where(is_still, _with_eps(call), moving)


def _with_eps(call: Call) -> Any:
    if len(call.args) > 4:
        return call.function(*call.args[:4], _EPS, *call.args[5:], **call.kwargs)
    return call.function(*call.args, **{**call.kwargs, "eps": _EPS})
