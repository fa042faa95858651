"""The table of ``docs/architectures.md``, from the rows of ``architectures.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "architectures.md"
COMMAND = "python benchmarks/architectures.py"

Row = dict[str, Any]
Rows = dict[str, Row]


def write(results: dict[str, Any]) -> None:
    """Write the page anew."""
    PAGE.write_text(page(results))


def page(results: dict[str, Any]) -> str:
    """Return the page of all rows."""
    rows = dict(sorted(results["rows"].items()))
    built = {name: row for name, row in rows.items() if "reason" not in row}
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    absent = (
        f"- `{name}` ({row['class']}): {row['reason']}"
        for name, row in rows.items()
        if "reason" in row
    )
    lines = [
        "# Architectures",
        "",
        _INTRODUCTION.format(command=COMMAND, versions=versions),
        *rates(rows),
        "",
        _HOW,
        *_section("Misses", "", misses(built)),
        *_section("What a model itself does not do", _ITSELF, refusals(built)),
        *_section("Not built", "", absent),
        *_section("All classes", "", table(built)),
    ]
    return "\n".join(lines)


def _section(title: str, said: str, lines: Iterator[str]) -> list[str]:
    return [f"## {title}", "", *([said, ""] if said else []), *(list(lines) or ["None."]), ""]


_ITSELF = (
    "Without nanstop, too. Without bfloat16 weights it is watched under bfloat16 autocast instead."
)
_HEADS = (
    "model type",
    "class",
    "parameters",
    "float32",
    "bfloat16",
    "overflow in float16 weights",
    "float16 autocast",
    "float32",
    "float16 plan",
    "watched with it",
)
_INTRODUCTION = """\
Every class of transformers' `MODEL_FOR_CAUSAL_LM_MAPPING`, built with a few layers of width 32,
watched while it is healthy, broken at a place that is known, and given a float16 plan.
`{command}` ({versions}; CPU, one thread) makes this page and repeats only what is missing;
`make architectures` does the same.
"""

_HOW = """\
- **Watched**: five AdamW steps (learning rate 1e-3; full batches, padded on the right, padded on
  the left) in a raw loop under `nanstop.watch`, once in float32, once in bfloat16 weights, and in
  float16 under the class's plan with its loss scaler. An incident where the same run unwatched
  has finite losses and gradients, a finding beyond those that `nanstop.check` states before the
  run, or (without a scaler) a loss or weight that is not bitwise that of the same run unwatched
  is a false alarm.
- **Overflow**: a layer, a module of it and a parameter of that are drawn (the seed is the class's
  name); the parameter is scaled so that the module's output passes the largest number of the
  format by half, and loss or gradients fail. Hooks on all modules, which know nothing of nanstop,
  say in which one the first value was not finite; nanstop has to name exactly that module. Once
  in float16 weights, once under float16 autocast, once in float32.
- **Plan**: `nanstop.plan` from three batches: full, padded on the right, padded on the left. Loss
  and gradients of the planned model are then measured from outside. Parity is a loss within 1e-3
  of float32 and a gradient cosine of at least 0.999 on those batches; two more, which the plan
  has not seen, are counted apart: where a router chooses other experts for a token, the step is
  another function.
- Sizes are shrunk by the names of a configuration's fields
  (`benchmarks/architectures_configs.py`); models are initialised as transformers does and not
  trained, so that their values are small and most plans need no float32 region.
