"""Whole training scripts, run as strangers run them: alone, and under ``nanstop run``."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HEAD = """
import sys

import torch
import torch.nn.functional as F
from torch import nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)


def finish(*modules):
    tensors = [t for m in modules for t in m.state_dict().values()]
    print(" ".join(t.double().sum().item().hex() for t in tensors))
    print("finite", all(bool(t.isfinite().all()) for t in tensors))

"""

KEYS = {
    "schema": int,
    "incidents": list,
    "findings": list,
    "exit": int,
    "steps": int,
    "seconds": float,
}
ROW_KEYS = [
    "code",
    "codes",
    "title",
    "phase",
    "op",
    "module",
    "source",
    "step",
    "micro",
    "rank",
    "confidence",
    "verdict",
    "remedy",
    "action",
    "count",
    "folder",
]


@dataclass(frozen=True)
class Ended:
    """How a process ended, and what ``nanstop run`` left of it."""

    code: int
    out: bytes
    err: str
    summary: dict

    @property
    def rows(self):
        return self.summary["incidents"]


def run(folder, *command, watched=True, out="incidents", options=(), **environment):
    """Run a Python script of ``folder`` (or any command), watched or not, as a user would."""
    head = (
        [sys.executable, "-m", "nanstop", "run", "--out", out, *options]
        if watched
        else [sys.executable]
    )
    done = subprocess.run(
        [*head, *command],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=240,
        check=False,
    )
    return Ended(
        done.returncode,
        done.stdout,
        done.stderr.decode(errors="replace"),
        summary(folder, out) if watched else {},
    )


def summary(folder, out="incidents"):
    """``summary.json``, after what must hold of every one; {} where none was written."""
    path = Path(folder) / out / "summary.json"
    if not path.is_file():
        return {}
    found = json.loads(path.read_text())
    assert {name: type(found.get(name)) for name in KEYS} == KEYS
    for row in found["incidents"]:
        assert list(row) == ROW_KEYS
        record = json.loads((path.parent / row["folder"] / "report.json").read_text())
        assert record["incident"]["id"] == row["folder"]
    return found
