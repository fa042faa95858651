"""The remedies that are in force in one run, from their adoption to its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from nanstop.records import Atom, Report
from nanstop.records.remedies import not_of_the_model
from nanstop.store.incidents import Store

if TYPE_CHECKING:
    from torch import nn

    from nanstop.remedies.saved_models import SavedModels
    from nanstop.replay.step import ModelView


class Cures:
    """Puts remedies in force, keeps the plan of them, and follows what is saved of the model.

    ``in_force``: those that were adopted for the rest of the run. ``tell``: is told what a person
    must know of saved models, and of a remedy that could not be undone.
    """

    def __init__(self, store: Store, tell: Callable[[str], None]) -> None:
        self.in_force: tuple[Atom, ...] = ()
        self._store, self._tell = store, tell
        self._adopted = ExitStack()
        self._saves: SavedModels | None = None

    def begin(self) -> None:
        """Begin a training: what an earlier one of this model needed is no matter of this one."""
        if self._saves is not None and not self.in_force:
            self._saves.release()

    def adopt(
        self, atoms: tuple[Atom, ...], view: ModelView, root: nn.Module, reports: Sequence[Report]
    ) -> None:
        """Put in force what is not yet so, on the model as ``view`` has it. ``root``: the model
        that is saved; ``reports``: the failures of the run.
        """
        new = tuple(atom for atom in atoms if atom not in self.in_force)
        if not new:
            return
        from nanstop.remedies.lasting import lasting
        from nanstop.remedies.saved_models import SavedModels

        self._adopted.enter_context(lasting(view, new))
        self.in_force += new
        self._store.save_plan(self.in_force)
        if self._saves is None or self._saves.root is not root:
            self._saves = SavedModels(root, self._tell)
        failures = (one.localization.first_bad for one in reports if one.localization is not None)
        self._saves.need(self.in_force, not_of_the_model(self.in_force, failures))

    def saved(self, folder: Path) -> None:
        """Note that weights were saved in a folder."""
        if self._saves is not None:
            self._saves.saved(folder)

    def end(self) -> tuple[Atom, ...]:
        """Return the remedies that were in force to the end of a training, which none is now."""
        kept, self.in_force = self.in_force, ()
        return kept

    def undo(self) -> None:
        """Take back what remedies have changed of the model."""
        try:
            self._adopted.close()
        except Exception as error:
            self._tell(f"a remedy could not be undone ({type(error).__name__}: {error})")

    def needed_by_saved(self) -> str:
        """Return what is to be said of saved models at the end of a run."""
        return self._saves.at_the_end() if self._saves is not None else ""