"""


def rates(rows: Rows) -> list[str]:
    """Return the table of rates with counts."""
    built = [row for row in rows.values() if "reason" not in row]
    healths = [h for row in built for h in _healths(row) if not h["sick"]]
    plants = [p for row in built for p in row.get("plants", ()) if p["truth"]]
    plans = [row["plan"] for row in built if "plan" in row]
    return [
        "| what | rate | count |",
        "|---|---|---|",
        _rate("classes built, of all tried", len(built), len(rows)),
        _rate("watched runs without a false alarm", sum(map(_silent, healths)), len(healths)),
        _rate("overflows localized to exactly their module", _count(plants, "exact"), len(plants)),
        _rate("classes with a float16 plan at parity", _count(plans, "parity"), len(plans)),
        _rate(
            "the same on batches that the plan has not seen",
            _count(plans, "unseen_parity"),
            len(plans),
        ),
    ]


def _count(rows: list[Row], key: str) -> int:
    return sum(row[key] for row in rows)


def _rate(what: str, count: int, of: int) -> str:
    return f"| {what} | {100 * count / of if of else 0:.1f} % | {count} of {of} |"


def _healths(row: Row) -> Iterator[Row]:
    yield from row.get("health", ())
    if row.get("plan", {}).get("health"):
        yield row["plan"]["health"]


def _silent(health: Row) -> bool:
    return not health["incidents"] and not health["findings"] and health["same"] is not False


def misses(built: Rows) -> Iterator[str]:
    """Yield a line for everything that did not go as it should."""
    for name, row in built.items():
        if "stopped" in row:
            yield f"- `{name}`: {row['stopped']}"
        for health in _healths(row):
            if not health["sick"] and not _silent(health):
                said = "; ".join((*health["incidents"], *health["findings"])) or "losses differ"
                yield f"- `{name}`, watched in {health['form']}: {said}"
            if health.get("overflowed"):
                steps = ", ".join(map(str, health["overflowed"]))
                yield (
                    f"- `{name}`, trained in {health['form']}: gradients overflow at step {steps}, "
                    "unwatched too; nanstop says so, which is no false alarm"
                )
        for plant in row.get("plants", ()):
            if plant["truth"] and not plant["exact"]:
                named = f"named `{plant['found']}`" if plant["found"] else plant["reason"]
                yield f"- `{name}`, {plant['form']}: overflow in `{plant['truth']}`, {named}"
        plan = row.get("plan")
        if plan and not plan["parity"]:
            yield f"- `{name}`, plan: {plan['reason'] or _distances(plan, '')}"
        elif plan and not plan["unseen_parity"]:
            yield f"- `{name}`, plan on an unseen batch: {_distances(plan, 'unseen_')}"


def _distances(plan: Row, which: str) -> str:
    gap, cosine = plan[f"{which}loss_gap"], plan[f"{which}cosine"]
    return (
        f"loss {gap:.1e} from float32, gradient cosine {cosine:.5f}"
        if gap is not None
        else "not finite"
    )


def refusals(built: Rows) -> Iterator[str]:
    """Yield a line for each form in which a model does not run, with or without nanstop."""
    for name, row in built.items():
        for health in _healths(row):
            if health["sick"]:
                yield f"- `{name}`, {health['form']}: {health['sick']}"
            if health.get("own_chance"):
                chance = "two runs from one seed differ, so that none can be compared"
                yield f"- `{name}`, {health['form']}: {chance}"
        for plant in row.get("plants", ()):
            if not plant["truth"]:
                yield f"- `{name}`, {plant['form']}: {plant['reason']}"


def table(built: Rows) -> Iterator[str]:
    """Yield the lines of the table of all classes."""
    yield "| " + " | ".join(_HEADS) + " |"
    yield "|---" * len(_HEADS) + "|"
    for name, row in built.items():
        cells = [name, row["class"], str(row.get("parameters", ""))]
        health = [h for h in row.get("health", ()) if not h["sick"]]
        cells += _fill([_health(h) for h in health], 2)
        cells += _fill([_plant(p) for p in row.get("plants", ())], 3)
        plan = row.get("plan", {})
        cells += [_plan(plan), _health(plan["health"]) if plan.get("health") else "-"]
        yield "| " + " | ".join(cells) + " |"


def _fill(cells: list[str], count: int) -> list[str]:
    return (cells + ["-"] * count)[:count]


def _health(health: Row) -> str:
    if health["sick"]:
        return "-"
    where = " (autocast)" if health["form"].endswith("autocast") else ""
    said = "true alarm" if health.get("overflowed") else "silent"
    return (said if _silent(health) else "**false alarm**") + where


def _plant(plant: Row) -> str:
    if not plant["truth"]:
        return "-"
    return f"`{plant['truth']}`" if plant["exact"] else f"**missed** `{plant['truth']}`"


def _plan(plan: Row) -> str:
    if not plan:
        return "-"
    if not plan["parity"]:
        return "**none**" if plan["reason"] else "**no parity**"
    regions = f"{plan['regions']} in float32" if plan["regions"] else "all in float16"
    return regions + ("" if plan["unseen_parity"] else ", **not on an unseen batch**")


def line(name: str, row: Row) -> str:
    """Return what the terminal shows of a class."""
    if "reason" in row:
        return f"{name}: not built: {row['reason']}"
    health = [_health(h) for h in _healths(row)]
    plants = ["exact" if p["exact"] else p["reason"] or "missed" for p in row.get("plants", ())]
    plan = [_plan(row["plan"])] if "plan" in row else []
    said = ", ".join([*health, *plants, *plan, *([row["stopped"]] if "stopped" in row else [])])
    return f"{name}: {said} ({row['seconds']} s)"
