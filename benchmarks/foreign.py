"""Run training scripts that know nothing of nanstop plain and watched; write what differs.

    python benchmarks/foreign.py [--script NAME ...] [--policy NAME ...]
                                 [--no-faults] [--no-cold] [--table]

Every script of ``foreign/`` in each of its precisions, healthy and with each of its faults, plain
and under every policy. Runs are forked from a warm process (see ``scoreboard_warm.py``); one of
each script's is a process of its own under ``nanstop run`` besides. What was seen is kept in
``results/foreign.json``; the page, ``docs/foreign.md``, is made of all that is kept. The exit code
is 1 if something is not as it must be. Scripts whose packages are not installed are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from foreign_runs import POLICIES, Left, Run, Script, run_all, scripts  # noqa: E402  (found above)
from foreign_table import last_lines, write_page  # noqa: E402
from foreign_verdict import wrong  # noqa: E402

RESULTS = HERE / "results" / "foreign.json"
PAGE = HERE.parent / "docs" / "foreign.md"
Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for, write the page and print its last lines;
    return 1 if something is wrong.
    """
    asked = _arguments(arguments)
    chosen = scripts(asked.script)
    began = time.monotonic()
    if not asked.table:
        for script in chosen:
            if not script.is_installed:
                print(f"skipped: {script.name} ({', '.join(script.imports)} not installed)")
        runs = [run for script in chosen if script.is_installed for run in _runs(script, asked)]
        compare(runs, at_once=asked.at_once, done=_show_and_keep)
    rows = json.loads(RESULTS.read_text())
    write_page(rows, PAGE)
    print(f"{(time.monotonic() - began) / 60:.1f} minutes\n")
    print(last_lines(rows))
    return int(any(row["wrong"] for row in rows.values()))


def _placeless(text: str) -> str:
    """Return a text without the folders of the machine that it was written on."""
    return text.replace(sys.prefix, "$VENV").replace(str(HERE.parent), "$ROOT")


def compare(
    runs: Sequence[Run],
    *,
    at_once: int = 1,
    done: Callable[[str, Row], None] = lambda name, row: None,
) -> dict[str, Row]:
    """Run everything; return, by name, what each watched run said and what was wrong with it.

    ``done`` is told of each as it comes.
    """
    plain: dict[Run, Left] = {}
    rows: dict[str, Row] = {}

    def seen(run: Run, found: Left) -> None:
        if run.policy == "plain":
            plain[run] = found
        else:
            before = plain[replace(run, policy="plain", cold=False)]
            rows[run.name] = _row(run, before, found)
            done(run.name, rows[run.name])

    with tempfile.TemporaryDirectory() as folder:
        run_all(runs, Path(folder), at_once, seen)
    return rows


def _show_and_keep(name: str, row: Row) -> None:
    print(f"{name}: {'; '.join(row['wrong']) or 'as it must be'}", flush=True)
    _keep({name: row})


def _row(run: Run, plain: Left, found: Left) -> Row:
    return {
        "script": run.script.name,
        "dtype": run.dtype,
        "fault": run.fault,
        "policy": run.policy,
        "cold": run.cold,
        "wrong": wrong(run, plain, found),
        "said": list(dict.fromkeys(found.said)),
        "plain": _ending(plain),
        "watched": _ending(found),
        "unwatched": found.unwatched,
        "stderr": _placeless(found.stderr)[-1500:] if found.said or found.own else "",
    }


def _ending(left: Left) -> dict[str, Any]:
    end = left.end or {}
    good = all(line["finite"] for line in left.steps)
    loss = repr(end["loss"]) if end else None  # as text: JSON has no NaN
    return {"code": left.code, "steps": len(left.steps), "loss": loss, "finite": good}


def _runs(script: Script, asked: argparse.Namespace) -> list[Run]:
    """Return the runs of a script:
    in health in all precisions, with its faults likewise, once as a user starts it.
    """
    faults = ("none", *script.faults) if asked.faults else ("none",)
    every = [
        Run(script, dtype, fault, policy)
        for fault in faults
        for dtype in script.dtypes
        if not asked.dtype or dtype in asked.dtype
        for policy in ("plain", *(asked.policy or POLICIES))
    ]
    cold = [run for run in every if run.fault == "none" and run.policy == "repair"][:1]
    return [*every, *(replace(run, cold=True) for run in cold if asked.cold)]


def _keep(rows: dict[str, Row]) -> None:
    """Replace what is kept of these runs; forget scripts that are no more."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    known = {script.name for script in scripts()}
    merged = {name: row for name, row in (kept | rows).items() if row["script"] in known}
    RESULTS.write_text(json.dumps(dict(sorted(merged.items())), indent=1) + "\n")


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--script", action="append", default=[], metavar="NAME")
    parser.add_argument("--policy", action="append", default=[], choices=POLICIES)
    parser.add_argument("--dtype", action="append", default=[], metavar="NAME")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-faults", dest="faults", action="store_false")
    parser.add_argument("--no-cold", dest="cold", action="store_false")
    parser.add_argument("--table", action="store_true", help="only write the page of what is kept")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
