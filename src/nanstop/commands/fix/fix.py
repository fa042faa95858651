"""The cure of an incident as a change of files: shown, or written where they are the user's.

Files of libraries, and whatever lies outside of the working folder, are never written.
"""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

from nanstop.commands.fix.result import Fix, FixedFile, Override, Status
from nanstop.errors import NanstopError
from nanstop.records import Report
from nanstop.records.remedies import describe, remedy_of
from nanstop.rewrite.change import Change, FileChange, change_for, unified
from nanstop.rewrite.files import encoding_of, is_of_project, read
from nanstop.rewrite.override import override
from nanstop.session.factory import incident_folder
from nanstop.store.files import write_whole
from nanstop.store.incidents import incident_folders, load_report
from nanstop.tracing.own_code import is_library

PATCH = "fix.diff"


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
        status: Status = "shown" if own or change.words or change.files else "already applied"
        return _said(report, change, incident, "not known" if apply and not own else status)
    text = "".join(unified(one, _short(Path(one.file))) for one in own)
    write_whole(patch, text.encode("utf-8", "surrogateescape"))
    for one in own:
        _write(one)
    return _said(report, change, incident, "applied", undo=_undo(patch))


def _said(report: Report, change: Change, incident: Path, status: Status, undo: str = "") -> Fix:
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
        allow=tuple(dict.fromkeys(changing)),
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


def _proof(report: Report, change: Change) -> str:
    """Return how far what is typed was tried: another form than the cure's passed, no more."""
    if report.proof is None:
        return "not tried"
    return report.proof.verdict if change.atoms == report.proof.minimal else "plausible"


def is_own(file: str) -> bool:
    """Return whether a file is of the user's project: below the working folder, no library's."""
    return is_of_project(file) and not is_library(str(Path(file).resolve()))


def _write(change: FileChange) -> None:
    """Put the new text in the place of the old one, whole or not at all."""
    path = Path(change.file).resolve()
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        data = path.read_bytes()
        encoding = encoding_of(data)
        if data.decode(encoding) != change.before:
            raise NanstopError(f"{change.file} changed meanwhile: nothing was written")
        beside.write_bytes(change.after.encode(encoding))
        shutil.copymode(path, beside)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise NanstopError(f"cannot write {change.file}: {error.strerror or error}") from error


def _is_applied(patch: Path) -> bool:
    """Return whether every line that the kept patch puts into its files stands in them."""
    text = read(str(patch)) if patch.is_file() else None
    lines: set[str] = set()
    found = False
    for line in text.splitlines() if text else ():
        if line.startswith("+++ b/"):
            lines = set((read(line[6:]) or "").splitlines())
        elif line.startswith("+"):
            found = True
            if line[1:] not in lines:
                return False
    return found


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
    return f"git apply -R {_short(patch)}"


def _short(path: Path) -> str:
    """Return a path from the working folder where it lies below it."""
    try:
        return path.resolve().relative_to(Path.cwd().resolve()).as_posix()
    except ValueError:
        return str(path)
