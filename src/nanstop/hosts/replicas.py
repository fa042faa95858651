"""What other processes have of a window: nothing, or a copy of its model each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from torch import Tensor, nn

from nanstop.decide.agreement import ONE_RANK, Ranks
from nanstop.decide.apart import ByItself
from nanstop.numerics.modules import lies_on_several
from nanstop.records import ReplicaFacts, SourceLine


class Replicas(Protocol):
    """The copies of a model, as the process of one of them sees them."""

    @property
    def ranks(self) -> Ranks: ...

    @property
    def is_whole(self) -> bool:
        """Whether a model of which each process has a part is here as a whole now."""
        ...

    @property
    def goes_back(self) -> bool:
        """Whether all ranks can go back to an earlier update together."""
        ...

    def failed(self, *, mine: bool) -> bool:
        """Return whether a window is to be looked at by all ranks, which each of them calls at its
        end: every rank says the same. ``mine``: whether this one has met a failure. Synchronises
        the device where it has.
        """
        ...

    def by_itself(self, *, asked: bool) -> ByItself:
        """Return what each rank does about a window that fails if they do not meet over it, all of
        them the same, or nothing. ``asked``: what ``failed`` has said. Synchronises the device.
        """
        ...

    def anywhere(self, *, mine: bool) -> bool:
        """Return whether any rank that has a part of the model says so, which all are asked at the
        same place; of a whole one, whether this one does.
        """
        ...

    def parts(self) -> dict[str, Tensor]:
        """Return gradients that an update will be made of and that are no parameter's, as far as
        they are here.
        """
        ...

    def whole(self, ranks: Ranks) -> AbstractContextManager[None]:
        """Return a context in which this process has all of the model, where ``ranks`` have met
        and each has the room. Every one of them enters it.
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

    def compare(self, step: int, terms: str | None) -> ReplicaFacts | None:
        """Return how the copies differ, where that has been found out by now, once and on the first
        rank. Every rank calls it after each backward that has exchanged gradients. ``terms``: see
        ``Terms``.
        """
        ...

    def updating(
        self, optimizer: Any, written_at: tuple[SourceLine, ...], *, is_late: bool
    ) -> None:
        """Note an update that the copy of this rank is about to get; ``written_at``: lines of the
        script that have written to its gradients. ``is_late``: whether the last backward ahead of
        it exchanged nothing, and one before it did.
        """
        ...


class OneCopy:
    """A model that this process alone trains."""

    ranks: Ranks = ONE_RANK
    is_whole = goes_back = False

    def failed(self, *, mine: bool) -> bool:  # noqa: ARG002
        return False

    def by_itself(self, *, asked: bool) -> ByItself:  # noqa: ARG002
        return ""

    def anywhere(self, *, mine: bool) -> bool:
        return mine

    def parts(self) -> dict[str, Tensor]:
        return {}

    def whole(self, ranks: Ranks) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def obstacle(self) -> str:
        return ""

    @contextmanager
    def alone(self) -> Iterator[None]:
        yield

    def begin(self) -> None:
        pass

    def average(self) -> None:
        pass

    def compare(self, step: int, terms: str | None) -> ReplicaFacts | None:  # noqa: ARG002
        return None

    def updating(
        self, optimizer: Any, written_at: tuple[SourceLine, ...], *, is_late: bool
    ) -> None:
        pass


ONE_COPY = OneCopy()


def is_here(root: nn.Module, replicas: Replicas) -> bool:
    """Return whether a model, without what it is wrapped in, is run by this process alone: its
    weights do not lie on several, or are all here now.
    """
    return replicas.is_whole or not lies_on_several(root)
