"""What became of disturbed runs, as a table, a page's section, and a list of what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

RESULTS = Path(__file__).parent / "results" / "disturbed.json"
_HOW = {"kill": "killed", "stop": "stopped, continued", "delay": "delayed"}
_KINDS = {"ddp": "DDP", "fsdp": "FSDP2"}
_COLUMNS = ("runs", "struck", "with a fault", "records", "weights", "hung", "broken", "not finite")
TEXT = """## Ranks that are killed, stopped or delayed

Written by `python benchmarks/disturbed.py`. Two ranks (gloo, each under its own `nanstop run`)
train a small model for 20 steps and save their weights in each fifth. A seed draws the rest: DDP or
FSDP2, in about half of the runs a fault (a NaN in the data, a bad gradient, an overflow in float16,
an optimizer without eps), whether a remedy that changes training is allowed, and a rank that is
killed (SIGKILL), stopped for 0.1 to 8 s (SIGSTOP, SIGCONT) or held up as long, at one of its calls
or by the clock, anywhere in the run or in the step with the fault. Ranks wait 3 s for each other in
a failure (300 s by default), so that half of the pauses are longer than that. In half of the runs
the other rank is then asked to end, as `torchrun` does.

{table}

*Struck*: the moment came before the run was over. *Records*: reports, summaries and series that the
store reads; *broken* are those that it does not, and pages that are cut off. *Weights*: files of
them, of which so many were *not finite*. A run *hung* when a launcher had not ended after {hung} s.
{ends}

Seeds of what is not as it is to be: {wrong}.
"""


def problems(runs: Iterable[dict[str, Any]]) -> list[str]:
    """Return what is not as it is to be, a line each."""
    found = []
    for run in runs:
        name = f"seed {run['seed']}"
        found += [f"{name}: hung"] * (None in run["codes"])
        found += [f"{name}: {one}" for one in run["broken"]]
        found += [f"{name}: {one} is not finite" for one in run["bad"]]
        if not is_sensible(run):
            found.append(f"{name}: ended with {run['codes']}")
    return found


def is_sensible(run: dict[str, Any]) -> bool:
    """Return whether both launchers ended as such a run is to end: 0 at its end, 137 for who was
    killed, 1 for an exchange that another is missed in, 3 where nanstop has stopped the training,
    143 for who was asked to end, or -15 where it had nothing left to do.
    """
    codes, rank = run["codes"], run["moment"]["rank"]
    asked = {1, 143, -15} if run["strict"] else set()
    stopped = 3 in codes and run["plan"]["fault"] not in ("none", "scaler")
    if run["moment"]["how"] == "kill" and run["struck"]:
        return codes[rank] in {0, 3, 137} and codes[1 - rank] in {0, 1, 3} | asked
    return codes == [0, 0] or (stopped and {*codes} <= {1, 3} | asked)


def rows(runs: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each layout and disturbance, and one for all."""
    for kind, name in _KINDS.items():
        for how, word in _HOW.items():
            of = [r for r in runs if (r["plan"]["kind"], r["moment"]["how"]) == (kind, how)]
            yield f"{name}, {word}", *map(str, _counts(of))
    yield "all", *map(str, _counts(runs))


def _counts(runs: Sequence[dict[str, Any]]) -> tuple[int, ...]:
    return (
        len(runs),
        sum(run["struck"] for run in runs),
        sum(run["plan"]["fault"] not in ("none", "scaler") for run in runs),
        sum(run["whole"] for run in runs),
        sum(run["weights"] for run in runs),
        sum(None in run["codes"] for run in runs),
        sum(len(run["broken"]) for run in runs),
        sum(len(run["bad"]) for run in runs),
    )


def shown(runs: Sequence[dict[str, Any]]) -> Table:
    table = Table("", *_COLUMNS, title="Disturbed runs")
    for row in rows(runs):
        table.add_row(*row)
    return table


def section(kept: dict[str, Any]) -> str:
    """Return the section of the page, from what is kept of the runs."""
    runs: Sequence[dict[str, Any]] = kept["runs"]
    head = "| | " + " | ".join(_COLUMNS) + " |\n|---|" + "---:|" * len(_COLUMNS)
    table = "\n".join((head, *("| " + " | ".join(row) + " |" for row in rows(runs))))
    ended = [run for run in runs if run["same"] is not None]
    same = sum(run["same"] for run in ended)
    ends = (
        f"Of {len(ended)} runs in which both ranks came to their end, {same} have the weights, bit "
        "for bit, of the same run undisturbed; the others came apart in a failure."
    )
    wrong = "; ".join(problems(runs)) or "none"
    return TEXT.format(table=table, hung=kept["hung_seconds"], ends=ends, wrong=wrong)
