"""How near to the exact run a cure must come: as near as what is healthy is to its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from nanstop.errors import ShortOfMemoryError
from nanstop.numerics.tensors import format_name
from nanstop.prove.bad_samples import only
from nanstop.prove.failing_step import FailingStep
from nanstop.prove.reference.agreement import SAME, Gaps, farthest
from nanstop.prove.reference.exact import ExactRuns
from nanstop.records import Outcome, Reference
from nanstop.records.formats import EPSILON
from nanstop.replay.rerun import Attempt

_HEALTHY_FACTOR = 3.0
_SPACINGS = 8.0, 10.0, 64.0
"""Spacings of the coarsest format that the loss, the gradients' direction and the worst gradient
may be off under a cure where no healthy run says how far is usual.
"""

_FARTHEST = 0.2
"""What is healthy and has a loss farther from the exact one than this is no measure."""

_ASTRAY = 0.5
"""What is healthy and has a gradient farther from the exact direction than this has none that
means anything: a gradient of rounding alone, of a function that is constant or cancels.
"""

_BEFORE = "the windows before"


@dataclass(frozen=True, slots=True)
class Healthy:
    """What is healthy of a failing step. ``others``: micro-batches of its window; ``rows``: finds
    samples of the failing one; ``most``: how many of the windows before are looked at.
    """

    failing: FailingStep
    exact: ExactRuns
    others: tuple[int, ...]
    rows: Callable[[], tuple[int, ...]]
    most: int

    def gaps(self) -> tuple[str, Gaps | None]:
        """Return what is healthy, and how far it is from float32.

        Another micro-batch; the failing one where only the update fails; the windows before, and
        those of its samples that do not fail.
        """
        failing, source, found = self.failing, "", None
        if self.others:
            source = f"micro-batch {self.others[0]} of the same window, which is healthy"
            found = self.exact.own_gaps(self.others[0])
        elif failing.update:
            source = "forward and backward of this window, which are healthy"
            found = self.exact.own_gaps(failing.micro)
        else:
            windows, rows = self._gaps_before(), self._gaps_of_rows()
            named = {_BEFORE: bool(windows), "the healthy samples of this micro-batch": bool(rows)}
            source = ", and ".join(what for what, is_there in named.items() if is_there)
            found = farthest([*windows, *rows])
        if found is None:
            return "the spacing of the format: nothing in this window is healthy", None
        return source, found

    def _gaps_before(self) -> list[Gaps]:
        """Return how far the last micro-batches of the windows before are from float32, with the
        weights of today.
        """
        earlier = islice(windows_before(self.failing), self.most)
        found = (self.exact.beside(one).own_gaps(one.micro) for one in earlier)
        return [gaps for gaps in found if gaps is not None]

    def _gaps_of_rows(self) -> list[Gaps]:
        rows = self.rows()
        if not rows:
            return []
        batch = only(self.failing.step.batches[self.failing.micro], rows)
        try:
            gaps = self.exact.gaps_of_rows(self.failing.micro, batch)
        except ShortOfMemoryError:
            return []
        return [gaps] if gaps is not None else []


def reference_of(run: Attempt, outcome: Outcome, exact: ExactRuns, healthy: Healthy) -> Reference:
    """Return the exact run of a failing micro-batch with its tolerances.

    These are three times the distances of something healthy of the same window to its own float32
    run; where there is none, they follow from the format's spacing. A loss is at best a sum in
    float32, in whose last digits the few that are healthy may agree by chance.
    """
    eps = exact.coarsest_eps()
    source, usual = healthy.gaps()
    loss, cosines, gradient = (
        (usual[0], 1.0 - usual[1], usual[2])
        if usual is not None
        else tuple(n * eps / _HEALTHY_FACTOR for n in _SPACINGS)
    )
    farthest_loss = _FARTHEST if cosines <= _ASTRAY else SAME
    num_draws, num_choices = exact.num_taken()
    return Reference(
        outcome=outcome,
        dtype=format_name(exact.dtype),
        loss=run.loss,
        loss_tolerance=max(
            min(_HEALTHY_FACTOR * loss, farthest_loss), eps, _SPACINGS[0] * EPSILON["float32"]
        ),
        cosine_tolerance=max(_HEALTHY_FACTOR * cosines, eps),
        grad_tolerance=max(_HEALTHY_FACTOR * gradient, _SPACINGS[2] * eps),
        source=source,
        num_draws=num_draws,
        num_choices=num_choices,
        still_in=exact.still_in(),
        without_casts=exact.leaves_half,
        fails_in=exact.fails_in(),
    )


def windows_before(failing: FailingStep) -> Iterator[FailingStep]:
    """Yield the last micro-batch of each window before as if it were the one that failed, the
    latest first.
    """
    for step in reversed(failing.before):
        micro = len(step.batches) - 1
        yield replace(failing, step=step, micro=micro, micros=(micro,), before=())
