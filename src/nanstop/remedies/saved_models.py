"""What is saved of a model whose run needed remedies says so, and how to load it.

``save_pretrained`` of the model, and of each part that has one, writes the plan beside the weights
when it has written these; ``push_to_hub`` has them and their card looked at before it uploads them.
The stand-ins are on the instances, and no copy of the model has them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from nanstop.records import Atom
from nanstop.records.remedies import describe, of_the_forward
from nanstop.replay.stand_in import standing_in
from nanstop.store.beside_weights import write_beside
from nanstop.tracebacks import passes_through
from nanstop.wording import typed

__tracebackhide__ = passes_through

_SAVE, _UPLOAD = "save_pretrained", "_upload_modified_files"


class SavedModels:
    """Follows the saves of one model from the first remedy of a run on, also after its end: what a
    script saves last is what is loaded elsewhere.
    """

    def __init__(self, root: nn.Module, tell: Callable[[str], None]) -> None:
        self._root = weakref.ref(root)
        self._tell = tell
        self._atoms: tuple[Atom, ...] = ()
        self._of_loss: tuple[Atom, ...] = ()
        self._undo = ExitStack()
        self._told: set[tuple[Atom, ...]] = set()
        self._last = ""
        # Left to the end of the interpreter, stand-ins would be taken away when their modules are
        # gone.
        self._at_exit = weakref.finalize(root, _release, weakref.ref(self))

    @property
    def root(self) -> nn.Module | None:
        """The model that is followed, None when it is gone."""
        return self._root()

    def need(self, atoms: Sequence[Atom], of_loss: Sequence[Atom] = ()) -> None:
        """From here on, what is saved needs ``atoms``, in the place of what it needed before.

        ``of_loss``: those of them that its training alone needs.
        """
        self._of_loss = tuple(of_loss)
        root = self.root
        if not self._atoms and root is not None:
            for name, part in root.named_modules():
                for call in (_SAVE, _UPLOAD):
                    if callable(getattr(type(part), call, None)):
                        followed = self._followed(part, name, call)
                        self._undo.enter_context(standing_in(part, call, followed))
        self._atoms = tuple(atoms)

    def saved(self, folder: str | Path, part: str = "") -> None:
        """Write the plan beside weights that were saved of the model, or of a part of it.

        Where that fails it is told, and the save stays as it is.
        """
        atoms = tuple(_within(part, self._atoms))
        if not atoms or not Path(folder).is_dir():
            return
        needed = self._needed(atoms)
        try:
            write_beside(Path(folder), atoms, needed)
        except Exception as error:  # nanstop is never the reason a save fails
            self._tell(f"no plan was written beside {folder} ({type(error).__name__}: {error})")
            return
        self._last = str(folder) if needed else self._last
        if needed and needed not in self._told:
            self._told.add(needed)
            self._tell(
                f"saved in {folder}: to compute finite, whoever loads it has to "
                f"{describe(needed)}; {_how(str(folder))}"
            )

    def at_the_end(self) -> str:
        """Return what to add to what kept the run finite, "" where no loaded model needs it."""
        if not self._needed(self._atoms):
            return ""
        last = self._last if Path(self._last).is_dir() else ""  # a push saves into one of its own
        return f"; what is saved of the model needs that too: {_how(last or 'FOLDER')}"

    def _needed(self, atoms: Sequence[Atom]) -> tuple[Atom, ...]:
        return of_the_forward(atom for atom in atoms if atom not in self._of_loss)

    def release(self) -> None:
        """Follow no more saves. Calling it again does nothing."""
        self._atoms = ()
        self._undo.close()
        self._undo = ExitStack()

    def _followed(self, module: nn.Module, name: str, call: str) -> Callable[..., Any]:
        original: Any = getattr(module, call)

        @functools.wraps(original)
        def save_pretrained(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            folder = args[0] if args else kwargs.get("save_directory")
            if folder is not None and kwargs.get("is_main_process", True):
                self.saved(folder, name)
            return found

        @functools.wraps(original)
        def upload(*args: Any, **kwargs: Any) -> Any:
            # transformers writes the card of what it pushes behind the weights.
            folder = args[0] if args else kwargs.get("working_dir")
            if folder is not None:
                self.saved(folder, name)
            return original(*args, **kwargs)

        return save_pretrained if call == _SAVE else upload


def _release(saves: weakref.ref[SavedModels]) -> None:
    followed = saves()
    if followed is not None:
        followed.release()


def _within(part: str, atoms: Sequence[Atom]) -> Iterator[Atom]:
    """Yield atoms as a part of the model names their modules, without those of other parts."""
    for atom in atoms:
        if not part or atom.remedy != "island" or not atom.target:
            yield atom
        elif atom.target.startswith(f"{part}."):
            yield replace(atom, target=atom.target.removeprefix(f"{part}."))
        elif atom.target == part:
            yield replace(atom, target="")


def _how(folder: str) -> str:
    return (
        f'nanstop.load_plan("{folder}").apply(model) after loading does, and `nanstop export '
        f"{typed(folder)} --out NEW` writes one that needs no nanstop"
    )
