"""The table of known-bad stacks: whether a run stands on one, and a failure fits it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from nanstop.diagnose.evidence.process_end import last_op, unnatural_end
from nanstop.frozen import frozen
from nanstop.records import Environment, Evidence, OpEvent, RunFacts, op_name
from nanstop.records.vocabulary import NOT_FINITE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

_CLAUSE = re.compile(r"^(>=|<=|==|<|>)(\d+(?:\.\d+)*)$")
_RELEASE = re.compile(r"^\d+(?:\.\d+)*")


@frozen(kw_only=True)
class Where:
    """What a run must stand on; see the head of ``known_stacks.toml``."""

    gpu: str | None = None
    capability: str | None = None
    driver: str | None = None
    torch: str | None = None
    cuda: str | None = None
    cublas: str | None = None
    cudnn: str | None = None
    packages: Mapping[str, str] | None = None
    formats: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()
    quantization: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    device: str | None = None
    padding_side: str | None = None
    compiled: bool = False
    num_micro: int = 1
    world_size: int = 1
    unless: Mapping[str, str] | None = None


@frozen(kw_only=True)
class FailurePattern:
    """Which failures a defect explains; see the head of ``known_stacks.toml``."""

    signals: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    length: tuple[int, int] | None = None
    width: tuple[int, int] | None = None


@frozen(kw_only=True)
class Stack:
    """One row: conditions, what is wrong, what cures it and who says so."""

    id: str
    title: str
    cause: str
    cure: str
    source: str
    where: Where
    failure: FailurePattern | None = None
    said_by: str = ""
    """The finding that says the same before a run has failed."""

    def stands(self, environment: Environment, facts: RunFacts) -> bool:
        """Return whether a run on this machine with these facts stands on the stack."""
        return _on_machine(self.where, environment) and _in_run(self.where, facts)

    def fits(self, evidence: Evidence) -> bool:
        """Return whether the defect explains the failure, as far as it is known."""
        if self.failure is None:
            return False
        end = unnatural_end(evidence, "signal")
        if self.failure.signals:
            if end is None or end.name not in self.failure.signals:
                return False
            event = last_op(evidence)
            return event is None or _op_fits(self.failure, event)
        found = evidence.localization
        if found is None or found.key.kind not in NOT_FINITE:
            return False
        event = found.first_bad
        phase = event.phase if event is not None else found.key.phase
        return phase in self.failure.phases and (event is None or _op_fits(self.failure, event))


@cache
def stacks() -> tuple[Stack, ...]:
    """Return the rows of the table, in its order."""
    from importlib.resources import files

    table = files(__name__.rpartition(".")[0]) / "known_stacks.toml"
    rows = tomllib.loads(table.read_text(encoding="utf-8"))["stack"]
    return tuple(
        Stack(
            **{name: row[name] for name in ("id", "title", "cause", "cure", "source")},
            where=Where(**_frozen(row["where"])),
            failure=FailurePattern(**_frozen(row["failure"])) if "failure" in row else None,
            said_by=row.get("said_by", ""),
        )
        for row in rows
    )


def in_range(version: str | None, wanted: str) -> bool:
    """Return whether a version is in a range such as ``>=12.1,<12.4.5.8``;
    an unknown version is in none.

    Only the numbers of the release count: ``2.5.1+cu121`` is 2.5.1, ``2.5.0a0`` is 2.5.0.
    """
    found = _RELEASE.match(version or "")
    return found is not None and all(
        _compares(_numbers(found.group()), clause.strip()) for clause in wanted.split(",")
    )


def _compares(have: tuple[int, ...], clause: str) -> bool:
    parts = _CLAUSE.match(clause)
    if parts is None:
        raise ValueError(f"{clause!r} is no clause of a version range")
    want = _numbers(parts[2])
    length = max(len(have), len(want))
    left, right = (each + (0,) * (length - len(each)) for each in (have, want))
    return {
        ">=": left >= right,
        "<=": left <= right,
        "==": left == right,
        "<": left < right,
        ">": left > right,
    }[parts[1]]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def _on_machine(where: Where, environment: Environment) -> bool:
    if where.gpu is not None and not _is_word(where.gpu, environment.gpu or ""):
        return False
    for name in ("capability", "driver", "torch", "cuda", "cublas", "cudnn"):
        wanted = getattr(where, name)
        if wanted is not None and not in_range(getattr(environment, name), wanted):
            return False
    installed, flags = dict(environment.packages), dict(environment.flags)
    if any(flags.get(name) == value for name, value in (where.unless or {}).items()):
        return False
    wanted_packages = (where.packages or {}).items()
    return all(in_range(installed.get(name), wanted) for name, wanted in wanted_packages)


def _in_run(where: Where, facts: RunFacts) -> bool:
    formats = {group.dtype for group in facts.param_groups} | {facts.autocast}
    return (
        (not where.formats or not formats.isdisjoint(where.formats))
        and _one_of(facts.attention, where.attention)
        and _one_of(facts.quantization, where.quantization)
        and _one_of(facts.model_type, where.model_types)
        and (where.device is None or facts.device == where.device)
        and (where.padding_side is None or facts.padding_side == where.padding_side)
        and (facts.compiled or not where.compiled)
        and facts.num_micro >= where.num_micro
        and facts.world_size >= where.world_size
    )


def _op_fits(failure: FailurePattern, event: OpEvent) -> bool:
    if failure.ops and op_name(event.op) not in failure.ops:
        return False
    operands = [one for one in event.inputs if one.dtype.startswith(("float", "bfloat"))]
    if failure.dtypes and operands and not any(one.dtype in failure.dtypes for one in operands):
        return False
    shapes = [one.shape for one in operands if len(one.shape) == 4]
    return _axis_fits(shapes, -2, failure.length) and _axis_fits(shapes, -1, failure.width)


def _axis_fits(shapes: Iterable[tuple[int, ...]], axis: int, rule: tuple[int, int] | None) -> bool:
    sizes = [shape[axis] for shape in shapes]
    return rule is None or not sizes or any(size % rule[0] == rule[1] for size in sizes)


def _one_of(value: str | None, wanted: tuple[str, ...]) -> bool:
    return not wanted or value in wanted


def _is_word(word: str, text: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", text) is not None


def _frozen(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
