"""One non-finite gradient destroys all the others through clipping.

## What happened
A gradient was not finite, and gradients were clipped by their common norm: what was healthy is zero
or NaN as well. Or every gradient was finite, their squares were summed in float16, and the norm
alone was Inf: all of them are zero.

## Why it happens
Clipping multiplies every gradient by max_norm / norm. One Inf among a million elements makes the
norm Inf and the factor 1 / Inf = 0: each finite gradient becomes 0, and the Inf itself Inf x 0 =
NaN. One NaN makes the norm NaN and with it every gradient. The optimizer then writes NaN into one
weight in the first case and into all in the second, and a log that shows zeros looks like a run
that has converged.

## Example
```python
import torch

a, b = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
a.grad, b.grad = torch.tensor([1.0, 2.0]), torch.tensor([torch.inf, 1.0])
torch.nn.utils.clip_grad_norm_([a, b], 1.0)     # tensor(inf)
a.grad, b.grad                      # (tensor([0., 0.]), tensor([nan, 0.]))
torch.nn.utils.clip_grad_norm_([a, b], 1.0, error_if_nonfinite=True)    # RuntimeError: The total
```

## Fix
1. Cure what made the first gradient non-finite: the finding beside this one names it.
   Cost: see its page.
2. Look at the norm before it is used: `clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)`,
   or leave the update out when it is not finite. Cost: one synchronisation a step.
3. Leave the clipping to `clip_grad_norm_` or the trainer, where nanstop looks first. Cost: none.

## Fix safety
Nothing is changed by looking. A smaller max_norm is no cure: it multiplies the same Inf.

## Not to be confused with
NS301 and NS304 say what made the gradient non-finite. NS112: every gradient is finite and their
norm is not, because it was added up in half precision.

## References
- https://github.com/pytorch/pytorch/issues/46849
- https://github.com/pytorch/pytorch/pull/53843
"""

from __future__ import annotations

import math

from nanstop.diagnose.evidence.reading import loss_is_bad, reached, sighting, standing
from nanstop.diagnose.evidence.rule import Rule
from nanstop.diagnose.findings.gradients import ns301_gradient_overflow, ns304_backward_singularity
from nanstop.records import (
    Confidence,
    Diagnosis,
    Evidence,
    GradientTally,
    Localization,
    Probe,
    Signal,
)
from nanstop.wording import counted, listed, number, percent

MOST = 0.5


def check(evidence: Evidence) -> Diagnosis | None:
    """Return what clipping did to healthy gradients, or else what it would have done."""
    if evidence.probe is not None:
        return _emptied(evidence, evidence.probe)
    if evidence.incident is None:
        return _spared(evidence)
    signal = _gradient_signal(evidence)
    tally = signal.gradients if signal is not None else None
    if signal is None or tally is None or loss_is_bad(evidence):
        return None
    return _done(evidence, tally) or _prevented(evidence, signal, tally)


def _spared(evidence: Evidence) -> Diagnosis | None:
    """Return that a norm alone was infinite, and that the clip by it was left out."""
    step = standing(evidence).infinite_norm_at
    if step is None or "infinite_norm_at" not in evidence.learned:
        return None
    return Diagnosis(
        code="NS305",
        title="the norm of finite gradients is infinite",
        cause="with max_grad_norm = 0 the host clips by that norm to infinity, which makes every "
        "gradient NaN: left out, the gradients are as they were",
        confidence="certain",
        lines=(
            "without nanstop all weights are NaN from here on: ask what makes gradients so large",
        ),
        where=standing(evidence).host,
        seen=sighting(evidence, "backward", since=step),
    )


