"""Sums that are kept in half precision, one term after the other, and lose what is added.

Beyond 256 ones, one more is nothing in bfloat16. What such a chain of additions has lost is
measured: its terms are added up in float64 beside it. A residual stream is a chain as well, whose
roundings cancel out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanstop.numerics.tensors import HALF, format_name
from nanstop.records import LostSumRow
from nanstop.tracing.op_patches import LookOfSome
from nanstop.tracing.places import line_text
from nanstop.tracing.record_step import first_ops

if TYPE_CHECKING:
    from nanstop.replay.step import Step

LEAST_TERMS = 32
LOST = 0.1
"""Share of a sum: roundings that fall either way cost a hundredth of it."""
MOST_CHAINS, MOST_ELEMENTS = 8, 1 << 16


@dataclass(slots=True)
class _Chain:
    """One sum so far: as it is kept, and as it is. ``index``: of its last addition."""

    kept: Tensor
    exact: Tensor
    num_terms: int
    index: int


class RunningSums(LookOfSome):
    """Keeps the sums of half precision that are made term by term.

    Reads both operands of such additions, and synchronises the device at them.
    """

    ops = frozenset({"add", "add_"})

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[int, torch.Size], _Chain] = OrderedDict()

    def __call__(
        self, index: int, _func: Any, args: Any, kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        if kwargs or len(args) != 2 or not _is_term(args[0], args[1]):
            return None
        first, second = args[0].detach(), args[1].detach()
        chain = self._taken(first)
        if chain is None:
            chain, first, second = self._taken(second), second, first
        exact = first.double() if chain is None else chain.exact
        num_terms = 1 if chain is None else chain.num_terms
        exact = exact + second.double()

        def done(result: Any) -> None:
            kept = result.detach()
            self._open[_place(kept)] = _Chain(kept.clone(), exact, num_terms + 1, index)
            short = [key for key, one in self._open.items() if one.num_terms < LEAST_TERMS]
            for key in short[: max(0, len(self._open) - MOST_CHAINS)]:
                del self._open[key]

        return done

    def _taken(self, operand: Tensor) -> _Chain | None:
        """Return the chain whose sum an operand is, and let go of it."""
        chain = self._open.get(_place(operand))
        if chain is None or not torch.equal(chain.kept, operand):
            return None
        return self._open.pop(_place(operand))

    def lost(self) -> dict[int, tuple[int, float]]:
        """Return (number of terms, share lost) of each sum that lost ``LOST`` of it or more, by the
        index of its last operation.
        """
        found: dict[int, tuple[int, float]] = {}
        for chain in self._open.values():
            if chain.num_terms >= LEAST_TERMS:
                size = float(chain.exact.abs().mean())
                gap = float((chain.kept.double() - chain.exact).abs().mean())
                if size > 0.0 and gap >= LOST * size:
                    found[chain.index] = chain.num_terms, gap / size
        return found


def lost_sum_rows(step: Step, sums: RunningSums) -> tuple[LostSumRow, ...]:
    """Return the sums that have lost much of what was added. Undone bitwise; runs the first
    micro-batch once more where there is one.
    """
    lost = sums.lost()
    if not lost:
        return ()
    ops = first_ops(step)
    return tuple(
        LostSumRow(
            op=ops[index].name,
            module=ops[index].module,
            dtype=format_name(ops[index].outputs[0].dtype),
            num_terms=num_terms,
            share=share,
            line=line_text(ops[index].line),
        )
        for index, (num_terms, share) in lost.items()
    )


def _is_term(first: Any, second: Any) -> bool:
    both = isinstance(first, Tensor) and isinstance(second, Tensor)
    if not both or first.shape != second.shape or first.dtype != second.dtype:
        return False
    return first.dtype in HALF and 0 < first.numel() <= MOST_ELEMENTS


def _place(tensor: Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape
