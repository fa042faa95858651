"""A training that runs away while all of it is finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median_low

from nanstop.diagnose.evidence.accounts import DECAYED, GROWS, has_usual_decay, update_line
from nanstop.diagnose.evidence.climbs import WINDOW, Climb, by_step, climb
from nanstop.diagnose.evidence.lone_update import jumped_loss, lone_update, rates_so_far
from nanstop.diagnose.evidence.reading import series_values, standing
from nanstop.records import Diagnosis, Evidence, Sighting, TensorStats
from nanstop.wording import number

BY_FAR, CLEARLY = 1e5, 100.0
"""Times the usual loss from which on it has surely grown, and from which on it may have."""
_BELOW_ALL = 1e12
LESS_DECAY = "Go back to a checkpoint from before the growth, with a weight decay of 0.01 or 0.1."
MEND_RATE = "go back to weights from before step {}, and mend what sets the rate there"
_RAISED = 10.0
"""Factor from which on a rate that was raised is worth a word."""
_RISING = 7
"""Updates of which all but one have to raise loss and gradient norm of a run that has not
failed."""


def running_away(evidence: Evidence) -> Diagnosis | None:
    """Return the finding of a run that has not failed, None without one."""
    found = _after_one(evidence) or _while_finite(evidence)
    return found or _stays_up(evidence) or _without_end(evidence)


def _while_finite(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if loss and gradient norm of a run that has not failed grew in nearly each
    of its last updates, and by far.

    A loss below zero has no bound, and a search for the learning rate ends so on purpose.
    """
    ends = (one.values[-_RISING - 1 :] for one in evidence.series if one.name == "grad_norm")
    if not _rises(next(ends, ())):  # of nearly all runs: no more is read of them
        return None
    losses, norms = by_step(evidence, "loss_raw"), by_step(evidence, "grad_norm")
    steps = [step for step in losses if step in norms][-WINDOW:]
    latest = steps[-_RISING - 1 :]
    signs = {value > 0.0 for step, value in series_values(evidence, "loss_raw") if step in latest}
    if len(latest) <= _RISING or signs != {True} or _is_search(evidence):
        return None
    if not all(_rises([history[step] for step in latest]) for history in (losses, norms)):
        return None
    loss, norm = (climb({step: each[step] for step in steps}) for each in (losses, norms))
    if loss is None or norm is None or loss.factor < BY_FAR or norm.factor < CLEARLY:
        return None
    by_decay = growth_by_decay(evidence)
    source = update_line(evidence) or standing(evidence).optimizer_at
    return Diagnosis(
        code="NS404",
        title="training runs away",
        cause=(
            f"the loss grew from {loss.first:.3g} to {loss.last:.3g} and is finite: of the last "
            f"{_RISING} updates all but one at most have raised it and the gradient norm"
            f"{by_decay and ': '}{by_decay}"
        ),
        confidence="likely",
        lines=lines_of(evidence, norm, ()),
        usual_cure=LESS_DECAY if by_decay else "",
        where=standing(evidence).host,
        seen=Sighting(step=latest[0], phase="optimizer"),
    ).at(source)


