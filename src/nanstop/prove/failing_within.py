"""A step that breaks weights by itself, before its update: it moves them for a second backward
(SAM, adversarial training), and back by what is not finite.
"""

from __future__ import annotations

from nanstop.prove.failing_step import FailingStep, WayBack, apply_update
from nanstop.replay.rerun import attempt
from nanstop.replay.step import Step


def failing_within(step: Step | None, rewind: WayBack | None) -> FailingStep | None:
    """Return the failing step of a window that fails on the weights which the updates before it,
    made again, leave finite; None where it passes on them, or cannot be run. Undone; synchronises
    the device.
    """
    if step is None or rewind is None:
        return None
    before = tuple(one for one in rewind.steps if one is not step)
    with rewind.rewound():
        for earlier in before:
            apply_update(earlier)
        runs = [attempt(step, micro) for micro in range(len(step.batches))]
    bad = tuple(micro for micro, run in enumerate(runs) if run.failed and not run.lacked_memory)
    return FailingStep(step, bad[0], bad, rewind=rewind, before=before) if bad else None
