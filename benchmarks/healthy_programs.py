"""Run healthy programs (``healthy/``) plain and watched; all must be equal and nothing said.

    python benchmarks/healthy_programs.py [--script NAME ...] [--plain | --table]

The mechanism is that of ``foreign.py``. What was seen is kept in ``results/healthy.json``; the
page, ``docs/healthy.md``, is made of all that is kept. The exit code is 1 if something differs or
is said. ``--plain``: run them without nanstop only, and show how each ends.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from foreign import Row, compare  # noqa: E402  (found above)
from foreign_runs import Left, Run, Script, run_all, scripts  # noqa: E402

FOLDER = HERE / "healthy"
RESULTS = HERE / "results" / "healthy.json"
PAGE = HERE.parent / "docs" / "healthy.md"
_ABOUT = """# Healthy programs

Programs beyond language models, each written as its community writes it
(`benchmarks/healthy/`); not one knows of nanstop, and none of them is wrong. Each is run plain and
under `nanstop run`: the CRC32 of all weights and buffers and of the random state after every step,
the losses, the outputs, stdout, stderr and the exit code must be those of the plain run, and
nothing may be said. The 25 scripts of `docs/foreign.md` come on top, in all their precisions.

Again: `make healthy`. What each run said: `benchmarks/results/healthy.json`.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for and write the page; return 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--script", action="append", default=[], metavar="NAME")
    parser.add_argument("--plain", action="store_true", help="without nanstop only")
    parser.add_argument("--table", action="store_true", help="only write the page of what is kept")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args(arguments)
    chosen = [one for one in scripts(asked.script, FOLDER) if one.is_installed]
    if asked.plain:
        return _plain(chosen, asked.at_once)
    kept: dict[str, Row] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    if not asked.table:
        runs = [
            Run(one, "fp32", "none", policy) for one in chosen for policy in ("plain", "repair")
        ]
        compare(runs, at_once=asked.at_once, done=lambda name, row: _keep(kept, name, row))
    known = {one.name for one in scripts(folder=FOLDER)}
    kept = {name: row for name, row in sorted(kept.items()) if row["script"] in known}
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    PAGE.write_text("\n".join(_page(kept)) + "\n")
    print(_last_line(kept))
    return int(any(row["wrong"] for row in kept.values()))


def _plain(chosen: Sequence[Script], at_once: int) -> int:
    bad: list[str] = []

    def done(run: Run, left: Left) -> None:
        finite = bool(left.end) and all(line["finite"] for line in (*left.steps, left.end or {}))
        healthy = left.code == 0 and finite
        bad.extend([] if healthy else [run.script.name])
        losses = [line["loss"] for line in left.steps]
        shown = f"{losses[0]:.4g} -> {losses[-1]:.4g}" if losses else ""
        end = left.end and left.end["loss"]
        verdict = "ok" if healthy else "WRONG"
        print(f"{verdict:6}{run.script.name}: {len(losses)} steps, {shown}, {end}", flush=True)
        if not healthy:
            print(left.stderr[-600:], flush=True)

    with tempfile.TemporaryDirectory() as folder:
        runs = [Run(one, "fp32", "none", "plain") for one in chosen]
        run_all(runs, Path(folder), at_once, done)
    return int(bool(bad))


def _keep(kept: dict[str, Row], name: str, row: Row) -> None:
    """Keep what was seen of a program; one that is not well by itself is no healthy one."""
    ending = row["plain"]
    if ending["code"] != 0 or not ending["finite"]:
        row["wrong"].append("not well by itself")
    kept[name] = row
    print(f"{name}: {'; '.join(row['wrong']) or 'as it must be'}", flush=True)


def _last_line(rows: Mapping[str, Row]) -> str:
    good = sum(not row["wrong"] for row in rows.values())
    alarms = sum(bool(row["said"]) for row in rows.values())
    unwatched = sum(bool(row["unwatched"]) for row in rows.values())
    return (
        f"{good} of {len(rows)} programs: bitwise equal and nothing said; "
        f"{alarms} false alarms; {unwatched} not watched, which is said"
    )


def _page(rows: Mapping[str, Row]) -> Iterator[str]:
    yield from (_ABOUT, f"**{_last_line(rows)}.**", "")
    yield "| program | what it is | watched | steps | loss at the end |"
    yield "|---|---|---|---|---|"
    for row in rows.values():
        ending = row["plain"]
        about = _about(FOLDER / f"{row['script']}.py")
        result = "; ".join(row["wrong"]).replace("|", "\\|") or _equal(row)
        loss = f"{float(ending['loss']):.4g}" if ending["loss"] else "-"
        yield f"| {row['script']} | {about} | {result} | {ending['steps']} | {loss} |"


def _equal(row: Mapping[str, Any]) -> str:
    return "equal, but not watched" if row["unwatched"] else "equal"


def _about(path: Path) -> str:
    found = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(found.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
