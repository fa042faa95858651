"""What other processes have of a window: nothing, or a copy of its model each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from nanstop.decide.agreement import ONE_RANK, Ranks
from nanstop.records import ReplicaFacts, SourceLine


class Replicas(Protocol):
    """The copies of a model, as the process of one of them sees them."""

    @property
    def ranks(self) -> Ranks: ...

    def failed(self) -> bool:
        """Return whether gradients that all ranks share are not finite: every rank says the same,
        without a word. Synchronises the device.
        """
        ...

    def obstacle(self) -> str:
        """Return why gradients cannot be made anew on every rank, or ""."""
        ...

    def alone(self) -> AbstractContextManager[None]:
        """Return a context in which the model is called without the other ranks."""
        ...

    def begin(self) -> None:
        """Have the buffers of the first rank before a window is made anew. Every rank calls it."""
        ...

    def average(self) -> None:
        """Make the gradients the mean of all ranks', as a backward does. Every rank calls it."""
        ...

    def compare(self, step: int) -> ReplicaFacts | None:
        """Return how the copies differ, where that has been found out by now, once and on the first
        rank. Every rank calls it after each backward that has exchanged gradients.
        """
        ...

    def updating(self, optimizer: Any, written_at: tuple[SourceLine, ...]) -> None:
        """Note an update that the copy of this rank is about to get; ``written_at``: lines of the
        script that have written to its gradients.
        """
        ...


class OneCopy:
    """A model that this process alone trains."""

    ranks: Ranks = ONE_RANK

    def failed(self) -> bool:
        return False

    def obstacle(self) -> str:
        return ""

    @contextmanager
    def alone(self) -> Iterator[None]:
        yield

    def begin(self) -> None:
        pass

    def average(self) -> None:
        pass

    def compare(self, step: int) -> ReplicaFacts | None:  # noqa: ARG002
        return None

    def updating(self, optimizer: Any, written_at: tuple[SourceLine, ...]) -> None:
        pass


ONE_COPY = OneCopy()
