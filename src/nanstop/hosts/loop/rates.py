"""The learning rates of an optimizer, which a schedule has changed by the time a window is run
again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer


def learning_rates(optimizer: Optimizer | None) -> tuple[Any, ...]:
    """Return the learning rate of each group."""
    groups = optimizer.param_groups if optimizer is not None else ()
    return tuple([group.get("lr") for group in groups])


@contextmanager
def at_rates(
    optimizer: Optimizer | None, rates: Sequence[Any], usual: Collection[tuple[Any, ...]]
) -> Iterator[None]:
    """Have an optimizer at its rates of a window. A rate that no window of this run had (``usual``)
    is a remedy's; it stays.
    """
    present = learning_rates(optimizer)
    if present in usual:
        set_learning_rates(optimizer, rates)
    try:
        yield
    finally:
        set_learning_rates(optimizer, present)


def set_learning_rates(optimizer: Optimizer | None, rates: Sequence[Any]) -> None:
    """Give each group its learning rate.

    Those that were added after the rates were noted keep theirs.
    """
    if optimizer is not None:
        for group, rate in zip(optimizer.param_groups, rates, strict=False):
            group["lr"] = rate
