"""Plans on disk, searched for or adopted, as one YAML file that a person can edit."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from nanstop.errors import NanstopError, unknown
from nanstop.records import (
    FORMAT_MAX,
    Atom,
    PrecisionPlan,
    Region,
    codec,
)
from nanstop.records.formats import BY_SHORT_NAME
from nanstop.records.remedies import REMEDIES, describe
from nanstop.store.files import check_schema, read_text, write_whole

_SHORT = {name: short for short, name in BY_SHORT_NAME.items()}
_INSTEAD = {"float16": "bf16 or fp32", "bfloat16": "fp32"}

MAX_PLAN_BYTES = 2**20

_KEYS = tuple(one.name for one in fields(PrecisionPlan))
_ATOM_KEYS = tuple(one.name for one in fields(Atom))
_FORMATS = ("dtype", "trainables", "logits", "loss")
_UNUSED = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
"""What plans of nanstop 0.2 say of every loss scale, as torch has it anyway."""


def save_plan(plan: PrecisionPlan, path: str | os.PathLike[str], notes: Sequence[str] = ()) -> None:
    """Write a plan, without its empty fields; ``notes``: lines of a comment at its head. Errors:
    ``OSError``.
    """
    import yaml

    rows = json.loads(codec.to_json(plan))
    kept = {name: value for name, value in rows.items() if value not in ("", None, [])}
    title = "".join(f"# {line}\n" for line in (*headline(plan), *notes))
    body = yaml.safe_dump(kept, sort_keys=False, allow_unicode=True, width=100)
    write_whole(Path(path), (title + body).encode())


def load_plan(path: str | os.PathLike[str]) -> PrecisionPlan:
    """Return a plan of anybody's. Errors: ``NanstopError`` that names the file and the key."""
    import yaml

    file = Path(path)
    try:
        plan = yaml.safe_load(read_text(file, MAX_PLAN_BYTES))
    except yaml.YAMLError as error:
        raise NanstopError(f"{file}: not YAML ({' '.join(str(error).split())})") from error
    if not isinstance(plan, dict) or "schema" not in plan:
        raise NanstopError(f"{file}: not a plan: it has no key `schema`")
    check_schema(file, plan)
    for name in plan:
        if name not in _KEYS:
            raise unknown(f"key in {file}", name, _KEYS)
    return _read(file, plan)


def _read(file: Path, plan: dict[str, Any]) -> PrecisionPlan:
    remedies = plan.get("remedies", [])
    if not isinstance(remedies, list):
        raise NanstopError(f"{file}: `remedies` must be a list")
    atoms = tuple(_atom(file, index, row) for index, row in enumerate(remedies))
    rest = {name: value for name, value in plan.items() if name != "remedies"}
    scaler = rest.get("scaler")
    if isinstance(scaler, dict):
        rest["scaler"] = {k: v for k, v in scaler.items() if _UNUSED.get(k) != v}
    try:
        found = codec.from_json(PrecisionPlan, json.dumps({**rest, "remedies": _rows(atoms)}))
    except (NanstopError, TypeError) as error:
        message = error.message if isinstance(error, NanstopError) else str(error)
        raise NanstopError(f"{file}: {message}") from error
    for name in _FORMATS:
        _check_format(f"`{name}` in {file}", getattr(found, name))
    for index, region in enumerate(found.regions):
        _check_region(f"regions[{index}] in {file}", region)
    return found


def _rows(atoms: Sequence[Atom]) -> list[dict[str, str]]:
    return [{key: getattr(one, key) for key in _ATOM_KEYS} for one in atoms]


def _check_format(what: str, given: str) -> None:
    if given and given not in FORMAT_MAX:
        raise unknown(f"format of {what}", given, FORMAT_MAX)


def _check_region(what: str, region: Region) -> None:
    if region.dtype != "float32":
        raise unknown(f"format of {what}", region.dtype, ("float32",))
    if not region.modules:
        raise NanstopError(f"{what} names no module")


def _atom(file: Path, index: int, row: object) -> Atom:
    where = f"{file}: remedies[{index}]"
    if not isinstance(row, dict):
        raise NanstopError(f"{where}: expected the keys remedy, target and value")
    for name in row:
        if name not in _ATOM_KEYS:
            raise unknown(f"key in {where}", name, _ATOM_KEYS)
    remedy, target, value = (row.get(name, "") for name in _ATOM_KEYS)
    if str(remedy) not in REMEDIES:
        raise unknown(f"remedy in {where}", remedy, sorted(REMEDIES))
    return Atom(remedy=remedy, target=str(target), value=str(value))


def headline(plan: PrecisionPlan) -> Iterator[str]:
    """Yield what a plan does, a line for each thing."""
    if plan.reason:
        short = _SHORT.get(plan.dtype, plan.dtype)
        yield f"no {short} plan; {_INSTEAD.get(plan.dtype, 'fp32')}: {plan.reason}"
        return
    if plan.dtype:
        what = f"`{plan.model}` " if plan.model else ""
        yield f"plan: {what}computes in {plan.dtype}"
    else:
        yield "Remedies that nanstop proved and kept for the rest of the run."
    for region in plan.regions:
        why = f": {region.reason}" if region.reason else ""
        yield f"  float32  {', '.join(region.modules)}{why}"
    if plan.dtype and plan.logits == "float32":
        why = f": {plan.logits_reason}" if plan.logits_reason else ""
        yield f"  float32  the output head{why}"
    if plan.trainables == "float32":
        why = f": {plan.trainables_reason}" if plan.trainables_reason else ""
        yield f"  float32  trainable parameters and optimizer state{why}"
    if plan.attention:
        why = f": {plan.attention_reason}" if plan.attention_reason else ""
        yield f"  attention by the `{plan.attention}` kernel{why}"
    for atom in plan.remedies:
        yield f"  {describe((atom,))}"
