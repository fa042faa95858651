"""What each remedy is called, how it is said in one phrase, and whether it changes training.
No torch here.

``remedies.apply`` holds the code that carries them out, under the same names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from types import MappingProxyType

from nanstop.errors import NanstopError
from nanstop.records import Atom, OpEvent, Safety
from nanstop.records.line_forms import BOUNDED, FORMS, form_of, is_bounded


@dataclass(frozen=True, slots=True)
class RemedyInfo:
    """A remedy in words. ``text`` may name ``{targets}`` and ``{value}``.

    ``safety``: "safe" is the same mathematics with more bits or by another kernel;
    all else "changes_training". ``forward``: the model computes otherwise under it, and what is
    saved of the model does not hold it.
    """

    name: str
    safety: Safety
    text: str
    forward: bool = False


REMEDIES: Mapping[str, RemedyInfo] = MappingProxyType(
    {
        info.name: info
        for info in (
            RemedyInfo("drop_micro", "changes_training", "leave out micro-batch {targets}"),
            RemedyInfo("drop_sample", "changes_training", "leave out {targets}"),
            RemedyInfo(
                "init_rows",
                "changes_training",
                "re-initialise the untrained rows of {targets} with {value} of the others",
            ),
            RemedyInfo(
                "attention", "safe", "compute attention with the `{value}` kernel", forward=True
            ),
            RemedyInfo(
                "sdpa_kernel",
                "safe",
                "compute attention without torch's {value} kernel",
                forward=True,
            ),
            RemedyInfo("eager", "safe", "run without `torch.compile`", forward=True),
            RemedyInfo(
                "bf16",
                "changes_training",
                "use bfloat16 in place of float16 for the whole run",
                forward=True,
            ),
            RemedyInfo(
                "fp32_trainables",
                "safe",
                "keep the trainable parameters and their optimizer state in float32",
            ),
            RemedyInfo(
                "fp32_logits",
                "safe",
                "compute the output head and the loss in float32",
                forward=True,
            ),
            RemedyInfo(
                "form",
                "changes_training",
                "give {targets} a value where it has none",
                forward=True,
            ),
            RemedyInfo("stable_form", "safe", "compute {targets} in log space", forward=True),
            RemedyInfo(
                "memory_fill",
                "safe",
                "have {value} in memory that {targets} does not write",
                forward=True,
            ),
            RemedyInfo(
                "held_fill",
                "safe",
                "fill at {targets} with the farthest number of its format",
                forward=True,
            ),
            RemedyInfo(
                "finite_fill",
                "changes_training",
                "write a finite number at {targets} in place of an infinity",
                forward=True,
            ),
            RemedyInfo(
                "finite_constant",
                "changes_training",
                "read a finite number at {targets} where {value} has none",
                forward=True,
            ),
            RemedyInfo("fp32_line", "safe", "compute {targets} in float32", forward=True),
            RemedyInfo("island", "safe", "keep {targets} in float32", forward=True),
            RemedyInfo(
                "outer_autocast",
                "safe",
                "run the forward under an outer {value} autocast",
                forward=True,
            ),
            RemedyInfo("loss_scale", "changes_training", "multiply the loss scale by {value}"),
            RemedyInfo(
                "unscale", "changes_training", "divide the gradients by {value} before each update"
            ),
            RemedyInfo("clip", "changes_training", "clip the gradient norm at {value}"),
            RemedyInfo("lr", "changes_training", "multiply the learning rate by {value}"),
            RemedyInfo("weight_decay", "changes_training", "set the weight decay to {value}"),
            RemedyInfo("optimizer_eps", "changes_training", "set the optimizer's eps to {value}"),
            RemedyInfo("fp32_optimizer_state", "safe", "keep the optimizer's state in float32"),
            RemedyInfo(
                "optimizer_swap",
                "changes_training",
                "go on with {value} and float32 state, moments that no update can have made "
                "begun at 0",
            ),
        )
    }
)
"""In the order in which remedies are applied: data, storage, forward, gradients, optimizer."""

OTHER_KERNELS = ("sdpa_kernel", "eager", "attention")
"""Remedies that compute the same in the same format by another kernel, the one that costs least
first.
"""
_CLAMPED = "clamp the argument at {targets}"
_SAMPLE = re.compile(r"\d+:\d+")
_SPAN = re.compile(r"(\d+)(?:-(\d+))?")
_ROW_VALUES = {"mean": "the mean", "normal": "the mean and a small normal deviation"}


def kernel_place(atoms: tuple[Atom, ...]) -> int:
    """Return where a cure comes among other kernels, behind them where it is anything else."""
    names = [atom.remedy for atom in atoms]
    is_kernel = len(names) == 1 and names[0] in OTHER_KERNELS
    return OTHER_KERNELS.index(names[0]) if is_kernel else len(OTHER_KERNELS)


def makes_rows(atoms: Sequence[Atom]) -> bool:
    """Return whether a cure is nothing but rows of token tables made anew."""
    return bool(atoms) and all(atom.remedy == "init_rows" for atom in atoms)


def new_rows_of(atoms: Sequence[Atom]) -> frozenset[int]:
    """Return the rows that are named to be made anew; none where a remedy names none."""
    named = [(atom, atom.value.partition(" ")[2]) for atom in atoms if atom.remedy == "init_rows"]
    spans = [span for atom, rows in named if rows for span in row_spans(rows, atom)]
    return frozenset(row for first, last in spans for row in range(first, last + 1))


def remedy_of(atom: Atom) -> RemedyInfo:
    """Return the remedy of ``atom`` in words. Errors: ``NanstopError`` for an unknown one."""
    try:
        return REMEDIES[atom.remedy]
    except KeyError:
        raise NanstopError(
            f"unknown remedy `{atom.remedy}`", hint=f"one of: {', '.join(REMEDIES)}"
        ) from None


def safety_of(atoms: Iterable[Atom]) -> Safety:
    """Return "safe" if every atom is; the empty set is safe."""
    changes = any(remedy_of(atom).safety == "changes_training" for atom in atoms)
    return "changes_training" if changes else "safe"


def of_the_forward(atoms: Iterable[Atom]) -> tuple[Atom, ...]:
    """Return the atoms that a model has to compute under wherever it is loaded.

    The others act on data, gradients and updates, or on what is stored.
    """
    return tuple(atom for atom in atoms if remedy_of(atom).forward)


def not_of_the_model(atoms: Iterable[Atom], failures: Iterable[OpEvent | None]) -> tuple[Atom, ...]:
    """Return the forms of lines that failed where a loss was computed from what the model gave, or
    an update was made: what is saved of the model has no part in them. ``failures``: the first bad
    operations.
    """
    known = [event for event in failures if event is not None]
    ops = [*known, *(one for event in known for one in event.lines_in_half)]
    sources = (op.source for op in ops if op.phase in ("loss", "optimizer"))
    lines = {f"{source.file}:{source.line}" for source in sources if source is not None}
    return tuple(atom for atom in atoms if atom.remedy in FORMS and atom.target in lines)


def describe(atoms: Sequence[Atom]) -> str:
    """Return the atoms as one imperative phrase, "change nothing" for none.

    Atoms that differ in their target only share a clause, and an outer autocast is said as the
    circumstance of the islands that need it: "keep `a` and `b` in float32 under an outer float16
    autocast".
    """
    clauses: dict[tuple[str, str], list[str]] = {}
    for atom in sorted(atoms, key=lambda atom: list(REMEDIES).index(remedy_of(atom).name)):
        is_silent = atom.remedy == "island" or (atom.remedy == "form" and not is_bounded((atom,)))
        value = "" if is_silent else _said(atom)
        targets = clauses.setdefault((atom.remedy, value), [])
        if atom.target not in targets:
            targets.append(atom.target)
    has_islands = any(remedy == "island" for remedy, _ in clauses)
    said = ""
    for (remedy, value), targets in clauses.items():
        if remedy == "outer_autocast" and has_islands:
            said += f" under an outer {value} autocast"
        else:
            said += (" and " if said else "") + _clause(remedy, value, targets)
    return said or "change nothing"


def _said(atom: Atom) -> str:
    if atom.remedy == "finite_constant":
        _, name = form_of(atom)
        return f"`{name}`" if name else "the variable"
    if atom.remedy != "init_rows":
        return atom.value
    kind, _, _ = atom.value.partition(" ")  # which rows is said by the finding
    return _ROW_VALUES.get(kind, kind)


def _layer(target: str) -> str:
    return f"layer `{target}`" if target.isdigit() else f"`{target}`"


def _clause(remedy: str, value: str, targets: Sequence[str]) -> str:
    if remedy == "drop_sample" and all(_SAMPLE.fullmatch(target) for target in targets):
        named = _samples(targets)
    elif remedy == "drop_micro":
        named = list(targets)
    elif remedy in FORMS:
        named = [f"`{PurePath(target).name}`" for target in targets]
    else:
        named = [_layer(target) if target else "the whole model" for target in targets]
    text = _CLAMPED if (remedy, value) == ("form", BOUNDED) else REMEDIES[remedy].text
    return text.format(targets=_joined(named), value=value)


def sample_of(target: str) -> str:
    """Return a target that is a sample in words: "sample 2 of micro-batch 0" for "0:2"."""
    return _samples([target])[0] if _SAMPLE.fullmatch(target) else f"`{target}`"


def _samples(targets: Sequence[str]) -> list[str]:
    """Return "samples 0-3 and 5 of micro-batch 1" for each micro-batch."""
    rows: dict[str, list[int]] = {}
    for target in targets:
        micro, _, row = target.partition(":")
        rows.setdefault(micro, []).append(int(row))
    return [f"{_numbered(found)} of micro-batch {micro}" for micro, found in rows.items()]


def _numbered(rows: list[int]) -> str:
    said = _joined(spans_of(rows))
    return f"sample {said}" if len(rows) == 1 else f"samples {said}"


def spans_of(rows: Iterable[int]) -> list[str]:
    """Return numbers in rising order, neighbours as one: "5", "9-12"."""
    spans: list[list[int]] = []
    for row in sorted(rows):
        if spans and row == spans[-1][-1] + 1:
            spans[-1][1:] = [row]
        else:
            spans.append([row])
    return ["-".join(map(str, span)) for span in spans]


def row_spans(text: str, atom: Atom) -> list[tuple[int, int]]:
    """Return first and last of each span in "5,9-12". Errors: ``NanstopError`` for what is none."""
    found = [_SPAN.fullmatch(part) for part in text.split(",")]
    if None in found:
        raise NanstopError(f"{atom}: `{text}` does not name rows")
    return [(int(one[1]), int(one[2] or one[1])) for one in found if one is not None]


def _joined(names: Sequence[str]) -> str:
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
