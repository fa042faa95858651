"""Whether a variant fails, without any tool, as the script that it was made of."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scoreboard_runs import HERE, Run
from truth import Truth, matches

from variants.operations import base, same_operation
from variants.script import Rewrite

_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|nan|inf)(?![\w.])", re.IGNORECASE)
RELATIVE, ABSOLUTE = 0.02, 0.02
"""How far numbers that two runs print may be from each other."""


@dataclass(frozen=True)
class Recorded(Run):
    """A script under ``cases/births.py``."""

    @property
    def command(self) -> list[str]:
        return [str(HERE / "cases" / "births.py"), str(self.script)]


@dataclass(frozen=True)
class Plain:
    """What a script did. ``first``: the first step and micro-batch of a bad loss, gradient, weight.
    ``code``: how its process ended, None if it had to be ended.
    """

    printed: tuple[float, ...]
    births: tuple[Mapping[str, Any], ...]
    first: Mapping[str, tuple[int, int]]
    steps: int
    ended: str
    code: int | None


def read_plain(run: Run, folder: Path) -> dict[str, Any]:
    """Return what a run under ``births.py`` left in its folder, as keywords of ``Plain``."""
    code = json.loads((folder / "ended.json").read_text())["code"]
    lines = (folder / "stdout").read_text(errors="replace").splitlines()
    found: dict[str, Any] = {"births": (), "first": {}, "steps": -1, "ended": "died"}
    if lines and lines[-1].startswith('{"births"'):
        found = json.loads(lines.pop())
    words = " ".join(line for line in lines if "runtime" not in line)
    printed = tuple(float(one) for one in _NUMBER.findall(words))
    ended = found["ended"].partition(":")[0]
    found |= {"births": tuple(found["births"]), "ended": ended}
    return {**found, "printed": printed, "code": code}


def difference(case: Plain, variant: Plain, truth: Truth, rewrite: Rewrite) -> str:
    """Return how a variant is not the same training, "" if it is."""
    if variant.code is None:
        return "did not end in time"
    if (case.ended, case.code) != (variant.ended, variant.code):
        return f"ended otherwise: {variant.ended} ({variant.code}), not {case.ended}"
    if case.steps != variant.steps:
        return f"{variant.steps} steps, not {case.steps}"
    for what in sorted({*case.first, *variant.first}):
        old, new = (one.first.get(what) for one in (case, variant))
        num = 2 if what == "loss" else 1
        if old is None or new is None or list(old)[:num] != list(new)[:num]:
            return f"{what} not finite at {new}, not {old}"
    if truth.op and not any(_is_birth(truth, one, rewrite.added) for one in variant.births):
        return "the operation that the truth names is not where it was"
    if rewrite.keeps_numbers and not _close(case.printed, variant.printed):
        return "other numbers are printed"
    if not rewrite.keeps_numbers and not truth.op:
        return "other numbers, and no operation that would show that the failure is the same"
    return ""


def _is_birth(truth: Truth, birth: Mapping[str, Any], added: str) -> bool:
    """Whether the operation that the truth names is born there, however it is spelled."""
    phases = {"loss": ("forward",), "recompute": ("backward",)}
    wanted = phases.get(truth.phase or "", (truth.phase,))
    module = without(birth["module"], added)
    same = birth["phase"] == "backward" or any(
        matches(birth["op"], (op,)) or same_operation(base(birth["op"]), op) for op in truth.op
    )
    return (
        same
        and matches(module, truth.module)
        and (truth.phase in (None, "generate", "evaluate") or birth["phase"] in wanted)
        and truth.step in (None, birth["step"])
        and truth.micro in (None, birth["micro"])
    )


def without(module: str, added: str) -> str:
    """Return a module's name without that of the module that holds the model."""
    if not added:
        return module
    return "" if module in (added, "Wrapped") else module.removeprefix(f"{added}.")


def _close(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and all(map(_near, one, other))


def _near(one: float, other: float) -> bool:
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return math.isclose(one, other, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