def _without_end(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if the last losses of a run that has not failed are below zero, each so
    far that no objective with a bound or a density comes there.
    """
    known = series_values(evidence, "loss_raw")
    history = known[-_RISING - 1 :]
    latest = [value for _, value in history]
    if len(latest) <= _RISING or not all(-math.inf < value < -_BELOW_ALL for value in latest):
        return None
    # Rewards of 1e20 make losses of that size from the first one on, which do not go anywhere.
    num_lower = sum(later < earlier for earlier, later in pairwise(latest))
    has_come = abs(known[0][1]) < _BELOW_ALL or num_lower >= _RISING - 1
    if not has_come or _is_search(evidence):
        return None
    source = update_line(evidence) or standing(evidence).optimizer_at
    return Diagnosis(
        code="NS404",
        title="the loss falls without end",
        cause=(
            f"it has come to {latest[-1]:.3g} and is finite; the last {len(latest)} losses are "
            f"all below {-_BELOW_ALL:.0g}: some part of it has no bound below"
        ),
        confidence="likely",
        lines=("look at the sign of each part of the loss, and at what it divides by",),
        where=standing(evidence).host,
        seen=Sighting(step=history[0][0], phase="optimizer"),
    ).at(source)


def _after_one(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if the loss has stayed up since one update at a rate of its own."""
    lone = lone_update(evidence)
    if lone is None:
        return None
    facts = standing(evidence)
    return Diagnosis(
        code="NS404",
        title=f"the loss has stayed up since the update of step {lone.step}",
        cause=(
            f"that update was made at a learning rate of {lone.rate:.3g}, those beside it at "
            f"{lone.usual:.3g} or less; no loss before it was above {lone.highest:.3g}, and none "
            f"since is below {lone.lowest:.3g}"
        ),
        confidence="likely",
        lines=(MEND_RATE.format(lone.step),),
        where=facts.host,
        seen=Sighting(step=lone.step, phase="optimizer"),
    ).at(facts.schedule_at or update_line(evidence) or facts.optimizer_at)


def _stays_up(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if the loss jumped within one step and has not come back."""
    jumped = jumped_loss(evidence)
    # Where updates are swallowed (NS307) no training has raised it.
    if jumped is None or _is_search(evidence) or "NS307" in evidence.told:
        return None
    source = update_line(evidence) or standing(evidence).optimizer_at
    return Diagnosis(
        code="NS404",
        title=f"the loss has stayed up since step {jumped.step}",
        cause=(
            f"it was {jumped.loss:.3g} there and never above {jumped.highest:.3g} before; none "
            f"since is below {jumped.lowest:.3g}"
        ),
        confidence="likely",
        lines=(f"look at the batch of step {jumped.step}, and at the update before it",),
        where=standing(evidence).host,
        seen=Sighting(step=jumped.step, phase="loss"),
    ).at(source)


def _rises(values: Sequence[float]) -> bool:
    """Return whether of so many updates all but one at most have raised a value."""
    rises = sum(one < other for one, other in pairwise(values))
    return len(values) > _RISING and rises >= _RISING - 1


def _is_search(evidence: Evidence) -> bool:
    """Return whether the learning rate has itself grown."""
    rates = [rate for _, rate in series_values(evidence, "lr")][-WINDOW:]
    return bool(rates) and rates[-1] > 10.0 * min(rates)


def growth_by_decay(evidence: Evidence) -> str:
    """Return what the last look at an update saw of a decay that makes weights grow, or ""."""
    seen = [share for _, share in series_values(evidence, DECAYED)][-1:]
    optimizer = standing(evidence).optimizer
    rates = rates_so_far(evidence)
    usual = median_low(rates) / rates[-1] if rates else 1.0  # else what has grown is the rate
    decay = optimizer.weight_decay if optimizer is not None else None
    if not seen or seen[0] * min(usual, 1.0) <= GROWS or has_usual_decay(optimizer):
        return ""
    factor = 1.0 - seen[0]
    if not decay:  # an optimizer may scale weights without any
        return f"each update multiplies every weight by {factor:.2g}, beside its gradient"
    return f"the weight decay of {decay:g} multiplies every weight by {factor:.2g} in each update"


def lines_of(
    evidence: Evidence, norm: Climb | None, weights: tuple[TensorStats, ...]
) -> tuple[str, ...]:
    clip, lines = standing(evidence).clip, list(_raised(evidence))
    if norm is not None:
        lines.append(f"the gradient norm went from {norm.first:.3g} to {norm.last:.3g}")
    if weights:
        largest = max(weights, key=lambda stats: stats.absmax)
        lines.append(f"`{largest.name}` has come to {largest.absmax:.3g}")
    lines.append("gradients are not clipped" if not clip else f"clipped at {number(clip)}")
    return tuple(lines)


def _raised(evidence: Evidence) -> tuple[str, ...]:
    """Return what raised the learning rate up to the failure, as far as that is known."""
    rates = rates_so_far(evidence)
    if not rates or rates[-1] <= _RAISED * rates[0]:
        return ()
    facts = standing(evidence)
    named = facts.schedule.scheduler if facts.schedule is not None else ""
    by = f" by the schedule `{named}`" if named else ""
    if facts.schedule_at is not None:
        by = f" by the schedule that {facts.schedule_at.short} makes: `{facts.schedule_at.text}`"
    return (f"the learning rate was raised from {rates[0]:.3g} to {rates[-1]:.3g}{by}",)
