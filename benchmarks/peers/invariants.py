"""TrainCheck (package ``traincheck``): invariants of the healthy twin, checked on the case.

The four steps of its documentation: collect a trace of the reference, infer invariants, collect a
trace of the target, check. The twin is the best reference there can be. Case and twin are each made
one flat script, because TrainCheck instruments the script it is given and not what that imports.
The target is traced at every step. On the twin itself the invariants are checked too: what it is
said to violate is a false alarm, and is not held for a find on the case.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SECONDS = {"collect": 240.0, "infer": 1500.0, "check": 240.0}
CASES = Path(__file__).parents[1] / "cases"
_EVERY_STEP = ("--sampling-interval", "1", "--warm-up-steps", "1000")
_ELAPSED = "not finished within"


class FailedError(Exception):
    """A step of TrainCheck that failed, with the reason."""


def examine(script: Path) -> dict[str, Any]:
    """Return what ``under.py`` writes for any peer, and as ``twin_alarms`` what is said of the
    healthy twin.
    """
    folder = script.parent
    found: dict[str, Any] = {
        "alarm": None,
        "alarms": 0,
        "failed": "",
        "ended": "ok",
        "step_ends": [],
    }
    with tempfile.TemporaryDirectory() as place:
        try:
            known = _known(folder, Path(place))
            violated = _case(folder, Path(place), known)
        except FailedError as error:
            return found | {"failed": str(error)}
    if violated:
        step = min(one["first_step"] for one in violated.values())
        found["alarm"] = {"step": step, "said": "; ".join(list(violated)[:5])}
    return found | {"alarms": len(violated), "twin_alarms": len(known)}


def _known(folder: Path, place: Path) -> dict[str, Any]:
    """Infer the invariants of the twin, and return those that it is said to violate itself."""
    twin = place / "twin.py"
    twin.write_text(flat_twin(folder))
    _tool(
        "collect",
        place,
        "--pyscript",
        twin,
        "--models-to-track",
        "model",
        "--output-dir",
        "reference",
    )
    _tool("infer", place, "-f", "reference", "-o", "invariants.json")
    return _violated(place, twin, "target_twin")


def _case(folder: Path, place: Path, known: dict[str, Any]) -> dict[str, Any]:
    case = place / "flat_case.py"
    case.write_text(_findable((folder / "case.py").read_text()))
    found = _violated(place, case, "target_case")
    return {name: one for name, one in found.items() if name not in known}


def _violated(place: Path, script: Path, target: str) -> dict[str, Any]:
    given = ("--models-to-track", "model", "--invariants", "invariants.json", *_EVERY_STEP)
    _tool("collect", place, "--pyscript", script, *given, "--output-dir", target)
    _tool("check", place, "-f", target, "-i", "invariants.json")
    (summary,) = place.glob(f"traincheck_checker_results_*/{target}/violations_summary.json")
    return {one["display_name"]: one for one in json.loads(summary.read_text())["violations"]}


def _tool(verb: str, place: Path, *words: Any) -> None:
    command = [str(Path(sys.executable).parent / f"traincheck-{verb}"), *map(str, words)]
    if not Path(command[0]).exists():
        raise FailedError("traincheck is not installed")
    try:
        done = subprocess.run(
            command,
            cwd=place,
            env=dict(os.environ),
            capture_output=True,
            text=True,
            timeout=SECONDS[verb],
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise FailedError(f"traincheck-{verb} was {_ELAPSED} {SECONDS[verb]:.0f} s") from None
    # A case that dies has left its trace all the same.
    if done.returncode and verb != "collect":
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise FailedError(f"traincheck-{verb} ended with {done.returncode}: {last[-200:]}")


def flat_twin(folder: Path) -> str:
    """Return ``healthy.py`` with ``case.py`` in place of its import."""
    case = (folder / "case.py").read_text().partition('if __name__ == "__main__":')[0]
    twin = re.sub(
        r"^from case import [^(\n]*$", "", (folder / "healthy.py").read_text(), flags=re.MULTILINE
    )
    twin = re.sub(r"^from case import \([^)]*\)$", "", twin, flags=re.MULTILINE)
    return _findable(f"{case}\n{twin}")


def _findable(text: str) -> str:
    """Return a script that finds what lies beside the cases, wherever it is run from."""
    return re.sub(
        r"^sys\.path\.insert\(.*$", f"sys.path.insert(0, {str(CASES)!r})", text, flags=re.MULTILINE
    )
