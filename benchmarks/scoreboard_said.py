"""What a tool said in a run that is over, read from what it left: one form for all of them."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scoring import Said

PROJECT = Path(__file__).parents[1]
MOST_OUT, MOST_ERR = 800, 3000
"""Characters kept of an output: its end."""
_LOSS = re.compile(r"^final_loss=(\S+)$", re.MULTILINE)
_LINE = re.compile(r"([\w.-]+\.py:\d+)\b(?!: \w*Warning)")
"""A line that is named, but for those to which Python ascribes a warning."""
_ABOVE_PACKAGES = re.compile(r"/[^\s\"':]*/(?=site-packages/)")
"""Where the packages of a process lie, in whatever environment."""


def record(tool: str, command: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return what is kept of a run that is over:
    what was said, the command and the end of its output.
    """
    ended = json.loads((folder / "ended.json").read_text())
    out = (folder / "stdout").read_text(errors="replace")
    err = (folder / "stderr").read_text(errors="replace")
    said: dict[str, Any] = _READERS.get(tool, _said_by_peer)(folder, out, err)
    losses = _LOSS.findall(out)
    said |= {"final_loss": float(losses[-1]) if losses else math.nan, "seconds": ended["seconds"]}
    if ended["code"] is None:
        said["failed"] = f"ended from outside after {ended['seconds']:.0f} s"
    said["failed"] = _portable(said.get("failed", ""))
    return {
        "said": asdict(Said(**said)),
        "command": " ".join(_portable(word) for word in ["python", *command]),
        "code": ended["code"],
        "stdout": _portable(out)[-MOST_OUT:],
        "stderr": _portable(err)[-MOST_ERR:],
    }


def twin_record(found: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the record of the twin that a tool looked at in the run of its case, if it did."""
    try:
        alarms = json.loads(found["stdout"].splitlines()[-1])["twin_alarms"]
    except (IndexError, KeyError, TypeError, json.JSONDecodeError):
        return None
    said = Said(alarms=alarms)
    return {
        "said": asdict(said),
        "command": found["command"],
        "code": 0,
        "stdout": "",
        "stderr": "",
    }


def said_in(kept: Mapping[str, Any]) -> Said:
    """Return what was said, from a record that was read back."""
    said = dict(kept["said"])
    for name in ("ruled_out", "ops", "modules", "lines"):
        said[name] = tuple(said.get(name, ()))
    said["answers"] = tuple((code, sure) for code, sure in said["answers"])
    return Said(**said)


def _said_by_nobody(folder: Path, out: str, err: str) -> dict[str, Any]:
    return {}


def _said_by_nanstop(folder: Path, out: str, err: str) -> dict[str, Any]:
    """Read ``summary.json``: incidents are alarms, and so are findings about a run that has not
    failed.
    """
    try:
        summary = json.loads((folder / "found" / "summary.json").read_text())
    except FileNotFoundError:
        return {"failed": f"no summary.json was written: {err[-300:]}"}
    rows, findings = summary["incidents"], summary["findings"]
    reports = [_diagnoses(folder / "found" / row["folder"], row) for row in rows]
    answers = [(d["code"], d["confidence"]) for found in reports for d in found]
    answers += [(one["code"], one["confidence"]) for one in findings]
    said: dict[str, Any] = {
        "alarms": len(rows) + len(findings),
        "incidents": len(rows),
        "answers": tuple(dict.fromkeys(answers)),
        "lines": tuple(dict.fromkeys(_LINE.findall(json.dumps(summary) + err))),
    }
    if rows:
        first = rows[0]
        lines = reports[0][0].get("lines", ()) if reports[0] else ()
        said |= {name: first[name] for name in ("step", "micro", "phase")}
        said |= {
            "ops": (first["op"],) if first["op"] else (),
            "modules": (first["module"] or _place(reports[0]),),
            "proven": first["verdict"] in ("proven", "isolated"),
            "cure": _cure(folder / "found" / first["folder"], first["verdict"]),
            "ruled_out": tuple(line for line in lines if line.startswith("ruled out")),
        }
    elif findings:
        first = findings[0]
        said |= {name: first.get(name) for name in ("step", "micro", "phase")}
        said |= {"ops": (first["op"],) if first.get("op") else (), "modules": (first["where"],)}
    return said


def _place(diagnoses: Sequence[Mapping[str, Any]]) -> str:
    """Return where a run that does not train was found not to, as a finding names its place."""
    first = diagnoses[0]
    return first.get("where", "") if first.get("trains_nothing") else ""


def _cure(folder: Path, verdict: str | None) -> str:
    """Return the class of a cure that an incident ended in, "" where it ended in none."""
    if verdict != "proven":
        return "isolated" if verdict == "isolated" else ""
    proof = json.loads((folder / "report.json").read_text())["proof"]
    return "safe" if proof["safety"] == "safe" else "allowed"


def _diagnoses(folder: Path, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    try:
        found = json.loads((folder / "report.json").read_text())["diagnoses"]
    except (FileNotFoundError, KeyError, json.JSONDecodeError):
        found = []
    return found or [{"code": row["code"], "confidence": row["confidence"] or "possible"}]


def _said_by_peer(folder: Path, out: str, err: str) -> dict[str, Any]:
    """Read the line that ``peers/under.py`` prints last."""
    try:
        found = json.loads((folder / "peer.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        code = json.loads((folder / "ended.json").read_text())["code"]
        died = code is not None and code < 0  # the case itself, before the peer had anything to say
        return {} if died else {"failed": err[-300:] or "nothing was printed"}
    if found["failed"]:
        return {"failed": found["failed"]}
    alarm = found["alarm"] or {}
    said = {name: alarm.get(name) for name in ("step", "micro", "phase")}
    listed = {name: tuple(alarm.get(name) or ()) for name in ("ops", "modules")}
    beyond_twin = "twin_alarms" in found
    return {"alarms": found["alarms"], "beyond_twin": beyond_twin, **said, **listed}


_READERS: Mapping[str, Callable[[Path, str, str], dict[str, Any]]] = {
    "plain": _said_by_nobody,
    "nanstop": _said_by_nanstop,
}


def _portable(text: str) -> str:
    """Return text without the folders of this machine."""
    shared = _ABOVE_PACKAGES.sub("", text)
    return (
        shared.replace(str(PROJECT / ".venv-peers"), "$VENV")
        .replace(sys.prefix, "$VENV")
        .replace(str(PROJECT), ".")
    )
