"""What `nanstop check` found as SARIF 2.1.0 (OASIS), which code review shows beside the lines.

A place is as exact as it is known: a file and its line; else the file that was checked as a whole,
which has no region (SARIF 3.29.4). GitHub refuses a log in which one result has no file:
https://github.com/github/codeql-action/issues/1738.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nanstop.commands.check.result import Preflight
from nanstop.diagnose.evidence.accounts import shown
from nanstop.diagnose.pages import explain, find_rule
from nanstop.errors import NanstopError
from nanstop.process.children.command import resolve_command
from nanstop.records import Diagnosis
from nanstop.report.text.blocks.finding import severity
from nanstop.store.files import write_whole
from nanstop.wording import printable

SCHEMA_URI = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
ABOUT = "https://pypi.org/project/nanstop/"
ROOT = "%SRCROOT%"
"""The name that GitHub and others give to the folder that relative places start from."""

_LINK = re.compile(r"\[([^\[\]]*)\](?=\()")
Json = dict[str, Any]


def write_sarif(path: Path, found: Preflight, target: Path | None, *, version: str) -> None:
    """Write the findings of a check, with places relative to the working directory.

    ``target``: the file that was checked, None where it is not one file. ``version``: of nanstop.
    Errors: ``NanstopError`` for a path that cannot be written.
    """
    log = sarif_log(found, target, Path.cwd(), version=version)
    try:
        if target is not None and path.exists() and path.samefile(target):
            raise NanstopError(f"cannot write {path}: it is what was checked")
        write_whole(path, (json.dumps(log, indent=2, ensure_ascii=False) + "\n").encode())
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise NanstopError(f"cannot write {path}: {why}") from error


def sarif_log(found: Preflight, target: Path | None, folder: Path, *, version: str) -> Json:
    """Return a log of one run. ``folder``: absolute; places in it are relative to it."""
    codes = sorted({one.code for one in found.findings})
    driver = {
        "name": "nanstop",
        "version": version,
        "informationUri": ABOUT,
        "rules": [_rule(code) for code in codes],
    }
    notes = [{"level": "note", "message": _message(failure)} for failure in found.failures]
    run = {
        "tool": {"driver": driver},
        "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": notes}],
        "originalUriBaseIds": {ROOT: {"uri": folder.as_uri().rstrip("/") + "/"}},
        "results": [
            _result(one, codes.index(one.code), found.facts.host, target, folder)
            for one in found.findings
        ],
    }
    return {"$schema": SCHEMA_URI, "version": "2.1.0", "runs": [run]}


def checked_file(command: Sequence[str]) -> Path | None:
    """Return the script of a command, else the first file among its words, None without one."""
    files = [Path(word) for word in resolve_command(command)[1:] if _is_file(word)]
    scripts = [file for file in files if file.suffix == ".py"]
    return next(iter([*scripts, *files]), None)


def _rule(code: str) -> Json:
    rule, page = find_rule(code), explain(code)
    return {
        "id": code,
        "name": rule.slug,
        "shortDescription": {"text": rule.title},
        "help": {"text": page, "markdown": page},
        "defaultConfiguration": {"level": severity(code)},
    }


def _result(one: Diagnosis, index: int, host: str, target: Path | None, folder: Path) -> Json:
    file, line, text = _place(one, target, folder)
    located: Json = {}
    if file is not None:
        located["physicalLocation"] = {"artifactLocation": _artifact(file, folder)}
        if line is not None:
            located["physicalLocation"]["region"] = {"startLine": line}
    if one.where not in ("", host, shown(one.source)):
        located["logicalLocations"] = [{"fullyQualifiedName": _plain(one.where)}]
    uri = _artifact(file, folder)["uri"] if file is not None else ""
    told = "\0".join((one.code, uri, text or _plain(one.where)))
    return {
        "ruleId": one.code,
        "ruleIndex": index,
        "level": severity(one.code),
        "message": _message(f"{one.title}: {one.cause}", *one.lines),
        "locations": [located] if located else [],
        "partialFingerprints": {"finding/v1": hashlib.sha256(told.encode()).hexdigest()},
        "properties": {"certainty": one.confidence},
    }


def _place(
    one: Diagnosis, target: Path | None, folder: Path
) -> tuple[Path | None, int | None, str]:
    """Return file, line and text of the line, as far as each is known and the file is there."""
    source = one.source
    if source is not None and source.line >= 1 and _is_file(folder / source.file):
        return Path(source.file), source.line, _plain(source.text.strip())
    return (target if target is not None and _is_file(folder / target) else None), None, ""


def _is_file(path: str | Path) -> bool:
    return os.path.isfile(path)  # noqa: PTH113  (False for a word that can be no path)


def _artifact(file: Path, folder: Path) -> Json:
    """Return where a file is: relative where it lies in ``folder``, else as a whole URI."""
    whole = Path(os.path.abspath(folder / file))  # noqa: PTH100  (``..`` without following links)
    for path in (whole, whole.resolve()):
        if path.is_relative_to(folder):
            relative = path.relative_to(folder).as_posix()
            return {"uri": quote(os.fsencode(relative)), "uriBaseId": ROOT}
    return {"uri": whole.as_uri()}


def _message(*parts: str) -> Json:
    """Return a message of one line a part.

    ``[text](place)`` in a name is made no link (SARIF 3.11.6).
    """
    lines = [_LINK.sub(r"\\[\1\\]", _plain(part)) for part in parts]
    return {"text": "\n".join(lines)}


def _plain(text: str) -> str:
    return printable(text, kept="")
