"""A micro-batch of a loop without a trainer: what was noted of it, so that it can be run again."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, Protocol

from torch import Tensor

from nanstop.errors import NanstopError
from nanstop.replay.rng import RngState, note_rng
from nanstop.replay.step import Batch
from nanstop.tracing.places import Line


class Micro(Protocol):
    """A micro-batch.

    What it was given, the raw loss it gave (None where it raised), and how to run it again.
    """

    loss: Tensor | None
    reduced: bool
    """Whether its backward ended with every rank's gradients."""

    @property
    def batch(self) -> Batch: ...

    @property
    def rng(self) -> RngState: ...

    @property
    def calls_script(self) -> bool:
        """See ``replay.step.Step``."""
        ...

    def obstacle(self) -> str:
        """Return why it cannot be run again exactly, or ""."""
        ...

    def rerun(self, batch: Batch | None) -> Tensor:
        """Run forward and backward again from the present random state; gradients are added."""
        ...

    def leaves(self) -> Iterable[Tensor]:
        """Return tensors of the script, parameters or not, that its backward may give a
        gradient.
        """
        ...

    def cuts(self) -> list[Line]:
        """Return the lines at which the loss leaves its graph, as far as its calls were
        recorded.
        """
        ...


class UnseenMicro:
    """Stands for gradients whose making was not seen, or cannot be repeated.

    ``autograd.grad``, a loss without a model call. ``seen``: what was seen of it.
    """

    calls_script = False
    reduced = False

    def __init__(
        self, reason: str, loss: Tensor | None = None, *, seen: Micro | None = None
    ) -> None:
        self._seen = seen
        self.loss = loss
        self.rng = note_rng()
        self._reason = reason

    @property
    def batch(self) -> Batch:
        return {} if self._seen is None else self._seen.batch

    def obstacle(self) -> str:
        return self._reason

    def rerun(self, batch: Batch | None) -> Tensor:
        del batch  # never reached: there is an obstacle
        raise NanstopError(self._reason, code="NS000")

    def leaves(self) -> Iterable[Tensor]:
        return ()

    def cuts(self) -> list[Line]:
        return []


def called_beside(micro: Micro) -> SimpleNamespace:
    """Return what holds the script's functions that a run calls beside its models."""
    hooks: Any = getattr(micro, "hooks", ()) if getattr(micro, "is_hooked", False) else ()
    return SimpleNamespace(hooks=hooks, functions=getattr(micro, "functions", ()))
