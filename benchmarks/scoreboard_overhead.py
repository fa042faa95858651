"""What each tool costs on a few healthy twins:
interleaved pairs of processes, with and without, in alternating order.

Only steps are timed, from the end of one optimizer step to the end of the next; imports and the
first two steps are not. The twins are tiny, so that fixed costs show as much as they ever do:
``overhead.py`` has a model of ordinary shape.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from scoreboard_runs import HERE, environment

TWINS = (
    "clip-before-unscale",
    "eager-attention-overflow",
    "cross-entropy-of-no-token",
    "bf16-weights-stand-still",
    "sft-labels-all-masked",
)
WARM_UP = 2
TIMEOUT = 120.0


def measure(tool: str, python: Path, pairs: int | None = None) -> dict[str, Any]:
    """Return of each twin the plain step in milliseconds and the ratios, and the median ratio of
    all; or why not.
    """
    if tool == "traincheck":
        return {"failed": "it rewrites the script; its own documentation has figures"}
    num_pairs = pairs or (4 if tool == "nanstop" else 2)
    rows: dict[str, dict[str, Any]] = {}
    for twin in TWINS:
        script = HERE / "cases" / twin / "healthy.py"
        if not script.is_file():
            continue
        found = [_pair(tool, python, script, number) for number in range(num_pairs)]
        good = [(plain, watched) for plain, watched in found if plain and watched]
        if good:
            rows[twin] = {
                "plain_ms": round(1000 * statistics.median(plain for plain, _ in good), 2),
                "ratios": [round(watched / plain, 3) for plain, watched in good],
            }
    if not rows:
        return {"failed": "no twin ran to its end"}
    medians = [statistics.median(row["ratios"]) for row in rows.values()]
    return {"twins": rows, "median": round(statistics.median(medians), 3)}


def _pair(tool: str, python: Path, script: Path, number: int) -> tuple[float, float]:
    """Return the median seconds of a step without the tool and with it; 0 for a run that failed."""
    order = ("plain", tool) if number % 2 else (tool, "plain")
    times = {name: _step_seconds(name, python, script) for name in order}
    return times["plain"], times[tool]


def _step_seconds(tool: str, python: Path, script: Path) -> float:
    above = ["-m", "nanstop", "run", "--out", "found"] if tool == "nanstop" else []
    peer = "plain" if tool == "nanstop" else tool
    command = [str(python), *above, str(HERE / "peers" / "under.py"), peer, str(script)]
    with tempfile.TemporaryDirectory() as folder:
        try:
            subprocess.run(
                command,
                cwd=folder,
                env=environment(),
                capture_output=True,
                timeout=TIMEOUT,
                check=True,
            )
            found = json.loads(Path(folder, "peer.json").read_text())
        except (subprocess.SubprocessError, FileNotFoundError):
            return 0.0
    steps = [after - before for before, after in itertools.pairwise(found["step_ends"])][WARM_UP:]
    return statistics.median(steps) if found["ended"] == "ok" and steps else 0.0
