"""Which operations compute the same thing in other words."""

from __future__ import annotations

import re

SAME = (
    frozenset(("div", "true_divide", "reciprocal", "pow", "divide")),
    frozenset(("sqrt", "rsqrt", "pow", "reciprocal", "div")),
    frozenset(("square", "pow", "mul")),
    frozenset(("mean", "sum", "div", "nll_loss", "mse_loss")),
    frozenset(("mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "einsum", "dot", "mv")),
    frozenset(("softmax", "safe_softmax", "exp", "sub", "logsumexp")),
    frozenset(("log_softmax", "sub", "logsumexp")),
    frozenset(("nll_loss", "nll_loss2d", "cross_entropy", "mean", "div")),
    frozenset(("where", "masked_fill")),
    frozenset(("norm", "linalg_vector_norm", "div", "clamp", "clamp_min")),
    frozenset(("log_sigmoid", "softplus", "neg", "log_sigmoid_forward")),
)
"""Operations that may stand for each other; one may be in several rows."""
_ENDS = ("_backward", "_forward", "_data")


def base(op: str) -> str:
    """Return the name of an operation, or of a pattern of them, without library and overload:
    ``mul`` of ``aten.mul_.Tensor``, ``nll_loss`` of ``aten.nll_loss*``.
    """
    name = re.sub(r"^\w+\.", "", op).split(".", 1)[0].strip("*_")
    name = name.removeprefix("_foreach_").removeprefix("foreach_")
    for end in _ENDS:
        name = name.removesuffix(end)
    return name


def same_operation(one: str, other: str) -> bool:
    """Return whether two operations compute the same, or are spellings of one thing."""
    names = {base(one), base(other)}
    return len(names) == 1 or any(names <= family for family in SAME)
