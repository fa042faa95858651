"""Which rows of an embedding or head look as if never trained, from their norms."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from nanstop.records import TokenRows

FAR = 8.0
"""A row whose norm is this many times the median, or its inverse, was not trained with the others."""
MIN_ROWS = 8
"""Fewer rows than these, or as many, are no table of tokens."""
MAX_LISTED = 64

_BLOCK_ELEMENTS = 2**20

Blocks = Callable[[], Iterable[Tensor]]


def row_blocks(weight: Tensor) -> tuple[Tensor, ...]:
    """Return a table in blocks of whole rows, without copies."""
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
    """Return the rows of a table that are zero, or whose norm is far off the median of all.

    ``norms``: of every row, float32 on the host. ``blocks()``: the table again, block by block; asked for only where
    rows are far off. ``padding``: a row that is zero by design (torch.nn.Embedding keeps it so).
    """
    usual = norms[norms.isfinite() & (norms > 0)]
    median = float(usual.median()) if usual.numel() else 0.0
    zero = norms == 0
    if padding is not None and 0 <= padding < len(zero):
        zero[padding] = False
    far = ((norms > FAR * median) | (norms < median / FAR)) & (norms != 0)
    far &= ~_like_the_mean(norms, far, blocks)
    return TokenRows(
        parameter=name,
        num_rows=len(norms),
        zero_rows=tuple(zero.nonzero().flatten().tolist()[:MAX_LISTED]),
        outlier_rows=tuple(far.nonzero().flatten().tolist()[:MAX_LISTED]),
        median_norm=median,
        tied=tied,
        trainable=trainable,
    )


def _like_the_mean(norms: Tensor, far: Tensor, blocks: Blocks) -> Tensor:
    """Return which of the short rows in ``far`` are the mean of the table: new tokens that were initialised well.

    ``resize_token_embeddings`` does so, and the mean of rows in all directions is shorter than any of them.
    """
    short = far & norms.isfinite()
    trained = ~far & (norms > 0)
    if not short.any() or not trained.any():
        return torch.zeros_like(far)
    total, first = 0.0, 0
    for block in blocks():
        inside = trained[first : first + len(block)].to(block.device)
        total, first = total + block[inside].float().sum(0), first + len(block)
    mean = total / int(trained.sum())
    apart = [torch.linalg.vector_norm(block.float() - mean, dim=1).cpu() for block in blocks()]
    return short & (torch.cat(apart) <= 0.5 * torch.linalg.vector_norm(mean).cpu())
