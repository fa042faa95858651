"""Two ranks of which one is killed, stopped for a while or delayed at a random moment of a step or
of an investigation: does anything hang, and is what lies on the disk whole and finite?

    OMP_NUM_THREADS=1 python benchmarks/disturbed.py [--seeds FROM TO] [--keep FOLDER]

Each seed draws a run: DDP or FSDP2, healthy or with a fault, which remedies are allowed, whom what
happens to and when, and whether its launcher ends the other rank as torchrun does. This process
imports torch once; every rank is a fork, under a forked ``nanstop run``. Runs that are kept are not
made again: ``results/disturbed.json``. Writes its section of ``docs/ranks.md``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from disturbed_table import RESULTS, problems, shown
from ranks_page import write_page
from rich.console import Console
from scoreboard_warm import fork, scratch

from nanstop.errors import NanstopError
from nanstop.process.children.fork_server_process import STILL, cannot_fork, import_all
from nanstop.process.children.isolate import reap
from nanstop.store.incidents import load_report, load_series, load_summary

PROGRAM = Path(__file__).with_name("disturbed_program.py")
IMPORTS = (
    "torch.distributed.fsdp",
    "torch.distributed.device_mesh",
    "torch.nn.parallel",
    "torch._dynamo",
    "torch.onnx",
    "torch.nn.utils.parametrizations",
    "typer.main",
    "nanstop.cli.run",
    "nanstop.commands.run.launch",
    "nanstop.hosts.script.sinks",
    "nanstop.hosts.script.steps",
    "nanstop.hosts.loop.controller",
    "nanstop.report.text.runs",
    "nanstop.process.inject.start",
    "nanstop.session.session",
    "nanstop.session.failing.failures",
    "nanstop.session.failing.investigation",
    "nanstop.hosts.sharded.models",
)
HUNG_SECONDS = 150
GRACE_SECONDS = 30
"""From SIGTERM to SIGKILL, as torchrun has it."""
NOBODY = {"rank": -1, "how": "none", "by": "clock", "at": 0.0, "seconds": 0.0, "inside": False}
COUNTS = {**NOBODY, "rank": -2, "by": "calls", "at": -1}
_FAULTS = ("none", "none", "none", "scaler", "data", "data", "gradient", "half", "eps")
_ALLOWED = {"data": "drop_sample", "eps": "optimizer_eps"}
_LONG = ("gradient",)
"""Their investigations make ten million calls, which take much longer when they are counted."""
_SETTINGS = {"NANSTOP_RANKS_SECONDS": "3"}
_PATIENT = {"NANSTOP_RANKS_SECONDS": "30"}
"""Where nobody is disturbed."""


@dataclass(frozen=True)
class Plan:
    """What is run. ``allow``: a remedy that is allowed, or ""; ``rank``: of the fault."""

    kind: str
    fault: str
    rank: int
    allow: str


@dataclass
class Ended:
    """What a run came to. ``codes``: of both launchers, None for one that hung; ``whole``: records
    that the store reads; ``broken``: those that it does not; ``empty``: folders of incidents with
    nothing in them yet; ``weights``: files of weights, ``bad`` of them not finite.
    """

    seed: int
    plan: dict[str, Any]
    moment: dict[str, Any]
    strict: bool
    struck: bool = False
    codes: list[int | None] = field(default_factory=list)
    seconds: float = 0.0
    whole: int = 0
    broken: list[str] = field(default_factory=list)
    empty: int = 0
    weights: int = 0
    bad: list[str] = field(default_factory=list)
    same: bool | None = None
    """Whether the weights at the end are those of the run that nobody disturbed; None where one has
    not come to its end."""


def draw(seed: int) -> Ended:
    """Return the run of a seed, which is not yet run."""
    drawn = random.Random(seed)
    fault = drawn.choice(_FAULTS)
    plan = Plan(
        kind=drawn.choice(("ddp", "fsdp")),
        fault=fault,
        rank=drawn.randrange(2) if fault in ("data", "gradient", "half") else 0,
        allow=_ALLOWED.get(fault, "") if drawn.random() < 0.5 else "",
    )
    how, by = drawn.choice(("kill", "stop", "delay")), drawn.choice(("calls", "clock"))
    if fault in _LONG:
        how, by = {"delay": "stop"}.get(how, how), "clock"
    moment = {
        "rank": drawn.randrange(2),
        "how": how,
        "by": "calls" if how == "delay" else by,
        "seconds": round(drawn.choice((drawn.uniform(0.1, 2.0), drawn.uniform(4.0, 8.0))), 2),
        "inside": fault not in ("none", "scaler") and drawn.random() < 0.6,
        "at": drawn.random(),
    }
    return Ended(seed, asdict(plan), moment, strict=drawn.random() < 0.5)


@cache
def measured(plan: Plan, folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return what each rank tells of two runs that nobody disturbs: the second counts calls."""
    told = []
    runs = (("clock", NOBODY), ("calls", NOBODY if plan.fault in _LONG else COUNTS))
    for name, moment in runs:
        there = folder / f"measured-{plan.kind}-{plan.fault}-{plan.rank}-{plan.allow}-{name}"
        codes = run(plan, moment, there, strict=False)
        files = [there / f"rank{rank}" / f"result-{rank}.json" for rank in range(2)]
        if not all(file.exists() for file in files):
            told.append([{}, {}])
            if codes != [3, 3]:
                raise RuntimeError(f"{plan} ended with {codes}, see {there}")
        else:
            told.append([json.loads(file.read_text()) for file in files])
    return told[0], told[1]


