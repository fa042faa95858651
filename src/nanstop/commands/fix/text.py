"""A fix in the terminal: the diff as git reads it, what else to type, and the way back."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from nanstop.commands.fix.result import Fix
from nanstop.language.translate import translated
from nanstop.report.text.in_code import allowing
from nanstop.wording import typed


def render(fix: Fix) -> str:
    """Return the fix as text. Lines that are no diff are none that ``git apply`` would read."""
    return "\n".join(_lines(fix))


def _lines(fix: Fix) -> Iterator[str]:
    if fix.status == "no cure":
        yield translated(f"{fix.incident}: no cure is known, so there is nothing to change")
        yield translated(f"help: `nanstop report {typed(fix.incident)}` says what was tried")
        return
    yield translated(f"cure: {fix.cure} [{fix.proof}]")
    if fix.status == "already applied":
        yield translated("the files have this change already")
    for file in fix.files:
        yield file.diff.rstrip("\n")
    for one in fix.overrides:
        yield translated(f"note: {one.file} is not yours to change; what would change there:")
        yield textwrap.indent(one.diff.rstrip("\n"), "  ")
        if one.code:
            yield translated("help: in your script, before training:")
            yield textwrap.indent(one.code, "  ")
    for words in fix.words:
        first, *rest = words.splitlines()
        yield translated(f"help: {first}")
        yield from (f"  {line}".rstrip() for line in rest)
    yield from _next(fix)


def _next(fix: Fix) -> Iterator[str]:
    if fix.status == "applied":
        yield translated(f"applied to {', '.join(file.file for file in fix.files)}")
    elif fix.status == "shown" and fix.files:
        yield translated(f"help: apply it with `nanstop fix {typed(fix.incident)} --apply`")
    if fix.undo:
        yield translated(f"help: take it back with `{fix.undo}`")
    if fix.allow and fix.status in ("shown", "not known"):
        yield translated(
            f"help: or leave the code as it is: {allowing(fix.allow, supervised=fix.supervised)}"
        )
