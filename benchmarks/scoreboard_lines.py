"""What the scoreboard prints last: one line for each thing that must hold, with its counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scoreboard_said import said_in
from scoring import Row, Said, certain_and_wrong, is_alarm, rates
from truth import Truth

Kept = Mapping[str, Any]
"""All that is kept of one tool: its runs, versions, overhead and minutes."""

LEAST_CASES, LEAST_HEALTHY, MOST_MINUTES = 60, 100, 40.0


@dataclass(frozen=True)
class Line:
    """One line of what must hold. ``holds``: None where nothing was run that it is about."""

    text: str
    must: str
    holds: bool | None

    def __str__(self) -> str:
        mark = {True: "ok    ", False: "MISSED", None: "-     "}[self.holds]
        return f"{mark} {self.text}  [{self.must}]"


@dataclass(frozen=True)
class Board:
    """What was printed and whether all of it is as it must be."""

    lines: tuple[Line, ...]

    @property
    def last_lines(self) -> str:
        return "\n".join(map(str, self.lines))

    @property
    def missed(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.holds is not True)


def said_of(kept: Kept) -> dict[str, Said]:
    """Return what was said in each run that is kept."""
    return {name: said_in(run) for name, run in kept.get("runs", {}).items()}


def lines_of(truths: Sequence[Truth], rows: Mapping[str, Row], kept: Kept) -> tuple[Line, ...]:
    said = said_of(kept)
    known = [truth for truth in truths if truth.name in rows]
    by_kind = {
        kind: [rows[truth.name] for truth in known if truth.kind == kind]
        for kind in ("loud", "silent", "scary", "open")
    }
    every = rates(rows.values())
    counts = ", ".join(f"{len(found)} {kind}" for kind, found in by_kind.items())
    certain = [
        f"{truth.name}: {code}"
        for truth in known
        for code in certain_and_wrong(
            truth, said[f"{truth.name}.case"], said[f"{truth.name}.healthy"]
        )
    ]
    answered = sum(
        sure == "certain"
        for truth in known
        for run in ("case", "healthy")
        for _, sure in said[f"{truth.name}.{run}"].answers
    )
    minutes = kept.get("minutes")
    return (
        Line(f"cases: {len(rows)} ({counts})", f">= {LEAST_CASES}", len(rows) >= LEAST_CASES),
        _at_least("loud ones detected", rates(by_kind["loud"])["detected"], 1.0),
        _at_least("silent ones detected", rates(by_kind["silent"])["detected"], 0.9),
        _at_least("right step", every["step"], 0.95),
        _at_least("right micro-batch", every["micro"], 1.0),
        _at_least("right phase", every["phase"], 0.95),
        _at_least("exact op", every["op"], 0.95),
        _at_least("exact module", every["module"], 0.95),
        _at_least("right cause (accepted)", every["cause"], 0.95),
        _at_least("cure proven, of those that an in-run cure can reach", every["proven"], 0.9),
        _cures(said[f"{truth.name}.case"] for truth in known),
        _at_least("cured run within 2 % of the healthy twin's loss", every["parity"], 0.9),
        *_quiet_lines(known, rows, kept),
        _at_least(
            "NS000 or unsure, with what was ruled out, where the evidence does not decide",
            rates(by_kind["open"])["cause"],
            1.0,
        ),
        Line(
            f"answers at `certain` that are wrong: {len(certain)} of {answered}"
            + "".join(f"; {one}" for one in certain),
            "0",
            not certain,
        ),
        Line(
            f"nanstop's own part took {minutes} minutes on two cores",
            f"<= {MOST_MINUTES:.0f}",
            None if minutes is None else minutes <= MOST_MINUTES,
        ),
    )


def _cures(said: Iterable[Said]) -> Line:
    """How the failures of the cases ended, of those that ended in a cure or in leaving data out."""
    ended = Counter(one.cure for one in said if one.cure)
    counts = ", ".join(f"{ended[kind]} {kind}" for kind in ("safe", "allowed", "isolated"))
    return Line(f"ended in: {counts}", "counted", holds=True)


def _quiet_lines(truths: Sequence[Truth], rows: Mapping[str, Row], kept: Kept) -> tuple[Line, Line]:
    """False alarms on twins and scary cases, and on the further healthy runs;
    those that are not healthy do not count.
    """
    loud = [truth.name for truth in truths if rows[truth.name]["quiet"] is False]
    of = sum(rows[truth.name]["quiet"] is not None for truth in truths)
    runs = {name: run for name, run in kept.get("runs", {}).items() if name.startswith("healthy.")}
    healthy = {
        name: said_in(run)
        for name, run in runs.items()
        if run["code"] == 0 and "final_loss=" in run["stdout"]
    }
    alarms = [
        f"{name.removeprefix('healthy.')} ({', '.join(said.codes) or said.failed})"
        for name, said in healthy.items()
        if said.failed or is_alarm(said)
    ]
    left_out = f", {len(runs) - len(healthy)} more do not train" if len(healthy) < len(runs) else ""
    return (
        Line(
            f"false alarms on twins and scary cases: {len(loud)} of {of}"
            + "".join(f"; {n}" for n in loud),
            "0",
            not loud,
        ),
        Line(
            f"false alarms on further healthy runs: {len(alarms)} of {len(healthy)}{left_out}"
            + "".join(f"; {one}" for one in alarms),
            f"0 of >= {LEAST_HEALTHY}",
            not alarms and len(healthy) >= LEAST_HEALTHY,
        ),
    )


def _at_least(what: str, pair: tuple[int, int], least: float) -> Line:
    right, of = pair
    must = f"{100 * least:.0f} %" if least == 1.0 else f">= {100 * least:.0f} %"
    return Line(f"{what}: {share(right, of)}", must, right >= least * of if of else None)


def share(right: int, of: int) -> str:
    """Return a count with its percentage."""
    return f"{right}/{of} ({100 * right / of:.0f} %)" if of else "n/a"
