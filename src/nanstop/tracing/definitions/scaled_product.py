"""The product of 8-bit floats by its definition in plain operations: its operands are numbers times
a scale, and only its result is in a format of training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nanstop.numerics.tensors import has_float64, widened

_TENSOR, _ROW, _SPAN, _TILE = 0, 1, 4, 5
"""How ``torch.nn.functional.ScalingType`` numbers one scale for all, one a row, one for 128 numbers
of a row, one for a tile of 128 x 128.
"""


def scaled_product(
    func: Any, args: Any, kwargs: Mapping[str, Any], *, own_format: bool = False
) -> list[Tensor]:
    """Return the results of an operation by its definition: in a format wider than its own, or
    with ``own_format`` rounded to that; nothing where it has none here. Raises what torch raises.

    Source: the documentation of ``torch.nn.functional.scaled_mm``.
    """
    name = str(func).split(".")[1] if "." in str(func) else ""
    given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | dict(
        kwargs
    )
    if name == "_scaled_mm" and given.get("scale_result") is None:
        scales = given["scale_a"], given["scale_b"]
    elif name == "_scaled_mm_v2" and _is_plain(given):
        scales = given["scale_a"][0], given["scale_b"][0]
    else:
        return []
    narrow = given.get("out_dtype") or given["self"].dtype
    result = narrow if own_format else widened({narrow})[narrow]
    return [product.to(result) for product in _product(given, *scales)]


def _is_plain(given: Mapping[str, Any]) -> bool:
    """Return whether each operand has scales of one kind, in the order of its numbers."""
    kinds = {_TENSOR, _ROW, _SPAN, _TILE}
    operands = ("a", "b")
    one_each = all(len(given[f"scale_{which}"]) == 1 for which in operands)
    in_order = not any(any(given[f"swizzle_{which}"]) for which in operands)
    return one_each and in_order and kinds.issuperset(given["recipe_a"] + given["recipe_b"])


def _product(given: Mapping[str, Any], scale_a: Tensor, scale_b: Tensor) -> list[Tensor]:
    """Return the product [m, n] of scaled 8-bit floats [m, k] and [k, n], in float64."""
    left, right, bias = given["self"], given["mat2"], given.get("bias")
    of_left, of_right = _spread(scale_a, left), _spread(scale_b, right)
    if of_left is None or of_right is None or not has_float64(left.device):
        return []
    product = (left.double() * of_left) @ (right.double() * of_right)
    return [product if bias is None else product + bias]


def _spread(scale: Tensor, over: Tensor) -> Tensor | None:
    """Return a scale in a shape that goes with its operand [rows, columns]: one number, or one for
    each part of equal size along both; None where it is laid out in another way.
    """
    if scale.dtype is not torch.float32:
        return None
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.dim() != 2 or any(
        whole % parts for whole, parts in zip(over.shape, scale.shape, strict=True)
    ):
        return None
    for axis, whole in enumerate(over.shape):
        scale = scale.repeat_interleave(whole // scale.shape[axis], axis)
    return scale
