"""Run every case and its twin under nanstop and under other tools; write the table.

    python benchmarks/scoreboard.py [--tool NAME ...] [--peers] [--case NAME ...] [--cold]
                                    [--no-healthy] [--no-overhead]

By default nanstop's own part: every case, every twin, more than 100 further healthy runs, and what
watching costs. Each run is forked from a warm process that has imported torch, transformers and,
where the script names them, trl and peft (``--cold``: each is a process of its own from the start).
What a run said is kept in ``results/scoreboard/TOOL.json``, with its command and the end of its
output; the table is made of all that is kept: ``docs/scoreboard.md``, ``results/scoreboard.json``,
and the lines that are printed last. The exit code is 1 if one of those is not as it must be.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "cases"), str(HERE)]

from scoreboard_overhead import measure  # noqa: E402  (found through the line above)
from scoreboard_runs import Run, healthy_runs, python_for, run_all, run_cold, runs_of  # noqa: E402
from scoreboard_said import twin_record  # noqa: E402
from scoreboard_table import write_table  # noqa: E402
from truth import load_truths  # noqa: E402

RESULTS = HERE / "results" / "scoreboard"
PAGE = HERE.parent / "docs" / "scoreboard.md"
PEERS = (
    "detect_anomaly",
    "DebugUnderflowOverflow",
    "isfinite hooks",
    "naive dispatch mode",
    "msprobe",
    "traincheck",
)
_PACKAGES = (
    *("nanstop", "torch", "transformers", "trl", "peft", "accelerate"),
    *("mindstudio-probe", "traincheck"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for, write the table and print it;
    return 1 if a line is not as it must be.
    """
    asked = _arguments(arguments)
    tools = asked.tool or (list(PEERS) if asked.peers else ["nanstop"])
    truths = load_truths(tuple(asked.case))
    began = time.monotonic()
    for tool in [] if asked.table else tools:
        runs = (
            [*runs_of("plain", truths), *runs_of(tool, truths)]
            if tool == "nanstop"
            else runs_of(tool, truths)
        )
        if tool == "nanstop" and asked.healthy and not asked.case:
            runs += healthy_runs(tool)
        _run(tool, runs, asked)
        if asked.overhead and not asked.case:
            found = measure(tool, python_for(tool))
            _keep(tool, {"overhead": found})
            print(f"overhead of {tool}: {found}", flush=True)
    minutes = (time.monotonic() - began) / 60
    if not asked.table:
        for tool in tools:
            whole = asked.healthy and not asked.case
            took = {"minutes": round(minutes / len(tools), 1)} if whole else {}
            _keep(tool, {**took, "versions": _versions(python_for(tool))})
    _forget_removed()
    board = write_table(load_truths(), RESULTS, PAGE)
    print(f"\n{minutes:.1f} minutes\n")
    print(board.last_lines)
    return int(bool(board.missed))


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tool", action="append", choices=("nanstop", *PEERS), default=[])
    parser.add_argument("--peers", action="store_true", help="all the other tools")
    parser.add_argument("--case", action="append", default=[], metavar="NAME")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--cold", action="store_true", help="no run is forked")
    parser.add_argument("--table", action="store_true", help="only write the table of what is kept")
    parser.add_argument("--no-healthy", dest="healthy", action="store_false")
    parser.add_argument("--no-overhead", dest="overhead", action="store_false")
    return parser.parse_args(arguments)


def _run(tool: str, runs: Sequence[Run], asked: argparse.Namespace) -> None:
    """Run everything and keep each record as it comes."""
    num_done = 0

    def done(run: Run, found: dict[str, Any]) -> None:
        nonlocal num_done
        num_done += 1
        _keep(run.tool, {"runs": {run.name: found}})
        if run.tool == "traincheck":
            twin = twin_record(found) or found
            _keep(run.tool, {"runs": {run.name.replace(".case", ".healthy"): twin}})
        said = found["said"]
        heard = said["failed"][:80] or ", ".join(code for code, _ in said["answers"])
        heard = heard or f"{said['alarms']} alarms"
        print(
            f"[{num_done}/{len(runs)}] {run.tool:12} {run.name}: {heard} ({said['seconds']:.0f} s)",
            flush=True,
        )

    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        if not asked.cold:
            run_all(runs, scratch, asked.at_once, done)
            return
        for number, run in enumerate(runs):
            done(run, run_cold(run, scratch / str(number)))


def _keep(tool: str, more: dict[str, Any]) -> None:
    """Add to what is kept of a tool: runs replace those of their name, all else what was there."""
    path = RESULTS / f"{tool.replace(' ', '_')}.json"
    kept = json.loads(path.read_text()) if path.is_file() else {"tool": tool, "runs": {}}
    runs = kept["runs"] | more.pop("runs", {})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept | more | {"runs": dict(sorted(runs.items()))}, indent=1) + "\n")


def _forget_removed() -> None:
    """Drop what is kept of cases that are no more."""
    known = {truth.name for truth in load_truths()}
    for path in RESULTS.glob("*.json"):
        kept = json.loads(path.read_text())
        runs = kept["runs"].items()
        kept["runs"] = {
            name: run
            for name, run in runs
            if name.startswith("healthy.") or name.rpartition(".")[0] in known
        }
        path.write_text(json.dumps(kept, indent=1) + "\n")


def _versions(python: Path) -> dict[str, str]:
    """Return the versions of what the runs of a tool use."""
    code = (
        "import json; from importlib.metadata import distributions;"
        "print(json.dumps({d.name: d.version for d in distributions()}))"
    )
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    installed = json.loads(done.stdout)
    found = {name: installed[name] for name in _PACKAGES if name in installed}
    asked = ("git", "-C", str(HERE), "describe", "--always", "--dirty")
    source = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return {"python": platform.python_version(), **found, "source": source}


if __name__ == "__main__":
    sys.exit(main())
