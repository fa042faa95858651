"""What stands beside saved weights that need remedies to compute finite: their plan, and a section
of their model card where one is written. No weight is touched, and loading needs none of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from nanstop.errors import NanstopError
from nanstop.records import Atom, PrecisionPlan
from nanstop.records.remedies import describe, of_the_forward
from nanstop.store.files import write_whole
from nanstop.store.plan_file import load_plan, save_plan

PLAN = "nanstop-plan.yaml"
"""The remedies that the run of saved weights was under."""
CARD = "README.md"

_BEGIN, _END = "<!-- nanstop: begin -->", "<!-- nanstop: end -->"
_SECTION = re.compile(rf"\n*{_BEGIN}.*?{_END}\n?", re.DOTALL)

_HOW_TO_LOAD = (
    "Without it the weights beside this file can give NaN or Inf. To load them with it:",
    "    nanstop.load_plan(FOLDER).apply(model)  # the folder of this file",
    "`nanstop export FOLDER --out NEW` writes a checkpoint that computes finite without nanstop.",
)
_NOTE = """\
## Numerical precision

While it was trained, this model computed finite numbers because nanstop had to
{cure}.
Loaded without that it can give NaN or Inf. To load it with that:

```python
import nanstop
nanstop.load_plan(FOLDER).apply(model)  # the folder of this file
```

`nanstop export FOLDER --out NEW` writes a checkpoint that computes finite without nanstop.
"""


def write_beside(folder: Path, atoms: Sequence[Atom], needed: Sequence[Atom] | None = None) -> None:
    """Write the plan of ``atoms`` into the folder of saved weights, and say in its model card what
    of it the model needs: ``needed``, where its training alone needs the others. The plan itself
    says how to load them: a folder without a card gets none, for a card is its author's. Errors:
    ``OSError``.
    """
    needed = of_the_forward(atoms if needed is None else needed)
    plan = PrecisionPlan(remedies=tuple(atoms))
    save_plan(plan, folder / PLAN, _HOW_TO_LOAD if needed else ())
    note_in_card(folder / CARD, needed)


def note_in_card(card: Path, atoms: Sequence[Atom]) -> None:
    """Append what a model needs to a model card that is there, in the place of what an earlier save
    appended. Errors: ``OSError``.
    """
    needed = of_the_forward(atoms)
    if needed and card.is_file():
        append_to_card(card, _NOTE.format(cure=describe(needed)))


def append_to_card(card: Path, section: str) -> None:
    """Have ``section`` at the end of a model card, whose own text stays as it is; an earlier
    section of nanstop's is replaced. Errors: ``OSError``.
    """
    # Bytes that are no UTF-8 are the author's and come out as they went in.
    text = card.read_bytes().decode("utf-8", "surrogateescape")
    text = _SECTION.sub("\n", text).rstrip("\n") if _BEGIN in text else text
    end = "" if not text else "\n" if text.endswith("\n") else "\n\n"
    made = f"{text}{end}{_BEGIN}\n{section}{_END}\n"
    write_whole(card, made.encode("utf-8", "surrogateescape"))


def plan_beside(folder: str | Path | None) -> PrecisionPlan:
    """Return the plan that weights were saved under, an empty one without.

    Errors: ``NanstopError`` if damaged.
    """
    path = Path(folder or "", PLAN)
    return load_plan(path) if folder and path.is_file() else PrecisionPlan()


def plan_in(place: Path) -> Path:
    """Return the file of the plan that a path names: itself, or that of a checkpoint's folder, or
    of a run's. Errors: ``NanstopError`` for a folder without one.
    """
    place = place.expanduser()
    if not place.is_dir():
        return place
    for name in (PLAN, "plan.yaml"):
        if (place / name).is_file():
            return place / name
    raise NanstopError(
        f"{place}: holds no {PLAN}",
        hint="a run in which nothing failed needs none, and writes none",
    )
