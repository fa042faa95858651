"""What nanstop costs and finds on a GPU, in parts; each ends of itself.

    python benchmarks/gpu.py [--part NAME ...] [--minutes N] [--toy] [--out FILE]

Needs torch, transformers and peft; bitsandbytes for 4-bit. Runs wherever a CUDA device is, prints a
table for each part and what this device lacks for it, and writes all of it as JSON under
``results/gpu/``. Without a CUDA device everything is a toy: the parts are gone through, and nothing
of what they print says anything of a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from gpu.machine import Machine, Row, described, present
from gpu.page import RESULTS, write_page
from rich.console import Console
from rich.table import Table

from gpu import (
    attention,
    defects,
    determinism,
    full_card,
    gauge,
    half,
    kernels,
    overhead,
    synchronisations,
    trainer,
    unwritten,
)

MOST_COLUMNS = 10
PARTS: dict[str, Callable[[Machine], Iterable[Row]]] = {
    "overhead": overhead.run,
    "trainer": trainer.run,
    "synchronisations": synchronisations.run,
    "gauge": gauge.run,
    "half": half.run,
    "determinism": determinism.run,
    "attention": attention.run,
    "defects": defects.run,
    "unwritten": unwritten.run,
    "kernels": kernels.run,
    "full_card": full_card.run,
}


def shown(name: str, rows: list[Row]) -> Table:
    """Return the rows of a part as a table: a column for each name that any row has, or where
    these are many, for each row.
    """
    table = Table(title=name)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    if len(columns) > MOST_COLUMNS:
        for place in range(len(rows) + 1):
            table.add_column(str(place or ""), overflow="fold")
        for column in columns:
            table.add_row(column, *(str(row.get(column, "")) for row in rows))
        return table
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*("" if row.get(one) is None else str(row[one]) for one in columns))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", action="append", choices=PARTS, help="repeatable; all by default")
    parser.add_argument("--minutes", type=float, default=8.0, help="of a part, at most")
    parser.add_argument("--toy", action="store_true", help="small sizes, on a GPU too")
    parser.add_argument("--out", type=Path, help="the JSON file, by default named by the device")
    options = parser.parse_args()
    machine, console = present(toy=options.toy, minutes=options.minutes), Console(width=140)
    known = described(machine)
    console.print(known)
    file = options.out or RESULTS / f"{known.get('name', 'cpu toy').replace(' ', '-')}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = json.loads(file.read_text()) if file.exists() else {"parts": {}}
    parts, failed = kept["parts"], False  # parts that are not measured now stay
    for name in options.part or PARTS:
        machine.begin()
        began, rows = time.monotonic(), []

        def write(name: str = name, rows: list[Row] = rows, began: float = began) -> None:
            seconds = round(time.monotonic() - began, 1)
            parts[name] = {
                "date": time.strftime("%Y-%m-%d"),
                "versions": known["versions"],
                "seconds": seconds,
                "lacks": list(machine.lacks),
                "rows": rows,
            }
            file.write_text(json.dumps({"machine": known, "parts": parts}, indent=2) + "\n")

        try:
            for row in PARTS[name](machine):
                rows.append(row)
                write()  # after each row: a machine that is lent can be taken back at any time
        except Exception as error:  # the parts after it are measured all the same
            failed = True
            console.print_exception()
            machine.lack(f"{name}: {type(error).__name__}: {error}")
        write()
        console.print(shown(name, rows))
        for lack in machine.lacks:
            console.print(f"not here: {lack}")
    console.print(f"written: {file}")
    if file.parent == RESULTS:
        write_page()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
