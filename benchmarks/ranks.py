"""What watching adds to a run of many ranks: requests to their store and bytes, counted with 1, 2,
4 and 8 real processes, what follows from the counts for up to 16,384, and how fast what 1,024 ranks
have written is read. Writes its section of ``docs/ranks.md``.

    python benchmarks/ranks.py [--processes 1 2 4 8]

Requests are counted where nanstop makes them, on each rank; it makes no collective of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ranks_page import write_page
from ranks_table import NUM_STEPS, REPORTED, RESULTS
from rich.console import Console
from rich.table import Table

SHOWN = (1, 2, 4, 8, 64, 1024, 16384)


@dataclass(frozen=True)
class Counted:
    """Of one run on ``size`` ranks. ``first``, ``others``: requests of rank 0, and the most of
    another rank; ``sent``: bytes of all ranks, keys and values. ``files``: what is in the incident
    folder at the end.
    """

    size: int
    fault: bool
    first: int
    others: int
    sent: int
    files: int


def train(fault: bool) -> None:
    """Be one rank of a loop, with a NaN in the data of the last one in step 3."""
    import torch
    from torch import distributed, nn

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    told = _Requests()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(rank)
    net: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    if size > 1:
        distributed.init_process_group("gloo")
        net = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in range(NUM_STEPS):
        x = torch.randn(4, 8, generator=draw)
        if fault and step == 3 and rank == size - 1:
            x[2, 1] = float("nan")
        loss = (net(x).squeeze(-1) - x.sum(-1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if size > 1:
        distributed.barrier()
        distributed.destroy_process_group()
    Path(os.environ["COUNTED"], f"{rank}.json").write_text(json.dumps([told.num, told.sent]))


class _Requests:
    """Counts what nanstop asks of the store, by its own prefix and threads."""

    def __init__(self) -> None:
        import threading

        from torch import distributed

        self.num = self.sent = 0
        for name in ("set", "get", "add", "check", "wait", "compare_set", "delete_key"):
            original = getattr(distributed.PrefixStore, name)

            def counted(store, *args, original=original):
                if threading.current_thread().name == "nanstop-ranks":
                    self.num += 1
                    self.sent += sum(len(str(one)) for one in args)
                return original(store, *args)

            setattr(distributed.PrefixStore, name, counted)


def count(size: int, *, fault: bool) -> Counted:
    """Return what a run asks of its store."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        known = {"WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        known |= {"COUNTED": folder, "OMP_NUM_THREADS": 1}
        words = [sys.executable, "-m", "nanstop", "run", "--quiet", "--allow", "drop_sample"]
        words += ["--out", f"{folder}/out", sys.executable, __file__, "--train"]
        words += ["--fault"] if fault else []
        ranks: list[subprocess.Popen[bytes]] = []
        for rank in range(size):
            own = known | {"RANK": rank, "LOCAL_RANK": rank}
            environment = os.environ | {name: str(value) for name, value in own.items()}
            ranks.append(subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL))
        codes = [one.wait(600) for one in ranks]
        if any(codes):
            raise RuntimeError(f"{size} ranks ended with {codes}")
        told = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(size)]
        files = sum(one.is_file() for one in Path(folder, "out").rglob("*"))
    others = max((num for num, _ in told[1:]), default=0)
    return Counted(size, fault, told[0][0], others, sum(sent for _, sent in told), files)


def follows(counted: list[Counted], size: int) -> Counted:
    """Return what a run of ``size`` ranks asks: on the line through the two largest counted."""
    low, high = sorted((one for one in counted if one.size > 1), key=lambda one: one.size)[-2:]
    share = (size - high.size) / (high.size - low.size)

    def at(name: str) -> int:
        return round(getattr(high, name) + share * (getattr(high, name) - getattr(low, name)))

    return Counted(size, high.fault, at("first"), at("others"), at("sent"), high.files)


def read_back() -> float:
    """Return the seconds in which the listing of what 1,024 ranks have each written is made."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from incident_records import report
    from nanstop.report.text.runs import render_runs
    from nanstop.store.incidents import Store, incident_folders, load_report, load_summary
    from nanstop.store.summary import Summary, summary_row

    with tempfile.TemporaryDirectory() as folder:
        store, rows = Store(folder, "r"), []
        for rank in range(REPORTED):
            name, _ = store.open_incident()
            found = report(name)
            at = replace(found.incident.at, rank=rank)
            store.write_report(replace(found, incident=replace(found.incident, at=at)))
            rows.append(replace(summary_row(found), rank=rank))
        store.write_summary(Summary(incidents=tuple(rows)))
        began = time.process_time()
        reports = [load_report(one) for one in incident_folders(folder)]
        render_runs(folder, reports, load_summary(Path(folder, "summary.json")))
        return time.process_time() - began


def table(rows: list[tuple[Counted, bool]]) -> Table:
    found = Table("ranks", "", "rank 0 asks", "another asks at most", "bytes of all", "files", "")
    for one, is_counted in rows:
        what = "a failure" if one.fault else "healthy"
        numbers = (f"{number:,}" for number in (one.first, one.others, one.sent, one.files))
        found.add_row(f"{one.size:,}", what, *numbers, "counted" if is_counted else "follows")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--fault", action="store_true")
    given = parser.parse_args()
    if given.train:
        train(given.fault)
        return
    rows: list[tuple[Counted, bool]] = []
    for fault in (False, True):
        counted = [count(size, fault=fault) for size in given.processes]
        rows += [(one, True) for one in counted]
        rows += [(follows(counted, size), False) for size in SHOWN if size > max(given.processes)]
    seconds = read_back()
    console = Console(width=100)
    console.print(table(rows))
    console.print(f"{REPORTED} incidents of as many ranks read and listed in {seconds:.1f} s")
    shown = [asdict(one) | {"counted": is_counted} for one, is_counted in rows]
    told = {"rows": shown, "read_back": seconds}
    RESULTS.write_text(json.dumps(told, indent=1) + "\n")
    write_page()


if __name__ == "__main__":
    main()
