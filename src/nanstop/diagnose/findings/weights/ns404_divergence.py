"""Training ran away: loss and gradients grew from step to step until a value left its format.

## What happened
An operation overflowed on finite weights and a finite batch. In the steps before it the loss and
the gradient norm had grown, each step more than the one before, and nothing was wrong with any of
them but their size. It is told while all is finite, too: where six of seven updates raise both, and
the loss has come to 100,000 times what it was; and where no loss since one update has been as low
as the highest before it, and that update had a learning rate 10 times that of those beside it. So
is a loss that has fallen below -1e12 and stays there: some part of it, a sign the wrong way round,
has no bound below.

## Why it happens
Gradient descent on a curvature of L multiplies the distance to the minimum by |1 - lr L| a step:
for lr L = 12 that is 11, and 11^37 = 3.4e38 leaves float32 after 37 steps. In a network of several
layers the gradient grows with the product of the others' weights, so that the exponent itself
grows: 5, 8.7e7, 5e29, Inf in three steps. A wider format only postpones it: float64 ends at
1.8e308. A decoupled weight decay multiplies every weight by 1 - lr x decay in each update: for a
rate of 0.5 and a decay of 20 that is -9, whatever the gradients are. That is measured, as in NS113.

## Example
```python
import torch

w = torch.tensor(1.0, requires_grad=True)
for _ in range(37):
    (grad,) = torch.autograd.grad(6.0 * w * w, w)   # curvature 12: 1, -11, 121, -1331, ...
    w.data -= 1.0 * grad
w.data                              # tensor(-inf)
```

## Fix
1. Go back to a checkpoint from before the growth, with a tenth of the learning rate.
   Cost: the steps since then.
2. Clip the gradient norm (`max_grad_norm=1.0`). Cost: none;
   it bounds a step, not a learning rate that is too large.
3. Warm the learning rate up over some hundred steps. Cost: those steps. `nanstop lr-range SCRIPT`
   finds the rate at which training runs away. Cost: about a hundred steps.
4. Where one update had a rate of its own, mend what sets the rate there: a finder that leaves its
   last one in, a schedule that is asked for another step. Cost: none.

## Fix safety
All of it changes training. Leaving the failing update out is no cure: the weights are where they
are. nanstop makes the updates anew that led to the failure, from its last snapshot, with a tenth of
the rate, a hundredth, ..., and clipped: what keeps twenty of them finite and ends with a loss no
higher than at the snapshot is the proven cure. With `allow=("lr",)` the run goes back to before the
growth, makes the same updates under it, and goes on.

## Not to be confused with
NS201: the loss was flat and one value is too large for a narrow format. NS402: one update breaks
the weights without any growth before it. A single spike of the loss is not divergence, and neither
is a batch that is far from the others (NS504).

## References
- https://github.com/karpathy/nanoGPT/issues/418
- https://github.com/huggingface/transformers/issues/27121
- https://github.com/huggingface/peft/issues/3073
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median_low

from nanstop.diagnose.evidence.accounts import DECAYED, GROWS, has_usual_decay, update_line
from nanstop.diagnose.evidence.candidates import Candidates
from nanstop.diagnose.evidence.climbs import WINDOW, Climb, by_step, climb, climbs
from nanstop.diagnose.evidence.lone_update import (
    RaisedRate,
    growth_of_rate,
    lone_update,
    raised_rate,
    rates_so_far,
)
from nanstop.diagnose.evidence.reading import first_bad, series_values, standing, too_long_step
from nanstop.diagnose.evidence.rule import Rule
from nanstop.diagnose.evidence.shorter_updates import (
    are_refuted,
    made_anew,
    passing,
    passing_unscaled,
    was_tried,
    without_scale,
)
from nanstop.records import (
    FORMAT_MAX,
    Atom,
    Confidence,
    Diagnosis,
    Evidence,
    OpEvent,
    RunFacts,
    Sighting,
    TensorStats,
    op_name,
)
from nanstop.records.formats import EPSILON
from nanstop.records.vocabulary import EXPONENTIALS
from nanstop.wording import number

ANYWHERE = ("forward", "recompute", "loss", "backward", "optimizer")
WIDE = 1e30
"""Formats that end beyond this hold whatever a training that does not run away computes."""
BY_FAR, CLEARLY, BELOW_ALL = 1e5, 100.0, 1e12
DECAY = "weight_decay"
"""The remedy."""
USUAL_DECAY = 0.01
_LESS_DECAY = "Go back to a checkpoint from before the growth, with a weight decay of 0.01 or 0.1."
_MEND_RATE = "go back to weights from before step {}, and mend what sets the rate there"
_RAISED = 10.0
"""Factor from which on a rate that was raised is worth a word."""
_RISING = 7
"""Updates of which all but one have to raise loss and gradient norm of a run that has not
failed."""


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if loss and gradient norm climb, to an overflow or so far that no other
    training does.
    """
    if evidence.incident is None:
        return _after_one(evidence) or _while_finite(evidence) or _without_end(evidence)
    event, output = first_bad(evidence, ANYWHERE)
    if event is None or output is None or not _is_overflow(event, output):
        return None
    weights = _grown_weights(evidence)
    wide = FORMAT_MAX.get(output.dtype, 0.0) > WIDE
    loss, norm = climbs(evidence)
    raised, factor = raised_rate(evidence) if weights else None, growth_of_rate(evidence)
    facts, shorter, decayed = standing(evidence), passing(evidence), _decayed(evidence)
    confidence = _confidence(loss, norm, wide=wide, moved=bool(weights))
    if shorter is not None and shorter.atoms[0].remedy != DECAY and was_tried(evidence, DECAY):
        decayed = ""
    ended = f"overflowed {output.dtype}" if output.posinf or output.neginf else "had no value"
    is_lost = evidence.incident.at.step > 0 and bool(too_long_step(facts))
    # Both are measured of the updates before, whatever norms hide from the loss.
    if is_lost or (weights and decayed):
        confidence = "likely"
    if raised is not None:  # a tenth of such a rate is as bad
        confidence = "likely"
    elif confidence is None or are_refuted(evidence) or passing_unscaled(evidence, facts):
        return None
    return Diagnosis(
        code="NS404",
        title=f"training ran away until `{op_name(event.op)}` {ended}",
        cause=_cause(loss, weights, facts, decayed) if raised is None else _of_raised(raised),
        confidence=confidence if shorter is None else "certain",
        confirmed="" if shorter is None else made_anew(shorter),
        lines=_lines(evidence, norm, weights),
        remedies=()
        if raised or factor
        else _remedies(facts, decayed, in_update=event.phase == "optimizer"),
        usual_cure=_mend(raised, factor) or (_LESS_DECAY if decayed else ""),
        where=event.module,
        of_updates=event.phase != "optimizer",
    )


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
    decayed = _decayed(evidence)
    source = update_line(evidence) or standing(evidence).optimizer_at
    return Diagnosis(
        code="NS404",
        title="training runs away",
        cause=(
            f"the loss grew from {loss.first:.3g} to {loss.last:.3g} and is finite: of the last "
            f"{_RISING} updates all but one at most have raised it and the gradient norm"
            f"{decayed and ': '}{decayed}"
        ),
        confidence="likely",
        lines=_lines(evidence, norm, ()),
        usual_cure=_LESS_DECAY if decayed else "",
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
    if len(latest) <= _RISING or not all(-math.inf < value < -BELOW_ALL for value in latest):
        return None
    # Rewards of 1e20 make losses of that size from the first one on, which do not go anywhere.
    num_lower = sum(later < earlier for earlier, later in pairwise(latest))
    has_come = abs(known[0][1]) < BELOW_ALL or num_lower >= _RISING - 1
    if not has_come or _is_search(evidence):
        return None
    source = update_line(evidence) or standing(evidence).optimizer_at
    return Diagnosis(
        code="NS404",
        title="the loss falls without end",
        cause=(
            f"it has come to {latest[-1]:.3g} and is finite; the last {len(latest)} losses are "
            f"all below {-BELOW_ALL:.0g}: some part of it has no bound below"
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
        lines=(_MEND_RATE.format(lone.step),),
        where=facts.host,
        seen=Sighting(step=lone.step, phase="optimizer"),
    ).at(facts.schedule_at or update_line(evidence) or facts.optimizer_at)


def _rises(values: Sequence[float]) -> bool:
    """Return whether of so many updates all but one at most have raised a value."""
    rises = sum(one < other for one, other in pairwise(values))
    return len(values) > _RISING and rises >= _RISING - 1


def _is_search(evidence: Evidence) -> bool:
    """Return whether the learning rate has itself grown."""
    rates = [rate for _, rate in series_values(evidence, "lr")][-WINDOW:]
    return bool(rates) and rates[-1] > 10.0 * min(rates)


def _is_overflow(event: OpEvent, output: TensorStats) -> bool:
    """Return whether a wider format holds the result, as far as it was tried:
    beyond float64 there is none.

    In backward a fused kernel that is repeated gets what its forward kept in the narrow format:
    no test of large values.
    """
    kept = event.phase == "backward" and any(_has_no_units(stats) for stats in event.inputs)
    if event.name in EXPONENTIALS and event.phase != "backward" and not output.nan:
        return True
    return event.wider != "nonfinite" or kept or (output.dtype == "float64" and not output.nan)


def _has_no_units(stats: TensorStats) -> bool:
    """Return whether neighbours at the largest value are more than 1 apart:
    e to such a difference is any number.
    """
    return stats.absmax > 2.0 / EPSILON.get(stats.dtype, math.inf)


def _grown_weights(evidence: Evidence) -> tuple[TensorStats, ...]:
    """Return weights larger than converging training makes, and that began smaller."""
    incident = evidence.incident
    if incident is None:
        return ()
    facts = standing(evidence)
    before = {stats.name for stats in facts.odd_weights}
    left = {stats.name for stats in facts.left_weights}
    return tuple(
        stats
        for stats in incident.odd_weights
        if stats.name not in before and (incident.at.step > 0 or stats.name in left)
    )


def _confidence(
    loss: Climb | None, norm: Climb | None, *, wide: bool, moved: bool
) -> Confidence | None:
    if loss is None:
        return "possible" if moved else None
    # The norm of the failing step itself is not finite: it rose once more than its history says.
    rises = min(loss.rises, norm.rises + 1) if norm is not None else loss.rises
    factor = max(loss.factor, norm.factor if norm is not None else 0.0)
    if factor < CLEARLY or not rises:  # norms hide from the loss what became of weights
        return "possible" if moved and loss.is_short else None
    enough = 2 if moved or (wide and factor >= BY_FAR) else 3
    if rises >= enough or (moved and loss.is_short):
        return "likely"
    # A lone spike after a flat history may be a batch's own.
    return "possible" if moved or rises >= 2 or (loss.is_short and factor >= BY_FAR) else None


def _cause(
    loss: Climb | None, weights: tuple[TensorStats, ...], facts: RunFacts, decayed: str
) -> str:
    left = {stats.name for stats in facts.left_weights}
    if loss is None and any(stats.name in left for stats in weights):
        return "an earlier training in this process left weights that had grown beyond all measure"
    lr = facts.optimizer.rate if facts.optimizer is not None else None
    rate = f" at a learning rate of {lr:g}" if lr is not None else ""
    rate = f": {decayed}" if decayed else rate
    if loss is None or (loss.is_short and loss.factor < CLEARLY):
        return f"weights grew beyond all measure in the updates before it{rate}"
    return f"the loss grew from {loss.first:.3g} to {loss.highest:.3g} before it{rate}"


def _mend(raised: RaisedRate | None, factor: float | None) -> str:
    if raised is not None:
        return _MEND_RATE.format(raised.step)
    return f"end the rise of the rate: each update multiplies it by {factor:.3g}" if factor else ""


def _of_raised(raised: RaisedRate) -> str:
    return (
        f"weights grew beyond all measure since the update of step {raised.step}: it was made at a "
        f"learning rate of {raised.rate:.3g}, those before it at {raised.usual:.3g} or less"
    )


def _decayed(evidence: Evidence) -> str:
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


def _lines(
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


def _remedies(facts: RunFacts, decayed: str, *, in_update: bool) -> Candidates:
    """Return what bounds an update that fails, or what makes those shorter that led to a failure:
    weights that are too large have no cure in a step.
    """
    if decayed and in_update:
        return ()
    clipping: Candidates = ((Atom(remedy="clip", value="1"),),) if not facts.clip else ()
    shorter: Candidates = ((Atom(remedy="lr", value="0.1"),),)
    if in_update:
        return (*clipping, *shorter)
    scale = without_scale(facts)
    usual = facts.optimizer is None or (facts.optimizer.weight_decay or 0.0) > USUAL_DECAY
    decay = Atom(remedy=DECAY, value=f"{USUAL_DECAY:g}" if usual else "0")
    first = ((decay,) if decayed else (), (scale,) if scale is not None else ())
    return (*filter(None, first), *shorter, *clipping)


RULE = Rule(
    "NS404", "divergence", "training ran away", check, ("incident", "gauge"), yields_to=("NS105",)
)
