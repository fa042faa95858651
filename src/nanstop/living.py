"""The objects of this process that are of a class, whoever holds them."""

from __future__ import annotations

import gc
from typing import TypeVar

T = TypeVar("T")


def living(kind: type[T]) -> list[T]:
    """Return the objects of a class, or of one below it, that the garbage collector tracks and has
    not frozen. Walks all of those.
    """
    # Not isinstance, which asks proxies of what is gone by now.
    return [one for one in gc.get_objects() if issubclass(type(one), kind)]
