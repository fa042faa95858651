"""Every causal language model that transformers can build small, watched, broken and planned.

For each class of ``MODEL_FOR_CAUSAL_LM_MAPPING``, in a child process forked from a warm parent and limited in time:

- health: five training steps in float32 and in bfloat16 weights under ``nanstop.watch``; any incident, any finding
  but those that ``nanstop.check`` states beforehand, and any changed loss or weight is a miss;
- plants: an overflow planted into a drawn layer, for float16 weights, float16 autocast and float32; the module that is
  named must be the one where hooks saw the first value that was not finite;
- plan: ``nanstop.plan`` for float16 against float32.

Classes that are done are not repeated; the table is ``docs/architectures.md``.

    python benchmarks/architectures.py [--only WORD ...] [--parts health,plants,plan] [--again] [--table]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from zlib import crc32

import architectures_table
import architectures_trials as trials
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

RESULTS = Path(__file__).parent / "results" / "architectures.json"
PARTS = ("health", "plants", "plan")
MEMORY = 6 << 30

Row = dict[str, Any]
Send = Callable[[str, Any], None]


def examine(model_type: str, parts: list[str], send: Send) -> None:
    """Run the parts of one class, sending what each found as soon as it is known."""

    def make() -> torch.nn.Module:
        return trials.build(model_type)

    try:
        model = make()
        first = trials.batches(1)[0]
        trials.witness(model, trials.objective(model), first)
    except Exception as error:  # a class that cannot be built is a row of the table
        send("reason", trials.short(error))
        return
    send("parameters", sum(p.numel() for p in model.parameters()))
    if "health" in parts:
        formats = (torch.float32, torch.bfloat16)
        send("health", [asdict(trials.healthy(make, dtype)) for dtype in formats])
    if "plants" in parts:
        seed = crc32(model_type.encode())
        found = [trials.planted(make, form, seed + n) for n, form in enumerate(trials.FORMS)]
        send("plants", [asdict(plant) | {"exact": plant.exact} for plant in found])


def in_child(model_type: str, parts: list[str], seconds: float) -> Row:
    """Return what ``examine`` sent from a forked child before it ended or its time was over."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _run_child(model_type, parts, writer)
    os.close(writer)
    row: Row = {}
    began = time.monotonic()
    for line in _lines(reader, began + seconds):
        row |= json.loads(line)
    if time.monotonic() - began >= seconds:
        os.kill(child, signal.SIGKILL)
        row["stopped"] = f"not finished after {seconds:.0f} s"
    os.close(reader)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and "stopped" not in row:
        row["stopped"] = f"died of {signal.Signals(os.WTERMSIG(status)).name}"
    row["seconds"] = round(time.monotonic() - began, 1)
    return row


def _run_child(model_type: str, parts: list[str], writer: int) -> None:
    """Examine one class with nothing printed, and end the process."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)

    def send(name: str, value: Any) -> None:
        os.write(writer, (json.dumps({name: value}) + "\n").encode())

    try:
        examine(model_type, parts, send)
    except BaseException as error:
        send("stopped", trials.short(error))
    os._exit(0)


def _lines(reader: int, deadline: float) -> Iterator[bytes]:
    rest = b""
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([reader], [], [], left)[0]:
            return
        block = os.read(reader, 1 << 16)
        if not block:
            return
        *whole, rest = (rest + block).split(b"\n")
        yield from whole


def load() -> dict[str, Any]:
    if RESULTS.exists():
        return json.loads(RESULTS.read_text())
    return {"rows": {}}


def save(results: dict[str, Any]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    fresh = RESULTS.with_suffix(".new")
    fresh.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    fresh.replace(RESULTS)


def missing(row: Row, parts: list[str]) -> list[str]:
    """Return the parts that a row has not had yet; none for a class that cannot be built."""
    return [] if "reason" in row else [part for part in parts if part not in row]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="model types, exactly")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--again", action="store_true", help="repeat what is done")
    parser.add_argument("--table", action="store_true", help="only write the table")
    parser.add_argument("--seconds", type=float, default=60.0, help="limit for a class and part")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    results, parts = load(), options.parts.split(",")
    results["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    for kind, architecture in () if options.table else MODEL_FOR_CAUSAL_LM_MAPPING.items():
        name = kind.model_type
        row = results["rows"].get(name, {})
        wanted = parts if options.again else missing(row, parts)
        if not wanted or (options.only and name not in options.only):
            continue
        fresh = in_child(name, wanted, options.seconds)
        row.pop("stopped", None)
        row.pop("reason", None)
        results["rows"][name] = row | {"class": architecture.__name__} | fresh
        save(results)
        print(architectures_table.line(name, results["rows"][name]), flush=True)
    save(results)
    architectures_table.write(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
