"""The cure of an incident as a change of files: shown, or written where they are the user's.

Files of libraries, and whatever lies outside of the working folder, are never written.
"""

from __future__ import annotations

from pathlib import Path

from nanstop.commands.fix.result import Fix, FixedFile, FixStatus, Override
from nanstop.errors import NanstopError
from nanstop.own_code import is_library
from nanstop.records import Proof, Report
from nanstop.records.line_forms import is_typed_beside, lines_of_modules
from nanstop.records.remedies import describe, remedy_of
from nanstop.rewrite.change import Rewrite, change_for, is_untried, mends_source
from nanstop.rewrite.files import FileChange, encoding_of, is_of_project, read, unified
from nanstop.rewrite.override import override
from nanstop.session.factory import incident_folder
from nanstop.store.files import write_whole
from nanstop.store.incidents import PATCH, incident_folders, load_report
from nanstop.wording import typed


def fix(folder: Path | None = None, *, apply: bool = False) -> Fix:
    """Return the cure of an incident as code; with ``apply`` it is written, too.

    ``folder``: an incident, or a run, whose newest is taken; by default that of the present folder.
    What was applied is kept as ``fix.diff`` beside the incident. Errors: ``NanstopError`` NS001
    where there is no incident, where the failing line has another text by now, or where a file
    cannot be written.
    """
    found = incident_folders(incident_folder() if folder is None else folder)[-1]
    report = load_report(found)
    incident = found if found.is_dir() else found.parent
    change = change_for(report, read)
    if not change.atoms:
        return Fix(incident=_short(incident), status="no cure")
    patch = incident / PATCH
    if _is_applied(patch):
        return _said(report, change, incident, "already applied", undo=_undo(patch))
    if change.stale:
        raise NanstopError(
            f"{_short(Path(change.stale[0]))} has changed since the incident",
            hint="let the script fail once more under `nanstop run`, then `nanstop fix`",
        )
    own = [one for one in change.files if is_own(one.file)]
    if not (apply and own):
        status: FixStatus = "shown" if own or change.words or change.files else "already applied"
        return _said(report, change, incident, "not known" if apply and not own else status)
    written = [_bytes(one) for one in own]
    write_whole(patch, b"".join(_diff(one, *data) for one, data in zip(own, written, strict=True)))
    for one, (_, after) in zip(own, written, strict=True):
        _write(one, after)
    return _said(report, change, incident, "applied", undo=_undo(patch))


def _said(
    report: Report, change: Rewrite, incident: Path, status: FixStatus, undo: str = ""
) -> Fix:
    done = status == "already applied"
    own = [one for one in change.files if is_own(one.file) and not done]
    others = [one for one in change.files if not is_own(one.file) and not done]
    command = report.incident.environment.command
    changing = [a.remedy for a in change.atoms if remedy_of(a).safety == "changes_training"]
    return Fix(
        incident=_short(incident),
        status=status,
        cure=describe(change.atoms),
        proof=_proof(report, change),
        allow=()
        if report.trains_nothing or mends_source(report) or not _is_had_by_allowing(report.proof)
        else tuple(dict.fromkeys(changing)),
        supervised=command is not None and command.supervised,
        files=tuple(
            FixedFile(file=_short(Path(one.file)), diff=unified(one, _short(Path(one.file))))
            for one in own
        ),
        overrides=tuple(
            Override(file=one.file, diff=one.diff, code=_override(one)) for one in others
        ),
        words=() if done else change.words,
        undo=undo,
    )


def _proof(report: Report, change: Rewrite) -> str:
    """Return how far what is typed was tried: another form than the cure's passed, no more, and the
    code of a form may not have been run.
    """
    proof = report.proof
    if mends_source(report):
        return "tried on its rows"
    if proof is None:
        return "not tried"
    is_cure = change.atoms in (proof.minimal, lines_of_modules(proof))
    is_tried = is_cure and not is_untried(proof)
    return proof.verdict if is_tried else "plausible"


def _is_had_by_allowing(proof: Proof | None) -> bool:
    """Return whether a run applies the cure once it is allowed: not one that is only plausible."""
    return proof is None or (proof.verdict != "plausible" and not is_typed_beside(proof))


def is_own(file: str) -> bool:
    """Return whether a file is of the user's project: below the working folder, no library's."""
    return is_of_project(file) and not is_library(str(Path(file).resolve()))


def _bytes(change: FileChange) -> tuple[bytes, bytes]:
    """Return a file as it is and as it becomes, in its own encoding. Errors: ``NanstopError``."""
    try:
        before = Path(change.file).read_bytes()
        encoding = encoding_of(before)
        if change.before.encode(encoding) != before:
            raise NanstopError(f"{change.file} changed meanwhile: nothing was written")
        return before, change.after.encode(encoding)
    except OSError as error:
        raise NanstopError(f"cannot read {change.file}: {error.strerror or error}") from error
    except UnicodeEncodeError as error:
        raise NanstopError(f"cannot write {_short(Path(change.file))}: {error}") from error


def _diff(change: FileChange, before: bytes, after: bytes) -> bytes:
    """Return the patch of a file, which ``git`` compares byte by byte."""
    same = FileChange(change.file, _as_text(before), _as_text(after))
    return unified(same, _short(Path(change.file))).encode("utf-8", "surrogateescape")


def _as_text(data: bytes) -> str:
    """Return any bytes as characters that encode to them again."""
    return data.decode("utf-8", "surrogateescape")


def _write(change: FileChange, after: bytes) -> None:
    try:
        write_whole(Path(change.file).resolve(), after)
    except OSError as error:
        raise NanstopError(f"cannot write {change.file}: {error.strerror or error}") from error


def _is_applied(patch: Path) -> bool:
    """Return whether every line that the kept patch puts into its files stands in them."""
    lines: set[str] = set()
    found = False
    for line in _lines(patch):
        if line.startswith("+++ b/"):
            lines = set(_lines(Path(line[6:])))
        elif line.startswith("+"):
            found = True
            if line[1:] not in lines:
                return False
    return found


def _lines(file: Path) -> list[str]:
    """Return the lines of a file without what ends them; none where it cannot be read."""
    try:
        return _as_text(file.read_bytes()).split("\n")
    except OSError:
        return []


def _override(change: FileChange) -> str:
    module = _module(Path(change.file))
    code = override(change.before, change.after, module) if module else None
    return code or ""


def _module(path: Path) -> str:
    """Return the name that a file is imported by: up its packages."""
    names = [] if path.stem == "__init__" else [path.stem]
    for parent in path.parents:
        if not (parent / "__init__.py").is_file():
            break
        names.append(parent.name)
    return ".".join(reversed(names)) if path.suffix == ".py" else ""


def _undo(patch: Path) -> str:
    return f"git apply -R {typed(_short(patch))}"


def _short(path: Path) -> str:
    """Return a path from the working folder where it lies below it."""
    try:
        return path.resolve().relative_to(Path.cwd().resolve()).as_posix()
    except ValueError:
        return str(path)
