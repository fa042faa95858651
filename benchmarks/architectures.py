"""Every causal language model that transformers can build small, watched, broken and planned.

For each class of ``MODEL_FOR_CAUSAL_LM_MAPPING``, in a child process forked from a warm parent and
limited in time:

- health: five training steps in float32 and in bfloat16 weights under ``nanstop.watch``; any
  incident, any finding but those that ``nanstop.check`` states beforehand, and any changed loss or
  weight is a miss;
- plants: an overflow planted into a drawn layer, for float16 weights, float16 autocast and float32;
  the module that is named must be the one where hooks saw the first value that was not finite;
- plan: ``nanstop.plan`` for float16 against float32.

Classes that are done are not repeated; the table is ``docs/architectures.md``.

    python benchmarks/architectures.py [--only WORD ...] [--parts health,plants,plan]
                                       [--again] [--table]
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
import resource
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from zlib import crc32

import architectures_plan
import architectures_plants
import architectures_table
import architectures_trials as trials
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import nanstop

RESULTS = Path(__file__).parent / "results" / "architectures.json"
PARTS = ("health", "plants", "plan")
PLANTED = ("float16 weights", "float16 autocast", "float32")
MEMORY = 6 << 30
PLAN_SECONDS = 30.0
_WAITS = 6.0
"""Wall-clock seconds for each second of processor time that a child may take:
the machine may be busy.
"""

Row = dict[str, Any]
Send = Callable[[str, Any], None]


def examine(model_type: str, parts: list[str], send: Send) -> None:
    """Run the parts of one class, sending what each found as soon as it is known."""

    def make() -> torch.nn.Module:
        return trials.build(model_type)

    try:
        model = make()
        first = trials.batches(1)[0]
        architectures_plants.witness(model, trials.objective(model), first)
    except Exception as error:  # a class that cannot be built is a row of the table
        send("reason", trials.short(error))
        return
    send("parameters", sum(p.numel() for p in model.parameters()))
    if "health" in parts:
        send("health", [asdict(health) for health in _health(make)])
    if "plants" in parts:
        seed = crc32(model_type.encode())
        forms = enumerate(PLANTED, seed)
        found = [architectures_plants.planted(make, form, seed) for seed, form in forms]
        send("plants", [asdict(plant) | {"exact": plant.exact} for plant in found])
    if "plan" in parts:
        parity, plan = architectures_plan.planned(make, PLAN_SECONDS)
        row = asdict(parity)
        row |= {"parity": parity.parity, "unseen_parity": parity.unseen_parity}
        if plan is not None:
            row["health"] = asdict(trials.healthy(make, "float32", plan))
        send("plan", row)


def _health(make: Callable[[], torch.nn.Module]) -> Iterator[trials.Health]:
    """Yield float32 and bfloat16: of the weights, or under autocast where the model has no such
    weights.
    """
    yield trials.healthy(make, "float32")
    half = trials.healthy(make, "bfloat16 weights")
    yield half
    if half.sick:
        yield trials.healthy(make, "bfloat16 autocast")


def in_child(model_type: str, parts: list[str], seconds: float) -> Row:
    """Return what ``examine`` sent from a forked child before it ended or its time was over."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 5))
        _run_child(model_type, parts, writer)
    os.close(writer)
    row: Row = {}
    began = time.monotonic()
    for line in _lines(reader, began + _WAITS * seconds):
        row |= json.loads(line)
    if time.monotonic() - began >= _WAITS * seconds:
        os.kill(child, signal.SIGKILL)
        row["stopped"] = "stood still"
    os.close(reader)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and "stopped" not in row:
        end = signal.Signals(os.WTERMSIG(status))
        spent = f"not finished in {seconds:.0f} s"
        row["stopped"] = spent if end is signal.SIGXCPU else f"died of {end.name}"
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


def load(path: Path) -> dict[str, Any]:
    if path.exists():
        return json.loads(path.read_text())
    return {"rows": {}}


def save(results: dict[str, Any], path: Path) -> None:
    """Write one line for each class, so that version control shows what changed, and the page of
    the project's own.
    """
    path.parent.mkdir(exist_ok=True)
    fresh = path.with_suffix(".new")
    rows = results["rows"]
    lines = [
        f"{json.dumps(n)}: {json.dumps(_finite(rows[n]), sort_keys=True)}" for n in sorted(rows)
    ]
    head = json.dumps({k: v for k, v in results.items() if k != "rows"})[:-1]
    fresh.write_text(head + ', "rows": {\n' + ",\n".join(lines) + "\n}}\n")
    fresh.replace(path)
    if path == RESULTS:
        architectures_table.write(results)


def _finite(value: Any) -> Any:
    """Return a value that JSON has a form for: None in place of what is not finite."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def missing(row: Row, parts: list[str]) -> list[str]:
    """Return the parts that a row has not had yet; none for a class that cannot be built."""
    return [] if "reason" in row else [part for part in parts if part not in row]


def asked(classes: Collection[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="model types, exactly")
    parser.add_argument("--parts", default=",".join(PARTS), help="of these, by comma")
    parser.add_argument("--again", action="store_true", help="repeat what is done")
    parser.add_argument("--table", action="store_true", help="only write the table")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="processor time that a class may take"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.parts = options.parts.split(",")
    for given, known in ((options.only, classes), (options.parts, PARTS)):
        wrong = [word for word in given if word not in known]
        if wrong:
            near = difflib.get_close_matches(wrong[0], known, 1)
            parser.error(f"unknown: {wrong[0]}" + (f" (did you mean {near[0]}?)" if near else ""))
    return options


def main() -> int:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    classes = {k.model_type: a for k, a in MODEL_FOR_CAUSAL_LM_MAPPING.items()}
    options = asked(classes)
    results = load(options.results)
    rows, packages = results["rows"], (nanstop, torch, transformers)
    results["versions"] = {package.__name__: package.__version__ for package in packages}
    for name in () if options.table else sorted(classes, key=rows.__contains__):
        row = rows.get(name, {})
        wanted = options.parts if options.again else missing(row, options.parts)
        if not wanted or (options.only and name not in options.only):
            continue
        kept = {key: row[key] for key in row if key not in ("stopped", "reason")}
        fresh = in_child(name, wanted, options.seconds)
        rows[name] = kept | {"class": classes[name].__name__} | fresh
        save(results, options.results)
        print(architectures_table.line(name, rows[name]), flush=True)
    save(results, options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
