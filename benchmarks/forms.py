"""What a person types next: scripts that fail (``forms/``), watched, fixed, and run again.

    python benchmarks/forms.py [NAME ...] [--table]

Every script runs plain (as its healthy twin, and with ``bad`` as the failure), with ``bad`` under
``nanstop run``, and, after ``nanstop fix --apply``, plain with ``bad`` again. What is kept of them
is in ``results/forms.json``, and ``docs/forms.md`` is made of that.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "cases"), str(HERE)]

from forms_table import page  # noqa: E402  (found through the line above)
from scoreboard_runs import Run, run_all  # noqa: E402

SCRIPTS = HERE / "forms"
RESULTS = HERE / "results" / "forms.json"
PAGE = HERE.parent / "docs" / "forms.md"
_LOSS = re.compile(r"^final_loss=(\S+)$", re.MULTILINE)
_LOSSES = re.compile(r"^(?:final_)?loss[ =](\S+)$", re.MULTILINE)
TOGETHER = 12
"""Scripts that run between two writings of what is kept."""
MARK = "# fails"
_WORDS = {"twin": (), "bad": ("bad",), "watched": ("bad",), "fixed": ("bad",)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for and write the page; return 1 if a script is not what it should be."""
    asked = _arguments(arguments)
    kept: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    wrong = 0
    if not asked.table:
        names = asked.name or sorted(path.stem for path in SCRIPTS.glob("*.py"))
        present = {path.stem for path in SCRIPTS.glob("*.py")}
        for start in range(0, len(names), TOGETHER):
            found = _run(names[start : start + TOGETHER], asked.at_once)
            wrong += sum(_complain(name, one) for name, one in found.items())
            kept = {name: one for name, one in sorted((kept | found).items()) if name in present}
            RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    text, figures = page(kept)
    PAGE.write_text(text)
    print(figures)
    return min(1, wrong)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", nargs="*", help="scripts of forms/, by default all")
    parser.add_argument("--table", action="store_true", help="only write the page of what is kept")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1)
    return parser.parse_args(arguments)


def _run(names: Sequence[str], at_once: int) -> dict[str, dict[str, Any]]:
    """Return the record of each script by its name."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        project = place / "project"
        project.mkdir()
        found = {name: {"link": _link(name), "lines": _marked(name)} for name in names}
        for name in names:
            shutil.copy(SCRIPTS / f"{name}.py", project)

        def done(run: Run, record: dict[str, Any]) -> None:
            name, _, what = run.name.partition(".")
            found[name][what] = record
            print(f"{run.name}: {record}", flush=True)

        def run(tool: str, *all_of: str) -> None:
            runs = [
                Run(tool, f"{name}.{what}", project / f"{name}.py", _WORDS[what])
                for name in names
                for what in all_of
            ]
            (place / all_of[0]).mkdir()
            run_all(runs, place / all_of[0], at_once, done, _read)

        run("plain", "twin", "bad")
        run("nanstop", "watched")
        for name in names:
            watched = found[name]["watched"]
            found[name]["fix"] = _fix(project, Path(watched.pop("folder")))
            print(f"{name}: {found[name]['fix']}", flush=True)
        run("plain", "fixed")
    return json.loads(json.dumps(found).replace(f"{project}/", ""))


def _read(run: Run, folder: Path) -> dict[str, Any]:
    """Return how a run ended, and what nanstop said of it."""
    out = (folder / "stdout").read_text(errors="replace")
    last = _LOSS.findall(out)
    record: dict[str, Any] = {
        "final_loss": float(last[-1]) if last else None,
        "finite": all(math.isfinite(float(loss)) for loss in _LOSSES.findall(out)),
    }
    if run.tool == "nanstop":
        path = folder / "found" / "summary.json"
        rows = json.loads(path.read_text())["incidents"] if path.is_file() else []
        keys = ("code", "source", "step", "verdict", "remedy", "action")
        record["incidents"] = [{key: row[key] for key in keys} for row in rows]
        record["folder"] = str(path.parent / rows[0]["folder"]) if rows else str(path.parent)
    return record


def _fix(project: Path, incident: Path) -> dict[str, Any]:
    """Return what ``nanstop fix --apply`` did for an incident, in the folder of the scripts."""
    command = [sys.executable, "-m", "nanstop", "fix", str(incident), "--apply", "--json"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    try:
        said = json.loads(done.stdout)
    except json.JSONDecodeError:
        return {"status": "failed", "said": done.stderr.strip()[-500:]}
    return {
        "status": said["status"],
        "diff": "".join(one["diff"] for one in said["files"]),
        "words": said["words"],
        "overrides": len(said["overrides"]),
    }


def _link(name: str) -> str:
    text = (SCRIPTS / f"{name}.py").read_text()
    return re.findall(r"https://\S+", text)[0]


def _marked(name: str) -> list[int]:
    lines = (SCRIPTS / f"{name}.py").read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if line.endswith(MARK)]


def _complain(name: str, found: dict[str, Any]) -> bool:
    """Print what is wrong with a script by itself, if anything is."""
    twin, bad = found["twin"], found["bad"]
    wrong = twin["final_loss"] is None or not twin["finite"] or bad["finite"]
    if wrong:
        print(f"WRONG {name}: {bad}, its twin {twin}")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
