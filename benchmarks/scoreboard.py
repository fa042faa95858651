"""Run every case and its twin under nanstop and under other tools; write the table.

``python benchmarks/scoreboard.py [--tool NAME ...] [--case NAME ...] [--jobs N]``: by default nanstop only, all cases.
What each run said is kept in ``benchmarks/results/scoreboard/TOOL/CASE.json`` with its command and raw output, and the table
is made from all that is kept: in ``docs/scoreboard.md``, in ``benchmarks/results/scoreboard.json``, and on the terminal.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "cases"), str(HERE)]

from scoreboard_table import write_table  # noqa: E402  (found through the line above)
from scoring import Said  # noqa: E402
from truth import Truth, load_truths  # noqa: E402

RESULTS = HERE / "results" / "scoreboard"
PEERS = (
    "detect_anomaly",
    "DebugUnderflowOverflow",
    "isfinite hooks",
    "naive dispatch mode",
)
TIMEOUT = 240.0
_LOSS = re.compile(r"^final_loss=(\S+)$", re.MULTILINE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for, write the table and print it; return 0."""
    asked = _arguments(arguments)
    truths = load_truths(tuple(asked.case))
    began = time.monotonic()
    jobs = [
        (tool, truth, script)
        for tool in ("plain", *(asked.tool or ("nanstop",)))
        for truth in truths
        for script in ("case", "healthy")
        if not (tool == "plain" and script == "case")
    ]
    with ThreadPoolExecutor(asked.jobs) as pool:
        for done, line in enumerate(pool.map(lambda job: _keep(*job), jobs), start=1):
            print(f"[{done}/{len(jobs)}] {line}", flush=True)
    print(f"{len(jobs)} runs in {(time.monotonic() - began) / 60:.1f} minutes\n")
    print(write_table(load_truths(), RESULTS, HERE.parent / "docs" / "scoreboard.md"))
    return 0


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", action="append", choices=("nanstop", *PEERS), default=[])
    parser.add_argument("--case", action="append", default=[], metavar="NAME")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    return parser.parse_args(arguments)


def _keep(tool: str, truth: Truth, script: str) -> str:
    """Run one script under one tool, keep what came of it, and return a line about it."""
    path = truth.folder / f"{script}.py"
    with tempfile.TemporaryDirectory() as folder:
        command = _command(tool, truth, path)
        began = time.monotonic()
        done = _child(command, folder)
        seconds = time.monotonic() - began
        said = _said(tool, done, Path(folder))
    losses = _LOSS.findall(done["stdout"])
    said["final_loss"] = float(losses[-1]) if losses else math.nan
    said["seconds"] = said.get("seconds") or seconds
    record = {
        "said": asdict(Said(**said)),
        "versions": _versions(),
        "command": [_portable(word) for word in command],
        "code": done["code"],
        "stdout": _portable(done["stdout"])[-4000:],
        "stderr": _portable(done["stderr"])[-8000:],
    }
    place = RESULTS / tool.replace(" ", "_") / f"{truth.name}.{script}.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(record, indent=1) + "\n")
    heard = ", ".join(said.get("codes", ())) or (f"{said.get('alarms', 0)} alarms")
    return f"{tool:24} {truth.name}/{script}: {heard} ({seconds:.0f} s)"


def _command(tool: str, truth: Truth, script: Path) -> list[str]:
    if tool == "plain":
        return [sys.executable, str(script)]
    if tool == "nanstop":
        allowed = [word for name in truth.allow for word in ("--allow", name)]
        return [sys.executable, "-m", "nanstop", "run", "--out", "found", *allowed, str(script)]
    return [sys.executable, "-m", "peers", tool, str(script)]


def _child(command: list[str], folder: str) -> dict[str, Any]:
    path = os.pathsep.join((str(HERE / "cases"), str(HERE)))
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"code": None, "stdout": "", "stderr": f"ended after {TIMEOUT:.0f} s"}
    return {"code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}


def _said(tool: str, done: dict[str, Any], folder: Path) -> dict[str, Any]:
    if tool == "plain":
        return {}
    return _said_by_nanstop(folder) if tool == "nanstop" else _said_by_peer(done)


def _said_by_nanstop(folder: Path) -> dict[str, Any]:
    """Read ``summary.json``: incidents are alarms, and so are findings about a run that has not failed."""
    try:
        summary = json.loads((folder / "found" / "summary.json").read_text())
    except FileNotFoundError:
        return {"failed": "no summary.json was written"}
    rows, findings = summary["incidents"], summary["findings"]
    codes = [code for row in rows for code in row["codes"]] + [one["code"] for one in findings]
    first = rows[0] if rows else {}
    return {
        "alarms": len(rows) + len(findings),
        "codes": tuple(dict.fromkeys(codes)),
        "proven": first.get("verdict") == "proven",
        **{name: first.get(name) for name in ("step", "micro", "phase", "op")},
        "module": (first.get("module") or "") if first else None,
    }


def _said_by_peer(done: dict[str, Any]) -> dict[str, Any]:
    try:
        found = json.loads(done["stdout"].splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        return {"failed": done["stderr"][-300:] or "nothing was printed"}
    alarm = found["alarm"] or {}
    return {
        "alarms": found["alarms"],
        "seconds": found["seconds"],
        **{name: alarm.get(name) for name in ("step", "micro", "phase", "op", "module")},
    }


def _portable(text: str) -> str:
    """Return text without the folders of this machine."""
    return text.replace(str(HERE.parent), ".").replace(sys.prefix, "$VENV")


def _versions() -> dict[str, str]:
    installed = {one.name: one.version for one in distributions()}
    wanted = ("nanstop", "torch", "transformers", "trl", "peft", "accelerate")
    return {"python": platform.python_version()} | {
        n: installed[n] for n in wanted if n in installed
    }


if __name__ == "__main__":
    sys.exit(main())
