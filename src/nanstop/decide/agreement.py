"""What processes that train together say to each other before any of them acts.

Every rank comes to each question, in the same order, or none acts: one that does not come leaves
the agreement broken for the rest of the run, for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from nanstop.errors import NanstopError

T = TypeVar("T")


class Ranks(Protocol):
    """The processes that train together. ``rank``: this one's number of ``size``."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, question: str, answer: str, *, patient: bool = False) -> tuple[str, ...]:
        """Return what each rank answers, in order of ranks.

        ``patient``: one of them has much to do before it answers. Errors: ``NanstopError`` where
        one does not come in time, has left, or was asked something else.
        """
        ...

    def leave(self, reason: str) -> None:
        """Take no part any more; the others learn why. Raises nothing."""
        ...


class OneRank:
    """A process that trains by itself."""

    rank = 0
    size = 1

    def gather(self, question: str, answer: str, *, patient: bool = False) -> tuple[str, ...]:  # noqa: ARG002
        return (answer,)

    def leave(self, reason: str) -> None:
        pass


ONE_RANK = OneRank()


def on_every_rank(ranks: Ranks, question: str, work: Callable[[], T]) -> T:
    """Return what ``work`` does on this rank, once it is done on every one.

    Errors: what ``work`` raises; ``NanstopError`` where it raised on another rank.
    """
    try:
        result, failure = work(), None
    except Exception as error:  # whatever it is, the others must not wait for this rank
        result, failure = None, error
    said = "" if failure is None else f"{type(failure).__name__}: {failure}"
    answers = ranks.gather(question, said)
    if failure is not None:
        raise failure
    other = next((f"rank {at}: {said}" for at, said in enumerate(answers) if said), "")
    if other:
        raise NanstopError(other)
    return result  # pyright: ignore[reportReturnType]  (None only with a failure)
