"""How large what each module puts out is, in one run of a micro-batch."""

from __future__ import annotations

from nanstop.replay.conditions import eager
from nanstop.replay.step import Step
from nanstop.tracing.gauge import RangeTap


def module_ranges(step: Step, micro: int = 0) -> dict[str, float]:
    """Return the largest magnitude of each module's outputs by its name, in the order in which modules end.

    Infinite where a value was not finite; the largest of all calls of a module in the forward. Undone bitwise.
    Synchronises the device once. Raises what the step raises.
    """
    tap = RangeTap(step.view.root)
    with step.isolated(), eager():
        tap.attach()
        try:
            step.run(micro)
        finally:
            tap.detach()
    found: dict[str, float] = {}
    for spot, size in tap.read().items():
        if spot.end == "output":
            found[spot.module] = max(size, found.get(spot.module, 0.0))
    return found
