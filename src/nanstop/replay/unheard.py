"""What a repetition of a step warns of has been said by its first run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def unheard() -> Iterator[None]:
    """Show no warnings inside.

    Filters stay as they are: ``warnings.catch_warnings`` would make Python forget which warnings were shown before
    (https://github.com/python/cpython/issues/73858), so that the run would show each of them again.
    """
    shown = warnings.showwarning

    def ignore(*args: Any, **kwargs: Any) -> None:
        pass

    warnings.showwarning = ignore
    try:
        yield
    finally:
        warnings.showwarning = shown
