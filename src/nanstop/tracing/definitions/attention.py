"""Fused attention by its definition: what its kernels have to come to, forward and backward.

softmax(q kᵀ s + mask) v, and the derivatives of that (Dao et al. 2022, arXiv 2205.14135, B.2); of a
dropout inside nothing is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

FUSED_ATTENTION = "_scaled_dot_product"
"""What the names of its operations begin with."""
Cast = Callable[[Tensor], Tensor]


def defined(
    func: Any, args: Any, kwargs: Mapping[str, Any]
) -> Callable[[Cast], list[Tensor]] | None:
    """Return what computes a fused attention or its backward from its operands, each as a cast
    makes it: the output, or the gradients of query, key and value, in the format of these; None for
    any other operation.

    Holds scores [batch, heads, queries, keys] a few times.
    """
    given = _named(func, args, kwargs)
    if FUSED_ATTENTION not in str(func) or not {"query", "key", "value"} <= set(given):
        return None
    grad = given.get("grad_out", given.get("grad_out_"))
    mask = given.get("attn_mask", given.get("attn_bias"))
    mask = mask if mask is not None and mask.numel() else None
    causal, scale = bool(given.get("is_causal", False)), given.get("scale")

    def run(cast: Cast) -> list[Tensor]:
        query, key, value = (cast(given[name]) for name in ("query", "key", "value"))
        added = cast(mask) if mask is not None and mask.is_floating_point() else mask
        if grad is not None:
            return _gradients(cast(grad), query, key, value, added, causal=causal, scale=scale)
        plain = torch.ops.aten._scaled_dot_product_attention_math
        grouped = query.shape[-3] != key.shape[-3]
        out = plain(query, key, value, added, 0.0, causal, scale=scale, enable_gqa=grouped)
        return [out[0]]

    return run


def _gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    scale: float | None,
) -> list[Tensor]:
    """Return the gradients of query, key and value: in float32 or wider in between, as kernels keep
    it, and rounded to the format of the operands at the end.
    """
    dtype = query.dtype
    wide = torch.promote_types(dtype, torch.float32)
    num_groups = query.shape[-3] // key.shape[-3]
    query, grad = query.to(wide), grad.to(wide)
    key, value = (one.to(wide).repeat_interleave(num_groups, -3) for one in (key, value))
    factor = scale if scale is not None else 1.0 / math.sqrt(query.shape[-1])
    scores = query @ key.mT * factor
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask.to(wide)
    weights = scores.softmax(-1)
    of_weights = grad @ value.mT
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    of_key, of_value = (
        one.unflatten(-3, (-1, num_groups)).sum(-3)
        for one in (of_scores.mT @ query * factor, weights.mT @ grad)
    )
    return [one.to(dtype) for one in (of_scores @ key * factor, of_key, of_value)]


def _named(func: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an operation was given, by the names of its schema."""
    names = [argument.name for argument in func._schema.arguments]
    return dict(zip(names, args, strict=False)) | dict(kwargs)
