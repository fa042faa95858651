"""Training ran away: loss and gradients grew from step to step until a value left its format.

## What happened
An operation overflowed on finite weights and a finite batch. In the steps before it the loss and
the gradient norm had grown, each step more than the one before, and nothing was wrong with any of
them but their size. It is told while all is finite, too: where six of seven updates raise both, and
the loss has come to 100,000 times what it was; and where no loss since one update has been as low
as the highest before it, and that update had a learning rate 10 times that of those beside it; or
where one loss was 1000 times all before it, and none of 16 since is below 100 times as much. So is
a loss that has fallen below -1e12 and stays there: some part of it, a sign the wrong way round, has
no bound below.

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

from nanstop.diagnose.evidence.candidates import Candidates
from nanstop.diagnose.evidence.climbs import Climb, climbs
from nanstop.diagnose.evidence.lone_update import (
    RaisedRate,
    growth_of_rate,
    raised_rate,
)
from nanstop.diagnose.evidence.reading import first_bad, standing, too_long_step
from nanstop.diagnose.evidence.rule import Rule
from nanstop.diagnose.evidence.shorter_updates import (
    are_refuted,
    made_anew,
    passing,
    passing_unscaled,
    was_tried,
    without_scale,
)
from nanstop.diagnose.findings.weights.running_away import (
    BY_FAR,
    CLEARLY,
    LESS_DECAY,
    MEND_RATE,
    growth_by_decay,
    lines_of,
    running_away,
)
from nanstop.records import (
    FORMAT_MAX,
    Atom,
    Confidence,
    Diagnosis,
    Evidence,
    OpEvent,
    RunFacts,
    TensorStats,
    op_name,
)
from nanstop.records.formats import EPSILON
from nanstop.records.vocabulary import EXPONENTIALS

ANYWHERE = ("forward", "recompute", "loss", "backward", "optimizer")
WIDE = 1e30
"""Formats that end beyond this hold whatever a training that does not run away computes."""
DECAY = "weight_decay"
"""The remedy."""
USUAL_DECAY = 0.01


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if loss and gradient norm climb, to an overflow or so far that no other
    training does.
    """
    if evidence.incident is None:
        return running_away(evidence)
    event, output = first_bad(evidence, ANYWHERE)
    if event is None or output is None or not _is_overflow(event, output):
        return None
    if evidence.incident.apart is not None:  # one batch alone has led there: NS504
        return None
    weights = _grown_weights(evidence)
    wide = FORMAT_MAX.get(output.dtype, 0.0) > WIDE
    loss, norm = climbs(evidence)
    raised, factor = raised_rate(evidence) if weights else None, growth_of_rate(evidence)
    facts, shorter, decayed = standing(evidence), passing(evidence), growth_by_decay(evidence)
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
        lines=lines_of(evidence, norm, weights),
        remedies=()
        if raised or factor
        else _remedies(facts, decayed, in_update=event.phase == "optimizer"),
        usual_cure=_mend(raised, factor) or (LESS_DECAY if decayed else ""),
        where=event.module,
        of_updates=event.phase != "optimizer",
    )


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
        return MEND_RATE.format(raised.step)
    return f"end the rise of the rate: each update multiplies it by {factor:.3g}" if factor else ""


def _of_raised(raised: RaisedRate) -> str:
    return (
        f"weights grew beyond all measure since the update of step {raised.step}: it was made at a "
        f"learning rate of {raised.rate:.3g}, those before it at {raised.usual:.3g} or less"
    )


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
