"""What nanstop says of faults that are finite (``silent/``), each in several spellings.

    python benchmarks/silent.py [--fault NAME ...] [--again | --verify | --table]

The first run of all is kept in ``results/silent.json`` for good; ``--again`` keeps a later one
beside it, and ``docs/silent.md`` shows both. ``--verify`` runs every script without nanstop: each
ends well, with a finite loss that is not that of its twin.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "cases"), str(HERE)]

from scoreboard_runs import Run, run_all  # noqa: E402  (found through the line above)
from silent_faults import Spelling, load_spellings  # noqa: E402
from silent_table import page  # noqa: E402

RESULTS = HERE / "results" / "silent.json"
PAGE = HERE.parent / "docs" / "silent.md"
FIRST, AGAIN = "first run", "last run"
TWINS = ("case", "healthy")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for and write the page; return 1 if a script is not what it should be."""
    asked = _arguments(arguments)
    spellings = load_spellings(tuple(asked.fault))
    if asked.verify:
        return min(1, sum(_complain(one, found) for one, found in _verified(spellings, asked)))
    kept: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    if not asked.table:
        if FIRST in kept and not asked.again:
            raise SystemExit("the first run is kept; --again keeps another one beside it")
        name = AGAIN if FIRST in kept else FIRST
        before = kept.get(name, {}) if asked.fault else {}
        kept[name] = dict(sorted((before | _run("nanstop", spellings, asked)).items()))
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    text, last = page(load_spellings(), kept)
    PAGE.write_text(text)
    print(last)
    return 0


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fault", action="append", default=[], metavar="NAME")
    parser.add_argument("--again", action="store_true", help="run them once more")
    parser.add_argument("--verify", action="store_true", help="run them without nanstop")
    parser.add_argument("--table", action="store_true", help="only write the page of what is kept")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1)
    return parser.parse_args(arguments)


def _run(tool: str, spellings: Sequence[Spelling], asked: argparse.Namespace) -> dict[str, Any]:
    """Return the record of each script, as a case and as its twin, by name."""
    found: dict[str, Any] = {}

    def done(run: Run, record: dict[str, Any]) -> None:
        found[run.name] = record
        said = record["said"]
        heard = ", ".join(code for code, _ in said["answers"]) or "nothing"
        print(f"{tool:8} {run.name}: {said['failed'] or heard}", flush=True)

    runs = [
        Run(tool, f"{one.fault}.{one.name}.{twin}", one.script, (one.name, twin))
        for one in spellings
        for twin in TWINS
    ]
    with tempfile.TemporaryDirectory() as folder:
        run_all(runs, Path(folder), asked.at_once, done)
    return found


def _verified(spellings: Sequence[Spelling], asked: argparse.Namespace) -> Any:
    found = _run("plain", spellings, asked)
    for one in spellings:
        yield one, [found[f"{one.fault}.{one.name}.{twin}"] for twin in TWINS]


def _complain(one: Spelling, found: Sequence[dict[str, Any]]) -> bool:
    """Print what is wrong with a script by itself, if anything is."""
    losses = [record["said"]["final_loss"] for record in found]
    wrong = [
        f"{twin} ended with {record['code']}\n{record['stderr'][-600:]}"
        for twin, record in zip(TWINS, found, strict=True)
        if record["code"]
    ]
    if not all(map(math.isfinite, losses)) or losses[0] == losses[1]:
        wrong.append(f"final losses {losses}")
    print(f"{'WRONG' if wrong else 'ok':6} {one.fault}.{one.name} {losses} {'; '.join(wrong)}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
