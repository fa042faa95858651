"""What nanstop says of 30 failures that it was never improved on (``first_sight/``), run once.

    python benchmarks/first_sight.py [--again | --table]

The first run is kept in ``results/first_sight.json`` for good; ``--again`` keeps a later one beside
it, and ``docs/first-sight.md`` shows both. What nanstop does wrong here is mended by its mechanism
or left, never by the case.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "cases"), str(HERE)]

from scoreboard_lines import share  # noqa: E402  (found through the line above)
from scoreboard_runs import Run, run_all, runs_of  # noqa: E402
from scoreboard_said import said_in  # noqa: E402
from scoring import COLUMNS, Row, Said, certain_and_wrong, rates, score  # noqa: E402
from truth import Truth, load_truths  # noqa: E402

CASES = HERE / "first_sight"
RESULTS = HERE / "results" / "first_sight.json"
PAGE = HERE.parent / "docs" / "first-sight.md"
FIRST, AGAIN = "first run", "last run"
JUDGED = {
    (
        "clipping-to-a-norm-of-zero",
        "NS307",
    ): "true: no gradient is left at the update, and the line",
    (
        "codebook-entry-that-nobody-chose",
        "NS506",
    ): "true: the buffer is not finite before the step, and the line that made it so",
    ("gradients-cleared-within-the-window", "NS306"): "true: what is cleared, and the line",
}
"""Answers at `certain` by codes that there were none of when the truths were frozen: what a look at
the script, and at what the last run said of it, has come to."""
_ABOUT = """# First sight

Thirty failures from public threads (`benchmarks/first_sight/`), written without a look at
nanstop's rules, frozen before the first run and run once: what nanstop makes of scripts that it
was never improved on. The columns are those of the scoreboard. The first run stays as it was; a
later one stands beside it.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases, unless they have been run, and write the page."""
    asked = _arguments(arguments)
    kept: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    if not asked.table:
        if FIRST in kept and not asked.again:
            raise SystemExit("the first run is kept; --again keeps another one beside it")
        kept[FIRST if FIRST not in kept else AGAIN] = _run()
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    PAGE.write_text(_page(load_truths(cases=CASES), kept))
    return 0


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--again", action="store_true", help="run them once more")
    parser.add_argument("--table", action="store_true", help="only write the page of what is kept")
    return parser.parse_args(arguments)


def _run() -> dict[str, Any]:
    found: dict[str, Any] = {}

    def done(run: Run, record: dict[str, Any]) -> None:
        found[f"{run.tool}.{run.name}"] = record
        heard = ", ".join(code for code, _ in record["said"]["answers"]) or "nothing"
        print(f"{run.tool:8} {run.name}: {heard}", flush=True)

    truths = load_truths(cases=CASES)
    with tempfile.TemporaryDirectory() as folder:
        runs = [*runs_of("plain", truths), *runs_of("nanstop", truths)]
        run_all(runs, Path(folder), os.cpu_count() or 1, done)
    return dict(sorted(found.items()))


def _page(truths: Sequence[Truth], kept: Mapping[str, Any]) -> str:
    parts = [_ABOUT]
    for name, records in kept.items():
        said = {run: said_in(record) for run, record in records.items()}
        rows = {truth.name: _row(truth, said) for truth in truths}
        parts.append("\n".join([f"## {name.capitalize()}", "", *_figures(truths, rows, said)]))
    last = kept.get(AGAIN) or kept.get(FIRST) or {}
    said = {run: said_in(record) for run, record in last.items()}
    return "\n\n".join(part.strip() for part in [*parts, _cases(truths, said)]) + "\n"


def _row(truth: Truth, said: Mapping[str, Said]) -> Row:
    case, twin = (said[f"nanstop.{truth.name}.{one}"] for one in ("case", "healthy"))
    plain = said[f"plain.{truth.name}.healthy"]
    return score(truth, case, twin, plain.final_loss)


def _figures(
    truths: Sequence[Truth], rows: Mapping[str, Row], said: Mapping[str, Said]
) -> list[str]:
    """Return each column's share, of the loud cases and of the silent ones."""
    kinds = ("loud", "silent")
    by_kind = {kind: rates(rows[t.name] for t in truths if t.kind == kind) for kind in kinds}
    lines = ["| | loud | silent |", "|---|---|---|"]
    for column in COLUMNS:
        cells = [
            share(*by_kind[kind][column]) if by_kind[kind][column][1] else "-" for kind in kinds
        ]
        lines.append(f"| {column} | {' | '.join(cells)} |")
    found = [
        (truth.name, code)
        for truth in truths
        for code in certain_and_wrong(
            truth, said[f"nanstop.{truth.name}.case"], said[f"nanstop.{truth.name}.healthy"]
        )
    ]
    judged = [
        f"- {name}, {code}: {JUDGED.get((name, code), 'not looked at')}" for name, code in found
    ]
    head = "Said at `certain` and not accepted by the truth"
    if not found:
        return [*lines, "", f"{head}: none."]
    return [*lines, "", f"{head}, which was frozen before there were these codes:", "", *judged]


def _cases(truths: Sequence[Truth], said: Mapping[str, Said]) -> str:
    lines = [
        "## Case by case",
        "",
        "| case | kind | truth | said | wrong |",
        "|---|---|---|---|---|",
    ]
    for truth in truths if said else ():
        row, case = _row(truth, said), said[f"nanstop.{truth.name}.case"]
        wrong = ", ".join(name for name in COLUMNS if row[name] is False) or "-"
        answer = " ".join(case.answers[0]) if case.answers else "-"
        cells = (truth.name, truth.kind, ", ".join(truth.codes), answer, wrong)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
