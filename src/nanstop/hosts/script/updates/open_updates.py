"""The updates that have begun and not ended: one may make others by itself."""

from __future__ import annotations

from torch.optim import Optimizer

from nanstop.hosts.loop.held_update import is_called_by_its_own
from nanstop.hosts.script.updates.closures import Closures, OpenUpdate
from nanstop.tracebacks import passes_through

__tracebackhide__ = passes_through


class OpenUpdates:
    """``closures``: hears of updates that begin inside of another."""

    def __init__(self, closures: Closures) -> None:
        self._closures = closures
        self.updates: list[OpenUpdate] = []
        self.inherits = False
        """Whether a step has called that of a class above its own."""

    def of(self, optimizer: Optimizer) -> OpenUpdate | None:
        """Return the update of an optimizer, None where none is open."""
        return next((one for one in self.updates if one.optimizer is optimizer), None)

    @property
    def outer(self) -> OpenUpdate | None:
        """The update that makes others by itself now, None where none does."""
        latest = self.updates[-1] if self.updates else None
        return latest if latest is not None and not latest.evaluates else None

    def begin(self, optimizer: Optimizer) -> tuple[OpenUpdate, OpenUpdate | None]:
        """Return an update that begins, and the one that makes it; one of this optimizer that never
        ended has raised.
        """
        places = [at for at, one in enumerate(self.updates) if one.optimizer is optimizer]
        raised = self.updates[places[0] if places else len(self.updates) :]
        for one in raised:
            one.held.give_back_step()
            if one.awaited is not None:
                one.awaited.gated.end()
        del self.updates[len(self.updates) - len(raised) :]
        outer = self.outer
        if outer is not None:
            self._closures.begin_inside(outer, optimizer)
        update = OpenUpdate(optimizer)
        self.updates.append(update)
        return update, outer

    def end(self, optimizer: Optimizer) -> OpenUpdate:
        """Return the update that has ended, and let go of it; one that began unseen is new."""
        places = [at for at, one in enumerate(self.updates) if one.optimizer is optimizer]
        update = self.updates[places[-1]] if places else OpenUpdate(optimizer)
        del self.updates[places[-1] if places else len(self.updates) :]
        return update

    def begins_inherited(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer's step has called that of a class which its own inherits
        from: torch has wrapped both where it has met instances of both.
        """
        update = self.of(optimizer)
        if update is None or not is_called_by_its_own(optimizer):
            return False
        update.num_inside += 1
        self.inherits = True
        return True

    def ends_inherited(self, optimizer: Optimizer) -> bool:
        """Return whether it is such a step that has ended."""
        update = self.of(optimizer)
        if update is None or not update.num_inside:
            return False
        update.num_inside -= 1
        return True
