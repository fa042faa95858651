"""The cure of an incident in the user's code, in a few lines, and how else to have it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from nanstop.records import Report
from nanstop.records.line_forms import is_bounded
from nanstop.records.remedies import describe, remedy_of
from nanstop.report.text.blocks.block import Block
from nanstop.rewrite.change import change_for, cure_of, is_untried
from nanstop.rewrite.files import read
from nanstop.wording import counted, typed

MAX_LINES = 6
_IN_CODE = "in code: "
_DONE = ("redo", "adopt", "rollback", "quarantine")


def code_blocks(report: Report, record: str | None = None) -> tuple[Block, ...]:
    """Return the lines that a cure is in the script, where they are known, and how to allow a cure
    that changes training.

    Reads the files that the report names, as they are now.
    """
    return (*_changed(report, record), *_allowed(report))


def is_code(block: Block) -> bool:
    """Return whether a block is of the lines that a cure is in the script."""
    return block.kind == "code" or block.lead == _IN_CODE


def _changed(report: Report, record: str | None) -> tuple[Block, ...]:
    change = None
    with suppress(Exception):  # a report must be printed whatever a file holds
        change = change_for(report, read)
    if change is None or not change.files:
        return ()
    folder = typed(Path(record).parent) if record else ""
    pointer = f"`nanstop fix{f' {folder}' if folder else ''}`"
    other = change.atoms != cure_of(report)
    form = (
        (f"(another form, which may end in another loss: {describe(change.atoms)})",)
        if other
        else ()
    )
    is_proven = report.proof is not None and report.proof.verdict == "proven"
    chosen = ("(the bound is yours to choose)",) if is_bounded(change.atoms) else ()
    form += () if is_proven else chosen
    untried = ("(not run on this step)",) if is_untried(report.proof) else ()
    beside = (*form, *untried, f"[{pointer}]")
    changed = [(Path(one.file).name, one.shown) for one in change.files]
    # The begin of a long change is its imports: a part of it shows nothing.
    is_short = sum(len(new) for _, hunks in changed for _, new in hunks) <= MAX_LINES
    found: list[Block] = []
    for name, hunks in changed:
        lines = [line for _, new in hunks for line in new]
        where = f"{name}:{', '.join(str(line) for line, _ in hunks)}"
        whole = () if is_short else (counted(len(lines), "line"),)
        found.append(Block("help", _IN_CODE, (where, *whole, *(() if found else beside))))
        found += [Block("code", "  + ", (text,)) for text in lines] if is_short else []
    return tuple(found)


def _allowed(report: Report) -> tuple[Block, ...]:
    proof, facts = report.proof, report.incident.facts
    done = report.audit[-1].action.kind if report.audit else ""
    if proof is None or proof.verdict not in ("proven", "isolated") or done in _DONE:
        return ()
    if facts.world_size > 1 and not facts.ranks_agree:
        return ()
    changing = [a.remedy for a in proof.minimal if remedy_of(a).safety == "changes_training"]
    if not changing:
        return ()
    command = report.incident.environment.command
    names = tuple(dict.fromkeys(changing))
    how = allowing(names, supervised=command is not None and command.supervised)
    return (Block("help", "help: ", (f"it changes training, and is applied only with {how}",)),)


def allowing(names: tuple[str, ...], *, supervised: bool) -> str:
    """Return how remedies that change training are allowed, as the run was started."""
    if supervised:
        return "`nanstop run " + " ".join(f"--allow {name}" for name in names) + " ...`"
    return f"`allow=({', '.join(f'{name!r}' for name in names)},)`".replace("'", '"')
