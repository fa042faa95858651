"""What nanstop answered of a run, and what of it a variant changed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scoreboard_runs import Run, record_of

from variants.operations import same_operation
from variants.plain import without
from variants.script import Variant

_LINE = re.compile(r"(?P<file>[^\s:]+\.py):(?P<line>\d+)")


@dataclass(frozen=True)
class Answer:
    """What was said first of a run. ``answers``: all codes with their confidence, the main first.

    ``op``: in backward the operation whose derivative it is. ``line``: file and number.
    ``samples``: rows of the batch, of ``num_rows``; empty where none is named.
    """

    answers: tuple[tuple[str, str], ...] = ()
    op: str = ""
    module: str = ""
    step: int | None = None
    micro: int | None = None
    samples: tuple[int, ...] = ()
    num_rows: int | None = None
    line: tuple[str, int] | None = None
    failed: str = ""

    @property
    def code(self) -> str:
        return self.answers[0][0] if self.answers else ""

    @property
    def certain(self) -> tuple[str, ...]:
        return tuple(code for code, sure in self.answers if sure == "certain")


def read_answer(run: Run, folder: Path) -> dict[str, Any]:
    """Return what a run under ``nanstop run`` said, as keywords of ``Answer``."""
    said = record_of(run, folder)["said"]
    place = said["modules"][0] if said["modules"] else ""
    line = _LINE.fullmatch(place)  # of a finding that is of no module
    found = Answer(
        answers=tuple((code, sure) for code, sure in said["answers"]),
        op=said["ops"][0] if said["ops"] else "",
        module="" if line else place,
        step=said["step"],
        micro=said["micro"],
        line=(line["file"], int(line["line"])) if line else None,
        failed=said["failed"],
    )
    return asdict(found) | _where(folder / "found" / "0000" / "report.json")


def _where(path: Path) -> dict[str, Any]:
    """Return line, operation and rows of an incident, which the summary does not have."""
    try:
        report = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    located = report.get("localization") or {}
    bad = located.get("first_bad") or {}
    source, shape = bad.get("source") or {}, report["incident"]["facts"].get("batch_shape")
    samples = (one["sample"] for one in located.get("positions") or ())
    found: dict[str, Any] = {
        "samples": tuple(sorted({one for one in samples if one is not None})),
        "num_rows": shape[0] if shape else None,
        "line": (Path(source["file"]).name, source["line"]) if source.get("file") else None,
    }
    if bad.get("phase") == "backward" and bad.get("forward_op"):
        found["op"] = bad["forward_op"]
    return found


def answer_of(kept: Mapping[str, Any]) -> Answer:
    """Return an answer that was read, or read back from a file."""
    given = dict(kept)
    given["answers"] = tuple((code, sure) for code, sure in given["answers"])
    given["samples"] = tuple(given["samples"])
    given["line"] = tuple(given["line"]) if given["line"] else None
    return Answer(**given)


def changes(case: Answer, variant: Answer, made: Variant) -> list[str]:
    """Return each part of the answer that is not that of the unchanged script."""
    if variant.failed:
        return [f"failed: {variant.failed[:120]}"]
    found = [
        _change(name, getattr(case, name), getattr(variant, name))
        for name in ("code", "step", "micro")
    ]
    if not same_operation(case.op, variant.op):
        found.append(_change("op", case.op, variant.op))
    module = without(variant.module, made.rewrite.added)
    if module in made.rewrite.modules:  # it stands where the script called a function
        module = ""
    for new, old in made.renamed.items():
        module = ".".join(old if word == new else word for word in module.split("."))
    found.append(_change("module", case.module, module))
    if made.rewrite.keeps_numbers:  # else other rows may fail
        found.append(_change("row", _expected(case, made), variant.samples))
    if not _same_line(case.line, variant.line, made):
        found.append(_change("line", case.line, variant.line))
    return [one for one in found if one]


def _change(name: str, old: object, new: object) -> str:
    return "" if old == new else f"{name}: {old or 'none'} -> {new or 'none'}"


def _expected(case: Answer, made: Variant) -> tuple[int, ...]:
    """Return the rows that must be named: those of the case, where they went."""
    if made.rewrite.rows == "same" or case.num_rows is None:
        return case.samples
    return tuple(sorted(case.num_rows - 1 - one for one in case.samples))


def _same_line(old: tuple[str, int] | None, new: tuple[str, int] | None, made: Variant) -> bool:
    """Whether both lines are the same place: of the script, where the rewrite took it from."""
    if old is None or new is None or old[0] != new[0]:
        return old == new
    if old[0] != "case.py":
        return old == new
    return old[1] in made.lines.get(new[1], frozenset())