def disturb(ended: Ended, folder: Path) -> None:
    """Run what was drawn, and look at what it left."""
    plan, moment = Plan(**ended.plan), dict(ended.moment)
    clock, calls = measured(plan, folder)
    share, rank = moment["at"], moment["rank"]
    by = calls if moment["by"] == "calls" else clock
    moment["at"] = _moment(by[rank], share, moment)
    there = folder / f"seed{ended.seed}"
    began = time.monotonic()
    ended.codes = run(plan, moment, there, strict=ended.strict)
    ended.seconds = round(time.monotonic() - began, 2)
    ended.moment = moment
    ended.struck = (there / f"rank{rank}" / f"struck-{rank}").exists()
    look(ended, there)
    results = [there / f"rank{one}" / f"result-{one}.json" for one in range(2)]
    if all(one.exists() for one in results) and clock[0]:
        digests = [json.loads(one.read_text())["digest"] for one in results]
        ended.same = digests == [one["digest"] for one in clock]


def _moment(told: dict[str, Any], share: float, moment: dict[str, Any]) -> float:
    """Return the moment that lies at a ``share`` of the run, or of the step with the fault."""
    place = 0 if moment["by"] == "calls" else 1
    if not told:  # a run that is stopped has told nothing
        whole = 40_000 if place == 0 else 2.0
    elif moment["inside"]:
        whole = told["marks"][1][place] - told["marks"][0][place]
    else:
        whole = (told["calls"], told["seconds"])[place]
    return int(share * whole) if place == 0 else round(share * whole, 4)


def run(plan: Plan, moment: dict[str, Any], folder: Path, *, strict: bool) -> list[int | None]:
    """Run two ranks as a launcher does; return their exit codes, None for one that hung."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    kept = {name: text for name, text in os.environ.items() if not name.startswith("NANSTOP")}
    settings = _SETTINGS if moment["rank"] >= 0 else _PATIENT
    known = kept | settings | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    known |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    words = ["-m", "nanstop", "run", "--out", str(folder / "out")]
    words += ["--allow", plan.allow] if plan.allow else []
    words += [str(PROGRAM), plan.kind, plan.fault, str(plan.rank)]
    running: dict[int, int] = {}
    for rank in range(2):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "DISTURB": json.dumps(moment)}
        (folder / f"rank{rank}").mkdir(parents=True)
        job = {"folder": str(folder / f"rank{rank}"), "environment": known | own, "command": words}
        running[fork(job)] = rank
    codes: list[int | None] = [None, None]
    until, ending = time.monotonic() + HUNG_SECONDS, None
    while running and time.monotonic() < until:
        for pid, rank in tuple(running.items()):
            found = reap(pid, wait=False)
            if found is None:
                continue
            codes[rank] = found[0]
            del running[pid]
            if found[0] and strict and ending is None:
                ending = time.monotonic() + GRACE_SECONDS
                for other in running:
                    os.kill(other, signal.SIGTERM)
        if ending is not None and time.monotonic() > ending:
            break
        time.sleep(0.02)
    for pid in running:
        os.killpg(pid, signal.SIGKILL)
        reap(pid, wait=True)
    return codes


def look(ended: Ended, folder: Path) -> None:
    """Read all that a run has left, as the store does and as whoever loads weights does."""
    out = folder / "out"
    loads = {"report.json": load_report, "summary.json": load_summary, "series.json": load_series}
    for file in sorted(out.rglob("*.json")):
        if file.name not in loads:
            continue
        try:
            loads[file.name](file)
            ended.whole += 1
        except NanstopError as error:
            ended.broken.append(f"{file.relative_to(folder)}: {error.message}")
    for page in out.rglob("*.html"):
        if not page.read_text().rstrip().endswith("</html>"):
            ended.broken.append(f"{page.relative_to(folder)}: cut off")
    ended.empty = sum(one.is_dir() and not any(one.iterdir()) for one in out.glob("[0-9]*"))
    for file in sorted(folder.rglob("weights-*.pt")):
        ended.weights += 1
        if not all(bool(one.isfinite().all()) for one in torch.load(file).values()):
            ended.bad.append(str(file.relative_to(folder)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 200))
    parser.add_argument("--keep", type=Path, help="where folders of runs are left")
    parser.add_argument("--again", action="store_true", help="runs that are kept, too")
    options = parser.parse_args()
    import_all([(name, []) for name in IMPORTS], STILL)
    torch.set_num_threads(1)
    refused = cannot_fork()
    assert not refused, refused
    gc.freeze()
    kept = json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else []
    known = {one["seed"]: one for one in kept}
    with scratch() as temporary:
        folder = options.keep or temporary
        for seed in range(*options.seeds):
            if seed in known and not options.again:
                continue
            ended = draw(seed)
            shutil.rmtree(folder / f"seed{seed}", ignore_errors=True)
            disturb(ended, folder)
            known[seed] = asdict(ended)
            print(json.dumps(known[seed]), flush=True)
            runs = [known[one] for one in sorted(known)]
            told = {"torch": torch.__version__, "hung_seconds": HUNG_SECONDS, "runs": runs}
            RESULTS.write_text(json.dumps(told) + "\n")
    Console(width=100).print(shown(runs := [known[one] for one in sorted(known)]))
    write_page()
    wrong = problems(runs)
    print("\n".join(wrong) or "nothing hung, all is whole and finite")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
