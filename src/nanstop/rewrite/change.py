"""The change that a cure is in a user's files: the edits that are known, the rest in words."""

from __future__ import annotations

import ast
import difflib
import io
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace

from nanstop.records import Atom, OpEvent, Report, RunFacts
from nanstop.records.remedies import FORMS
from nanstop.rewrite.arguments import Settings, cured, settings_of
from nanstop.rewrite.config_file import with_settings
from nanstop.rewrite.draft import Draft, NotKnownError
from nanstop.rewrite.guarded import rewrite_guarded
from nanstop.rewrite.island import with_islands
from nanstop.rewrite.log_space import rewrite_in_log_space
from nanstop.rewrite.source import Edit, Source, edited
from nanstop.rewrite.words import said

Read = Callable[[str], str | None]
"""Return the text of a file with its line ends; None where it cannot be read as text."""


@dataclass(frozen=True, slots=True)
class FileChange:
    """A file with what it was and what it becomes."""

    file: str
    before: str
    after: str

    @property
    def diff(self) -> str:
        """The change as a unified diff with the file's own name."""
        return unified(self, self.file)

    @property
    def shown(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """Where its changes are, as lines of the old text counted from 1, each with its new
        lines.
        """
        old, new = self.before.splitlines(), self.after.splitlines()
        matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
        return tuple(
            (start + 1, tuple(textwrap.dedent("\n".join(new[first:last])).splitlines()))
            for kind, start, _, first, last in matcher.get_opcodes()
            if kind != "equal"
        )


@dataclass(frozen=True, slots=True)
class Rewrite:
    """``atoms``: the cure. ``files``: what it changes. ``words``: what is left to be typed.
    ``stale``: files whose recorded line has another text now.
    """

    atoms: tuple[Atom, ...] = ()
    files: tuple[FileChange, ...] = ()
    words: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()


def unified(change: FileChange, name: str) -> str:
    """Return a change as a unified diff, as git writes it, under this name."""
    lines = difflib.unified_diff(
        io.StringIO(change.before, newline="\n").readlines(),
        io.StringIO(change.after, newline="\n").readlines(),
        f"a/{name}",
        f"b/{name}",
    )
    marked = (x if x.endswith("\n") else f"{x}\n\\ No newline at end of file\n" for x in lines)
    return "".join(marked)


def cure_of(report: Report) -> tuple[Atom, ...]:
    """Return the cure that was found; else what the diagnosis proposes first; else nothing."""
    proof = report.proof
    if proof is not None and proof.minimal:
        return proof.minimal
    offered = report.diagnoses[0].remedies if report.diagnoses else ()
    return offered[0] if offered and proof is None else ()


def change_for(report: Report, read: Read) -> Rewrite:
    """Return the change that the report's cure is in the files that ``read`` gives.

    Nothing is written. What is rewritten is the file as it is now; where the line that the report
    recorded has another text, the file is ``stale`` and left alone.
    """
    atoms = cure_of(report)
    work = _Work(report, read)
    for atom in atoms:
        if atom.remedy in FORMS:
            work.form(atom)
        elif atom.remedy not in ("island", "fp32_logits"):
            work.argument(atom)
    islands = tuple(atom for atom in atoms if atom.remedy == "island")
    if islands:
        work.islands(islands)
    work.words += [said(atom, report) for atom in atoms if atom.remedy == "fp32_logits"]
    return replace(work.made(), atoms=tuple(work.taken.get(one, one) for one in atoms))


class _Work:
    def __init__(self, report: Report, read: Read) -> None:
        self.report = report
        self.read = read
        self.facts: RunFacts = report.incident.facts
        self.texts: dict[str, str] = {}
        self.edits: dict[str, list[Edit]] = {}
        self.words: list[str] = []
        self.stale: list[str] = []
        self.taken: dict[Atom, Atom] = {}
        """Forms of the cure, and what is typed for them."""

    def form(self, atom: Atom) -> None:
        file, _, number = atom.target.rpartition(":")
        event = event_of(self.report)
        source = self._source(file)
        line = int(number) if number.isdigit() else 0
        if source is not None and not self._is_current(source, event, file, line):
            self.stale.append(f"{file}:{line}")
            return
        if event is not None and event.source is not None and event.source.line != line:
            event = None  # what fails at this line, once the other one passes, is not recorded
        forms = (atom, *self._others_at(atom))
        found = ((one, form_edits(source, line, one, event)) for one in forms if source is not None)
        taken = next(((one, edits) for one, edits in found if edits), None)
        if taken is not None:
            self.taken[atom] = taken[0]
            self.edits.setdefault(file, []).extend(taken[1])
            return
        self.words.append(said(atom, self.report))

    def _others_at(self, atom: Atom) -> list[Atom]:
        """Return the other forms of a line that passed: the numbers that a stable form is made of
        may come from another function.
        """
        proof = self.report.proof
        sets = [one.atoms for one in proof.alternatives] if proof is not None else []
        return [one[0] for one in sets if len(one) == 1 and _is_form_at(one[0], atom.target)]

    def argument(self, atom: Atom) -> None:
        settings = settings_of(atom, self.facts)
        if self._in_config(settings):
            return
        done = False
        for file in self._scripts():
            source = self._source(file)
            edits = cured(source, atom, self.facts) if source is not None else []
            if edits:
                self.edits.setdefault(file, []).extend(edits)
                done = True
        if not done:
            self.words.append(said(atom, self.report, settings))

    def islands(self, atoms: tuple[Atom, ...]) -> None:
        for file in self._scripts():
            source = self._source(file)
            device = self.facts.device.partition(":")[0]
            edits = with_islands(source, atoms, device) if source is not None else []
            if edits:
                self.edits.setdefault(file, []).extend(edits)
                return
        self.words.append(said(atoms[0], self.report, islands=atoms))

    def _in_config(self, settings: Settings) -> bool:
        command = self.report.incident.environment.command
        file = command.config if command is not None else None
        text = self._text(file) if file is not None and settings else None
        if file is None or text is None:
            return False
        edits = with_settings(text, settings, is_json=file.endswith(".json"))
        self.edits.setdefault(file, []).extend(edits)
        return True

    def _scripts(self) -> tuple[str, ...]:
        """Return the files in which the script sets its run up: itself, and where it failed."""
        command, event = self.report.incident.environment.command, event_of(self.report)
        script = command.script if command is not None else None
        failed = event.source.file if event is not None and event.source is not None else None
        return tuple(dict.fromkeys(file for file in (script, None if script else failed) if file))

    def _text(self, file: str) -> str | None:
        if file not in self.texts:
            text = self.read(file)
            if text is None:
                return None
            self.texts[file] = text
        return self.texts[file]

    def _source(self, file: str) -> Source | None:
        text = self._text(file)
        if text is None:
            return None
        try:
            return Source(text)
        except (SyntaxError, ValueError, RecursionError):
            return None

    def _is_current(self, source: Source, event: OpEvent | None, file: str, line: int) -> bool:
        place = event.source if event is not None else None
        if place is None or (place.file, place.line) != (file, line) or not place.text:
            return True
        return source.line(line).strip() == place.text.strip()

    def made(self) -> Rewrite:
        files = [
            FileChange(file, self.texts[file], edited(self.texts[file], edits))
            for file, edits in self.edits.items()
        ]
        changed = tuple(one for one in files if one.before != one.after)
        good = tuple(one for one in changed if _is_readable(one))
        if len(good) < len(changed):
            self.words += [said(atom, self.report) for atom in cure_of(self.report)]
        return Rewrite(files=good, words=tuple(self.words), stale=tuple(self.stale))


def _is_form_at(atom: Atom, target: str) -> bool:
    return atom.remedy in FORMS and atom.target == target


def _is_readable(change: FileChange) -> bool:
    """Return whether a file is still Python after its change: what is not is never shown."""
    try:
        return not change.file.endswith(".py") or bool(ast.parse(change.after))
    except (SyntaxError, ValueError):
        return False


def event_of(report: Report) -> OpEvent | None:
    """Return the first bad operation of a report."""
    return report.localization.first_bad if report.localization is not None else None


def form_edits(source: Source, line: int, atom: Atom, event: OpEvent | None) -> tuple[Edit, ...]:
    """Return the edits that put a stable or a guarded form at a line; empty where none is known.

    An exponential of one line is stable in what a later one makes of it: its logarithm, a share.
    ``event``: the failing operation, for its name, its format and what its operands are.
    """
    statement = source.statement_at(line)
    if statement is None:
        return ()
    stable = atom.remedy == "stable_form"
    for place in (statement, *(source.readers_of(statement) if stable else ())):
        draft = Draft(source, place, dtype=_format(event), counted=_divides_by_count(event))
        draft.by_number = event is not None and event.name == "div" and event.divisor is None
        draft.infinite = event is not None and any(o.posinf or o.neginf for o in event.outputs)
        try:
            done = rewrite_in_log_space(draft) if stable else rewrite_guarded(draft, _name(event))
            if done:
                return draft.finished()
        except NotKnownError:
            continue
    return ()


def _format(event: OpEvent | None) -> str:
    formats = [stats.dtype for stats in event.inputs] if event is not None else []
    return next((name for name in formats if "float" in name), "float32")


def _name(event: OpEvent | None) -> str:
    if event is None:
        return ""
    forward = event.forward_op or ""
    op = forward if "." in forward else event.op  # a custom backward is a line of its own
    return op.split(".")[1].rstrip("_")


def _divides_by_count(event: OpEvent | None) -> bool:
    divisor = event.divisor if event is not None else None
    if event is None or divisor is None or divisor >= len(event.descent):
        return False
    return {"count", "whole"} <= set(event.descent[divisor])
