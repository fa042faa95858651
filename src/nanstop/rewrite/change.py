"""The change that a cure is in a user's files: the edits that are known, the rest in words."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, replace

from nanstop.records import Atom, OpEvent, Proof, Report, RunFacts
from nanstop.records.line_forms import CARRIED_AS, FORMS, GUARDED, typed_cure
from nanstop.rewrite.arguments import Settings, cured, settings_of
from nanstop.rewrite.config_file import with_settings
from nanstop.rewrite.files import FileChange
from nanstop.rewrite.forms.form_code import comes_later, edits_of, ways_at
from nanstop.rewrite.island import with_islands
from nanstop.rewrite.rates import is_of_a_schedule
from nanstop.rewrite.source import Edit, Source, apart, edited, source_of
from nanstop.rewrite.words import behind_islands, said, untyped

Read = Callable[[str], str | None]
"""Return the text of a file with its line ends; None where it cannot be read as text."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """``atoms``: the cure. ``files``: what it changes. ``words``: what is left to be typed.
    ``stale``: files whose recorded line has another text now.
    """

    atoms: tuple[Atom, ...] = ()
    files: tuple[FileChange, ...] = ()
    words: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()


def cure_of(report: Report) -> tuple[Atom, ...]:
    """Return what mends the batch where it is prepared; else the cure that was found, as it is
    typed; else what the diagnosis proposes first; else nothing.
    """
    proof, source = report.proof, mends_source(report)
    if source is not None:
        return (source,)
    if proof is not None and proof.minimal:
        return typed_cure(proof)
    offered = report.diagnoses[0].remedies if report.diagnoses else ()
    return offered[0] if offered and proof is None else ()


def mends_source(report: Report) -> Atom | None:
    """Return the form that mends data where it is prepared, which no run of a step tries; None for
    none.
    """
    return report.diagnoses[0].at_source if report.diagnoses else None


def is_untried(proof: Proof | None) -> bool:
    """Return whether the code of a cure's forms was not run on the failing step."""
    atoms = typed_cure(proof) if proof is not None and proof.typed is None else ()
    return any(atom.remedy in FORMS for atom in atoms)


def change_for(report: Report, read: Read) -> Rewrite:
    """Return the change that the report's cure is in the files that ``read`` gives.

    Nothing is written. What is rewritten is the file as it is now; where the line that the report
    recorded has another text, the file is ``stale`` and left alone.
    """
    atoms = cure_of(report)
    work = _Work(report, read)
    for atom in sorted(atoms, key=comes_later):
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
        proof = self.report.proof
        tried = proof.typed if proof is not None else None
        ways = ways_at(proof, atom)
        # Which code is that of a product that is carried, only a run tells.
        forms = [w for w in ways if tried is not None or w.value not in CARRIED_AS]
        forms = [w for w in forms if tried is None or w in tried]
        found = ((one, edits_of(source, one, event)) for one in forms if source is not None)
        taken = next(((one, edits) for one, edits in found if edits), None)
        if taken is not None:
            self.taken[atom] = _meant(atom, taken[0])
            known = self.edits.setdefault(file, [])
            known += apart(taken[1], known)
            return
        is_known = tried != () or atom.remedy == "stable_form"
        self.words.append(said(atom, self.report) if is_known else untyped(atom))

    def argument(self, atom: Atom) -> None:
        settings = settings_of(atom, self.facts)
        if atom.remedy == "lr" and is_of_a_schedule(self.report):
            self.words.append(said(atom, self.report))
            return
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
                self.words += behind_islands(atoms, self.report)
                return
        self.words.append(said(atoms[0], self.report, islands=atoms))
        self.words += behind_islands(atoms, self.report)

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
        return source_of(self._text(file))

    def _is_current(self, source: Source, event: OpEvent | None, file: str, line: int) -> bool:
        again = (self.report.incident.rows, self.report.localization)
        unmade = (one.unmade_at for one in again if one is not None)
        read = (event.source if event is not None else None, *unmade)
        place = next((p for p in read if p is not None and (p.file, p.line) == (file, line)), None)
        if place is None or not place.text:
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


def _meant(atom: Atom, taken: Atom) -> Atom:
    """Return what is typed for a form: itself, however it is typed, or another form of its line."""
    if taken.remedy == atom.remedy and atom.remedy in ("form", "fp32_line", "stable_form"):
        return atom
    return replace(taken, value=GUARDED) if taken.remedy == "form" else taken


def _is_readable(change: FileChange) -> bool:
    """Return whether a file is still Python after its change: what is not is never shown."""
    try:
        return not change.file.endswith(".py") or bool(ast.parse(change.after))
    except (SyntaxError, ValueError):
        return False


def event_of(report: Report) -> OpEvent | None:
    """Return the first bad operation of a report."""
    return report.localization.first_bad if report.localization is not None else None
