"""What the end of a window needs of a host, and of its windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from nanstop.decide.decision import Decision
from nanstop.detect.sentinel import Reading
from nanstop.detect.signals import Alarm
from nanstop.hosts.replicas import Replicas
from nanstop.hosts.window.remedies import WindowRemedies
from nanstop.records import Atom, RunFacts, SourceLine
from nanstop.replay.step import Step


class HostStep(Step, Protocol):
    """A window of a host."""

    @property
    def remedies(self) -> WindowRemedies: ...

    @property
    def past(self) -> str:
        """What becomes of leaving its update out where that cannot be done as a whole, or ""."""
        ...

    @property
    def rewritten_at(self) -> Callable[[], tuple[SourceLine, ...] | None]:
        """Returns the lines of the script that have written to its gradients between their
        backward and now (noise, a scale undone by hand), as far as they are known; None where none
        has. Gradients made anew would lack that.
        """
        ...

    @property
    def replicas(self) -> Replicas:
        """The copies of the model that other processes hold."""
        ...

    def for_looks(self) -> Step:
        """Return the step as looks at a healthy window run it."""
        ...

    def obstacle(self) -> str:
        """Return why it cannot be run again as a whole, or ""."""
        ...

    def set_rates(self) -> None:
        """Give the optimizer the learning rates that this window had."""
        ...


class WindowHost(Protocol):
    """What only a host knows to do about its windows."""

    @property
    def session(self) -> Any: ...

    @property
    def facts(self) -> RunFacts: ...

    def alarm_of(self, step: Any, reading: Reading) -> Alarm | None:
        """Return what a reading says is wrong, its loss scaler's everyday work excepted."""
        ...

    def redo(self, step: Any, atoms: Mapping[int, tuple[Atom, ...]]) -> None:
        """Make the window's gradients anew, each micro-batch under its remedies.

        Raises what stands in the way.
        """
        ...

    def update_anew(self, steps: Sequence[Any]) -> None:
        """Apply the updates of some windows again, for good."""
        ...

    def leave_out(self, step: Any) -> None:
        """Have the host go on without this update."""
        ...

    def stop(self, decision: Decision) -> None:
        """Have the host end the training, by its own door or by ``TrainingStopped``."""
        ...
