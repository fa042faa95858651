"""Which rows of an embedding or head look as if never trained, from their norms and the
direction that rows share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from nanstop.records import TokenRows

FAR = 8.0
"""A row whose norm is this many times the median, or its inverse, was not trained with the
others.
"""
OFF = 2.0
"""Last rows whose norms are this many times the median, or its inverse, were perhaps added:
their direction tells.
"""
SHARED, LOST = 0.6, 0.4
"""Cosines to the common direction:
each trained row has at least the first, an added one at most the second.

Of rows drawn at random they are about the inverse root of the width: 0.13 at 64, 0.02 at 4096.
"""
MIN_ROWS = 8
"""Fewer rows than these, or as many, are no table of tokens."""
MAX_LISTED = 4096

_BLOCK_ELEMENTS = 2**20

Blocks = Callable[[], Iterable[Tensor]]


def row_blocks(weight: Tensor) -> tuple[Tensor, ...]:
    """Return a table [rows, width] as views of whole rows, at most 2**20 elements each."""
    return weight.detach().split(max(1, _BLOCK_ELEMENTS // max(1, weight.shape[1])))


def row_norms(block: Tensor) -> Tensor:
    """Return the 2-norm of each row, float32, on the block's device."""
    return torch.linalg.vector_norm(block.float(), dim=1)


def token_rows(
    name: str,
    norms: Tensor,
    blocks: Blocks,
    *,
    padding: int | None = None,
    tied: bool = False,
    trainable: bool = False,
) -> TokenRows:
    """Return the rows of a table that are zero, whose norm is far off the median of all, or which
    were added as noise.

    ``norms``: of every row, float32 on the host. ``blocks()``: the table again, block by block;
    asked for only where rows are far off. ``padding``: a row that is zero by design
    (torch.nn.Embedding keeps it so).
    """
    zero, far, median = untrained(norms, blocks, padding=padding)
    return TokenRows(
        parameter=name,
        num_rows=len(norms),
        zero_rows=tuple(zero.nonzero().flatten().tolist()[:MAX_LISTED]),
        outlier_rows=tuple(far.nonzero().flatten().tolist()[:MAX_LISTED]),
        median_norm=median,
        tied=tied,
        trainable=trainable,
    )


def untrained(
    norms: Tensor, blocks: Blocks, *, padding: int | None = None
) -> tuple[Tensor, Tensor, float]:
    """Return which rows of a table are zero, which are far off or noise (bool, as ``norms``), and
    the median norm.

    For the arguments see ``token_rows``. Rows that hold a NaN are neither.
    """
    usual = norms[norms.isfinite() & (norms > 0)]
    median = float(usual.median()) if usual.numel() else 0.0
    zero = norms == 0
    if padding is not None and 0 <= padding < len(zero):
        zero[padding] = False
    far = ((norms > FAR * median) | (norms < median / FAR)) & (norms != 0)
    far &= ~_like_the_mean(norms, far, blocks)
    known = norms.isfinite() & (norms > 0) & ~far
    if padding is not None and 0 <= padding < len(known):
        known[padding] = False
    return zero, far | _added_as_noise(norms, known, median, blocks), median


def _like_the_mean(norms: Tensor, far: Tensor, blocks: Blocks) -> Tensor:
    """Return which of the short rows in ``far`` are the mean of the table:
    new tokens that were initialised well.

    ``resize_token_embeddings`` does so, and the mean of rows in all directions is shorter than any
    of them.
    """
    short = far & norms.isfinite()
    trained = ~far & (norms > 0)
    if not short.any() or not trained.any():
        return torch.zeros_like(far)
    mean = _sum_of(trained, blocks) / int(trained.sum())
    apart = [torch.linalg.vector_norm(block.float() - mean, dim=1).cpu() for block in blocks()]
    return short & (torch.cat(apart) <= 0.5 * torch.linalg.vector_norm(mean).cpu())


def _added_as_noise(norms: Tensor, known: Tensor, median: float, blocks: Blocks) -> Tensor:
    """Return which of the last rows in ``known`` lack the direction that all others there share.

    States of a trained model lean one way, and the rows of its head lean against it: the logits of
    all tokens are low, and that of a row of noise, about 0, beats them. Norms alone say too little,
    they vary among trained rows.
    """
    none = torch.zeros_like(known)
    last = _last_run(known, (norms > OFF * median) | (norms < median / OFF))
    others = known & ~last
    if not last.any() or int(others.sum()) <= MIN_ROWS:
        return none
    total = _sum_of(others, blocks)
    number, squares = int(others.sum()), float(norms[others].square().sum())
    # A row's product with itself is no sign of a shared direction:
    # it is left out of the length of the mean.
    length = (float(total.square().sum()) - squares) / (number * (number - 1))
    if length < (0.5 * SHARED * median) ** 2:
        return none
    products = torch.cat([(block.float() @ total).cpu() for block in blocks()])
    rest = (products - norms.square() * others) / (number - others.int())
    cosines = rest / (norms * length**0.5)
    if float(cosines[others].min()) < SHARED:
        return none
    return last & (cosines.abs() <= LOST)


def _last_run(known: Tensor, odd: Tensor) -> Tensor:
    """Return which known rows are odd and come after the last known one that is not."""
    ordinary = (known & ~odd).nonzero().flatten()
    run = known & odd
    if ordinary.numel():
        run[: int(ordinary[-1]) + 1] = False
    return run


def _sum_of(chosen: Tensor, blocks: Blocks) -> Tensor:
    """Return the sum of the chosen rows, float32, on the device of the blocks."""
    total, first = torch.zeros(()), 0
    for block in blocks():
        inside = chosen[first : first + len(block)].to(block.device)
        total, first = total.to(block.device) + block[inside].float().sum(0), first + len(block)
    return total
