"""What watching adds to the time of a step of several processes, beside what the machine makes of
two plain runs, and the bytes that it sends.

    OMP_NUM_THREADS=1 python benchmarks/ranks_overhead.py [--processes 4] [--pairs 12] [--steps 30]
        [--kinds ddp fsdp2] [--layers 6] [--hidden 256] [--length 64] [--no-page]

This process imports torch once; every rank is a fork, watched under a forked ``nanstop run``. In
each round a watched run lies between or beside two plain ones, in turn. With
``--hidden 384 --length 128`` a step is 4.5 times the work. Writes its section of ``docs/ranks.md``,
unless told not to.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from disturbed import IMPORTS
from intervals import interval
from ranks_overhead_table import RESULTS, holds, shown
from ranks_page import write_page
from rich.console import Console
from scoreboard_warm import fork, scratch

from nanstop.process.children.fork_server_process import STILL, cannot_fork, import_all
from nanstop.process.children.isolate import reap

PROGRAM = Path(__file__).with_name("ranks_overhead_program.py")
WARM_UP = 5
_ORDERS = (
    ("watched", "plain", "again"),
    ("plain", "watched", "again"),
    ("plain", "again", "watched"),
)
KINDS = {"ddp": "DDP", "fsdp2": "FSDP2"}
SIZES = ("layers", "hidden", "length")
_SECONDS = 3600


def run(kind: str, options: argparse.Namespace, *, watched: bool) -> list[dict[str, Any]]:
    """Return what each rank tells of one run."""
    with socket.socket() as free, scratch() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        kept = {name: text for name, text in os.environ.items() if not name.startswith("NANSTOP")}
        size = str(options.processes)
        kept |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "OMP_NUM_THREADS": "1"}
        kept |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        given = (options.steps, WARM_UP, *(getattr(options, name) for name in SIZES))
        words = [str(PROGRAM), kind, *map(str, given)]
        above = ["-m", "nanstop", "run", "--quiet", "--out", str(folder / "out")]
        running = []
        for rank in range(options.processes):
            (folder / str(rank)).mkdir()
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            job = {"folder": str(folder / str(rank)), "environment": kept | own}
            running.append(fork(job | {"command": above + words if watched else words}))
        _wait(running)
        if watched:
            assert json.loads((folder / "out" / "summary.json").read_text())["incidents"] == []
        files = (folder / str(rank) / f"result-{rank}.json" for rank in range(options.processes))
        return [json.loads(file.read_text()) for file in files]


def _wait(running: list[int]) -> None:
    until = time.monotonic() + _SECONDS
    waiting = set(running)
    while waiting and time.monotonic() < until:
        for pid in tuple(waiting):
            ended = reap(pid, wait=False)
            if ended is not None:
                waiting.remove(pid)
        time.sleep(0.05)
    for pid in waiting:
        os.killpg(pid, signal.SIGKILL)
        reap(pid, wait=True)


def seconds_of(told: list[dict[str, Any]]) -> float:
    """Return the mean step of the slowest rank."""
    return max(statistics.fmean(one["seconds"]) for one in told)


def measure(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    ratios, nulls, plain, sent = [], [], [], []
    for pair in range(options.pairs):
        told = {
            which: run(kind, options, watched=which == "watched")
            for which in _ORDERS[pair % len(_ORDERS)]
        }
        taken = {which: seconds_of(one) for which, one in told.items()}
        plain += [taken["plain"], taken["again"]]
        ratios.append(taken["watched"] / statistics.geometric_mean(plain[-2:]))
        nulls.append(taken["again"] / taken["plain"])
        sent.append(max(one["sent"] for one in told["watched"]) / options.steps)
        print(f"{kind} {pair}: watched {ratios[-1]:.3f}, plain {nulls[-1]:.3f}", flush=True)
    (ratio, low, high), (null, null_low, null_high) = interval(ratios), interval(nulls)
    row = {"kind": KINDS[kind], "seconds": statistics.median(plain)}
    row |= {"parameters": told["watched"][0]["parameters"]}
    row |= {"ratio": ratio, "low": low, "high": high}
    return row | {"null": null, "null_low": null_low, "null_high": null_high, "bytes": max(sent)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=256, help="divisible by 4")
    parser.add_argument("--length", type=int, default=64, help="tokens of each of 4 rows")
    parser.add_argument("--no-page", action="store_true", help="print the table, write nothing")
    options = parser.parse_args()
    import_all([(name, []) for name in IMPORTS], STILL)
    torch.set_num_threads(1)
    refused = cannot_fork()
    assert not refused, refused
    gc.freeze()
    rows = [measure(kind, options) for kind in options.kinds]
    Console(width=110).print(shown(rows))
    if options.no_page:
        return int(not all(map(holds, rows)))
    asked = {name: getattr(options, name) for name in ("processes", "pairs", "steps", *SIZES)}
    setting = asked | {"warm_up": WARM_UP, "cores": os.cpu_count(), "torch": torch.__version__}
    RESULTS.write_text(json.dumps({"setting": setting, "rows": rows}, indent=1) + "\n")
    write_page()
    return int(not all(map(holds, rows)))


if __name__ == "__main__":
    sys.exit(main())
