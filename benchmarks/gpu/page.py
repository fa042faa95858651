"""The page of what was run on GPUs, ``docs/gpu.md``: its tests, written by hand, and a table for
each part that has been measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "gpu"
PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
TESTS = Path(__file__).with_name("tests.md")
"""What tests show on a GPU, and what each part measures, written by hand."""

_LEFT_OUT = {
    "kernels": ("module", "line", "reference", "phase", "repeats", "seconds"),
    "full_card": ("to host gib s", "from host gib s", "others", "trials s"),
    "half": ("finite losses",),
}
"""Columns that are in the results only."""


def write_page() -> None:
    """Write the page anew from what is kept of the benchmark."""
    text = TESTS.read_text()
    for file in sorted(RESULTS.glob("*.json")):
        text += "\n" + "\n".join(_device(json.loads(file.read_text())))
    PAGE.write_text(text)


def _device(found: Mapping[str, Any]) -> Iterator[str]:
    known = found["machine"]
    yield f"## {known.get('name', 'A CPU, at toy sizes')}\n"
    if "cuda" in known:
        yield f"{known['memory_gib']} GiB, CUDA {known['cuda']}, cuDNN {known['cudnn']}.\n"
    for name, part in found["parts"].items():
        versions = ", ".join(f"{package} {one}" for package, one in part["versions"].items())
        yield f"### {name}\n"
        yield f"{part['date']}, {part['seconds']:g} s, {versions}.\n"
        yield from _table(part["rows"], _LEFT_OUT.get(name, ()))
        for lack in part["lacks"]:
            yield f"- Not measured: {lack}"
        if part["lacks"]:
            yield ""


def _table(rows: list[dict[str, Any]], left_out: tuple[str, ...]) -> Iterator[str]:
    columns = list(dict.fromkeys(name for row in rows for name in row if name not in left_out))
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(_said(row.get(column)) for column in columns)} |"
    yield ""


def _said(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {one}" for name, one in value.items())
    return str(value).replace("|", "\\|")
