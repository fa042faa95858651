"""What the watched run of a foreign script did otherwise than the plain one, and whether that
was harm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from foreign_runs import STOPPED, Left, Run

_SLACK = 1.05
_LEAST = 0.02
"""A model is worse whose loss is more than a twentieth, and more than this, above that of the
plain run.
"""


def wrong(run: Run, plain: Left, watched: Left) -> list[str]:
    """Return what must not be: nothing may differ in health, only for the better in a failure."""
    if run.fault == "none":
        return [*_differences(plain, watched), *_words(plain, watched)]
    if run.policy == "observe":
        return [*_differences(plain, watched), *watched.own]
    return [*_harm(run, plain, watched), *watched.own]


def _differences(plain: Left, watched: Left) -> Iterator[str]:
    """Yield where a run went another way."""
    if watched.code != plain.code:
        yield f"exit {_code(watched)}, plain {_code(plain)}"
    if watched.raised != plain.raised:
        yield f"raised {watched.raised or 'nothing'}, plain {plain.raised or 'nothing'}"
    if watched.stdout != plain.stdout:
        yield "stdout differs"
    for before, after in zip(plain.steps, watched.steps, strict=False):
        if _bits(before) != _bits(after):
            names = [name for name in before if _bits(before)[name] != _bits(after).get(name)]
            yield f"differs from step {before['step']} on: {', '.join(names)}"
            break
    if len(plain.steps) != len(watched.steps):
        yield f"{len(watched.steps)} steps, plain {len(plain.steps)}"
    if _bits(plain.end or {}) != _bits(watched.end or {}):
        yield "outputs differ"


def _words(plain: Left, watched: Left) -> Iterator[str]:
    """Yield what was said of a run that is healthy."""
    if watched.said:
        yield f"said {', '.join(watched.said)}"
    elif watched.stderr != plain.stderr:
        yield f"stderr differs: {watched.stderr[-200:]!r}"


def _harm(run: Run, plain: Left, watched: Left) -> Iterator[str]:
    stopped = watched.code == STOPPED
    new = [line for line in watched.raised if line not in plain.raised]
    if new and not (stopped and all("TrainingStopped" in line for line in new)):
        yield f"raised {new}, plain {list(plain.raised) or 'nothing'}"
    if watched.code not in (0, STOPPED, plain.code):
        yield f"exit {_code(watched)}, plain {_code(plain)}"
    if stopped and run.policy != "stop" and _is_good(plain) and not _got_as_far(plain, watched):
        yield "stopped a run that ends well without nanstop"
    before = {line["step"]: line for line in plain.steps}
    for line in watched.steps:
        if not line["finite"] and before.get(line["step"], {}).get("finite"):
            yield f"weights not finite after step {line['step']}, finite in the plain run"
            break
    if watched.code == 0 and _is_worse(plain.end, watched.end):
        yield f"loss {_loss(watched.end):.4g} at the end, plain {_loss(plain.end):.4g}"


def _is_good(plain: Left) -> bool:
    return plain.code == 0 and plain.end is not None and plain.end["finite"]


def _got_as_far(plain: Left, watched: Left) -> bool:
    """Return whether a run was stopped with the weights that the plain one has at its end:
    all later updates are lost there.
    """
    return bool(watched.steps) and watched.steps[-1]["crc"] == plain.steps[-1]["crc"]


def _is_worse(plain: Mapping[str, Any] | None, watched: Mapping[str, Any] | None) -> bool:
    before, after = _loss(plain), _loss(watched)
    if not math.isfinite(before):
        return False
    return not after <= before + max(_LEAST, (_SLACK - 1) * abs(before))


def _loss(end: Mapping[str, Any] | None) -> float:
    return math.nan if end is None or end["loss"] is None else end["loss"]


def _bits(line: Mapping[str, Any]) -> dict[str, str]:
    """Return a line's values as text: NaN equals itself."""
    return {name: repr(value) for name, value in line.items()}


def _code(left: Left) -> str:
    return "none in time" if left.code is None else str(left.code)
