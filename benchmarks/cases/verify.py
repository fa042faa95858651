"""Check that cases are as their truth says:
``python benchmarks/cases/verify.py [--folder FOLDER] [NAME ...]``.

The case and its twin are run as they are (time, end, last loss), and once more under ``births.py``:
the operation that the truth names must be born non-finite where and when it says, and nothing may
be bad at an earlier step.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from truth import CASES, Truth, load_truths, matches

MOST_SECONDS = 25.0
_LOSS = re.compile(r"^final_loss=(\S+)$", re.MULTILINE)


def main() -> int:
    """Verify the named cases, or all; return 1 if one is not what its truth says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--folder", type=Path, default=CASES, help="where the cases lie")
    asked = parser.parse_args()
    wrong = 0
    for truth in load_truths(tuple(asked.names), cases=asked.folder.resolve()):
        complaints = verify(truth)
        wrong += bool(complaints)
        print(f"{'ok   ' if not complaints else 'WRONG'} {truth.name}", flush=True)
        for complaint in complaints:
            print(f"      {complaint}")
    return min(wrong, 1)


def verify(truth: Truth) -> list[str]:
    """Return what is not as the truth says; empty for a true case."""
    case, twin = _plain(truth.folder / "case.py"), _plain(truth.folder / "healthy.py")
    found = _complaints_about_ends(truth, case, twin) + _complaints_about_births(truth)
    if truth.line and truth.line not in (truth.folder / "case.py").read_text():
        found.append(f"no such line in case.py: {truth.line}")
    return found


def _complaints_about_ends(truth: Truth, case: dict[str, Any], twin: dict[str, Any]) -> list[str]:
    found = [
        f"{one} took {run['seconds']:.0f} s, more than {MOST_SECONDS:.0f}"
        for one, run in (("case.py", case), ("healthy.py", twin))
        if run["seconds"] > MOST_SECONDS
    ]
    if twin["code"] or not math.isfinite(twin["loss"]):
        found.append(f"healthy.py ended with {twin['code']}, loss {twin['loss']}\n{twin['err']}")
    if truth.kind in ("silent", "scary") and (case["code"] or not math.isfinite(case["loss"])):
        found.append(f"case.py ended with {case['code']}, loss {case['loss']}\n{case['err']}")
    if truth.kind == "silent" and case["loss"] == twin["loss"]:
        found.append("a silent case ends with the loss of its twin")
    return found


def _complaints_about_births(truth: Truth) -> list[str]:
    twin = _recorded(truth.folder / "healthy.py")
    found = [f"healthy.py: {what} not finite at {at}" for what, at in twin["first"].items()]
    case = _recorded(truth.folder / "case.py")
    if truth.kind in ("silent", "scary") and "param" in case["first"]:
        found.append(f"case.py: a parameter is not finite at {case['first']['param']}")
    if truth.step is not None and case["first"]:
        first = min(at[0] for at in case["first"].values())
        if first < truth.step:
            found.append(f"case.py is bad at step {first} already: {case['first']}")
    if truth.op and not any(_is_birth(truth, birth) for birth in case["births"]):
        shown = "\n        ".join(json.dumps(birth) for birth in case["births"][:12])
        found.append(f"case.py: no such birth; ended: {case['ended']}\n        {shown}")
    return found


def _is_birth(truth: Truth, birth: dict[str, Any]) -> bool:
    phases = {"loss": ("forward",), "recompute": ("backward",)}.get(
        truth.phase or "", (truth.phase,)
    )
    return (
        matches(birth["op"], truth.op)
        and matches(birth["module"], truth.module)
        and (truth.phase in (None, "generate", "evaluate") or birth["phase"] in phases)
        and truth.step in (None, birth["step"])
        and truth.micro in (None, birth["micro"])
    )


def _plain(script: Path) -> dict[str, Any]:
    began = time.monotonic()
    done = _child([str(script)])
    losses = _LOSS.findall(done.stdout)
    return {
        "code": done.returncode,
        "loss": float(losses[-1]) if losses else math.nan,
        "seconds": time.monotonic() - began,
        "err": done.stderr[-1500:],
    }


def _recorded(script: Path) -> dict[str, Any]:
    done = _child([str(CASES / "births.py"), str(script)])
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        ended = f"died with {done.returncode}: {done.stderr[-500:]}"
        return {"births": [], "first": {}, "steps": 0, "ended": ended}


def _child(words: list[str]) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(CASES), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            [sys.executable, *words],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )


if __name__ == "__main__":
    sys.exit(main())