def _emptied(evidence: Evidence, probe: Probe) -> Diagnosis | None:
    """Return the finding if backward makes gradients, and the update finds nothing but zeros."""
    made = sum(row.num_nonzero - row.num_flushed for row in probe.gradients)
    total = sum(row.num_nonzero for row in probe.gradients)
    if not probe.are_all_zero or made < MOST * total or not total:
        return None
    return Diagnosis(
        code="NS305",
        title="every gradient is zero when the update comes",
        cause=f"backward makes {percent(made, total)} of them, and something between it and the "
        "update makes all of them 0",
        confidence="likely",
        lines=(
            (
                "a norm that overflowed to Inf gives the factor max_norm / Inf = 0: keep norms in "
                "float32"
            ),
        ),
        where=standing(evidence).host or "",
        seen=sighting(evidence, "backward", since=probe.since),
    )


def _gradient_signal(evidence: Evidence) -> Signal | None:
    signals = evidence.incident.signals if evidence.incident is not None else ()
    return next((one for one in signals if one.source == "grad" and one.gradients), None)


def _spoiled(found: Localization | None) -> tuple[str, ...]:
    """Return the gradients that the failing micro-batch spoils by itself, before any clipping."""
    return reached(found) if found is not None and found.key.phase == "backward" else ()


def _done(evidence: Evidence, tally: GradientTally) -> Diagnosis | None:
    """Return the finding if more was destroyed than backward by itself destroys."""
    spoiled = _spoiled(evidence.localization)
    lost = tally.num_bad - len(spoiled)
    if spoiled and lost > 0 and tally.num_bad == tally.num_total:
        whole = standing(evidence).num_micro == 1
        effect = f"{counted(lost, 'healthy gradient')} NaN as well"
        return _finding(spoiled, tally, effect, "certain" if whole else "likely")
    # Inf times the factor 0 is NaN: an Inf that is still there was not clipped.
    zeroed = tally.num_bad + tally.num_zero == tally.num_total and not tally.num_inf
    if spoiled and evidence.localization and evidence.localization.key.kind == "nan":
        return None  # by a norm of NaN healthy gradients become NaN: these were 0 before
    if spoiled and not _may_clip(evidence):
        return None
    if tally.num_bad and zeroed and tally.num_zero >= max(2, tally.num_bad):
        effect = f"{counted(tally.num_zero, 'other gradient')} zero throughout"
        return _finding(spoiled, tally, effect, "likely")
    return None


def _may_clip(evidence: Evidence) -> bool:
    """Return whether gradients are clipped, or written to by the script, after their backward."""
    incident = evidence.incident
    is_written = incident is not None and incident.rewritten_at is not None
    return is_written or bool(standing(evidence).clip)


def _finding(
    spoiled: tuple[str, ...], tally: GradientTally, effect: str, confidence: Confidence
) -> Diagnosis:
    origin = f"the backward pass spoils {listed(spoiled)} alone" if spoiled else ""
    return Diagnosis(
        code="NS305",
        title=f"gradients destroyed by a norm that is not finite: {tally.num_total} of "
        f"{tally.num_total}",
        cause=f"{effect} before nanstop could look: clipped by their common norm",
        confidence=confidence,
        lines=(origin,) if origin else ("what made the first gradient non-finite is not known",),
        where=spoiled[0] if spoiled else "",
    )


def _prevented(evidence: Evidence, signal: Signal, tally: GradientTally) -> Diagnosis | None:
    """Return what clipping would have done, beside the finding that names the cause."""
    clip, healthy = standing(evidence).clip, tally.num_total - tally.num_bad
    causes = (ns301_gradient_overflow, ns304_backward_singularity)
    if not clip or not healthy or not any(rule.check(evidence) for rule in causes):
        return None
    norm = signal.value
    value = "zero" if norm is not None and math.isinf(norm) else "NaN"
    return Diagnosis(
        code="NS305",
        title=f"clipping would have destroyed {counted(healthy, 'healthy gradient')}",
        cause=f"clipped at {number(clip)} by a norm that is not finite, all would be {value}",
        confidence="certain",
        where=signal.name,
    )


RULE = Rule(
    "NS305",
    "norm-poisoned-clip",
    "one bad gradient destroys the others through clipping",
    check,
    ("static", "incident", "gauge"),
    role="symptom",
)
