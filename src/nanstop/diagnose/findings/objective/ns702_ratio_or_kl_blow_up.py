"""The ratio of two policies, or their KL estimate, explodes.

## What happened
The policy has moved so far from the one that generated the completions, or from the reference, that
the ratio of their probabilities is a huge number. Before it overflows it rules the loss; afterwards
the loss is Inf or NaN.

## Why it happens
A ratio is exp(logp - old_logp). A difference of 5 nats is a ratio of 148, 20 nats 4.9e8, and
float32 ends at 88.72 nats, float16 at 11.09. Over a sequence differences add up: 100 tokens that
are 0.3 nats off each are exp(30) = 1e13. The k3 estimate of the KL divergence, exp(d) - d - 1 with
d = ref_logp - logp, has the same exponential: one token that the policy has unlearned (logp = -100)
against a reference that likes it (-1) gives exp(99) = Inf, where the plain estimate -d gives -99.
A coefficient of 1e-10 hides that: a ratio of 1e6 adds 1e-4 to the loss. Where one token's ratio of
two models' log-probabilities is 1e6 or more in the first step, 14 nats, it is said whatever the
loss is; where sums over whole answers are compared, as in DPO, their tokens are asked.

## Example
```python
import torch

logp = torch.tensor([-0.5, -100.0], requires_grad=True)
log_ratio = torch.tensor([-0.6, -1.0]) - logp                 # reference less policy: -0.1 and 99
late = log_ratio.exp().clamp(max=10)
late.data                           # tensor([0.9048, 10.0000])
torch.autograd.grad(late.sum(), logp, retain_graph=True)      # (tensor([-0.9048, nan]),)
early = log_ratio.clamp(max=5).exp()
torch.autograd.grad(early.sum(), logp)                        # (tensor([-0.9048, -0.0000]),)
```

## Fix
1. Clamp the log-ratio (to 5, in float32) *before* the exponential, and mask padding before it as
   well. Cost: no gradient for tokens beyond; one just below counts for 148, at a bound of 20 for
   4.9e8: finite, and it rules the loss.
2. Fewer updates for each batch of completions (`num_iterations`, `steps_per_generation`), a smaller
   learning rate. Cost: more generation.
3. Ratios of tokens instead of whole sequences, clipped on both sides (`delta` in TRL).
   Cost: another objective.
4. A larger `beta`, where it is the reference that is left behind. Cost: slower learning.

## Fix safety
All of these change training. `beta=0` removes the term and with it the only sign that the policy
drifts.

## Not to be confused with
NS703: the ratio is off before the first update, so that training cannot be its cause. NS207: any
other exponential. NS404: the loss itself diverges.

## References
- https://github.com/huggingface/trl/pull/6549
- https://github.com/huggingface/trl/pull/6637
- https://github.com/NVIDIA-NeMo/RL/issues/874
- https://github.com/huggingface/trl/pull/488
- https://github.com/MakazhanAlpamys/Soup/issues/342
"""

from __future__ import annotations

import math

from nanstop.diagnose.evidence.candidates import at_the_line
from nanstop.diagnose.evidence.descent import MODEST_EXPONENT, operand
from nanstop.diagnose.evidence.objective import RATIO, RATIO_AT_ONCE, typical
from nanstop.diagnose.evidence.reading import FORWARD, first_bad, limit, series_values, sighting
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import FORMAT_MAX, Change, Diagnosis, Evidence
from nanstop.wording import number

MOST_KL = 20.0
"""Nats a token on average; the logarithm of a vocabulary of 256000 is 12.5."""
MOST_RATIO = 1.0
"""Nats a token on average, after updates on the same completions: a factor of e each."""
_ANOTHER_MODEL = (
    "look whether the reference is the model that training starts from, with weights that are as "
    "they were saved"
)
OVERFLOWS = ("exp", "exp2", "expm1")


def check(evidence: Evidence) -> Diagnosis | None:
    """Return an overflowed exp of a log-ratio, or a KL or ratio that is far too large."""
    if evidence.incident is not None:
        return _overflow(evidence)
    return _tokens(evidence) or _drift(evidence)


def _tokens(evidence: Evidence) -> Diagnosis | None:
    """Return ratios of single tokens beyond reason, which a small coefficient may hide."""
    ratios = evidence.probe.ratios if evidence.probe is not None else ()
    rows = [row for row in ratios if not row.is_of_one]
    if not rows:
        return None
    worst = max(rows, key=lambda row: row.largest)
    return Diagnosis(
        code="NS702",
        title="the ratio of a single token is beyond reason",
        cause=(
            f"two models give a token probabilities that differ by a factor of "
            f"{number(worst.largest)}, {math.log(worst.largest):.3g} nats"
        ),
        confidence="likely",
        lines=tuple(filter(None, (worst.line, "look whether both are what they are said to be"))),
        where=worst.module or "loss",
        seen=sighting(evidence, "loss", op=worst.op),
    )


def _overflow(evidence: Evidence) -> Diagnosis | None:
    event, output = first_bad(evidence, FORWARD)
    if event is None or output is None or output.nan or not event.inputs:
        return None
    exponent = operand(event, 0)
    if event.name not in OVERFLOWS or exponent is None or not exponent.is_a("log_ratio"):
        return None
    reached = number(event.inputs[0].absmax)
    return Diagnosis(
        code="NS702",
        title="the ratio of two policies overflows",
        cause=f"log-probabilities are up to {reached} nats apart; exp ends at "
        f"{_edge(output.dtype)} "
        f"in {output.dtype} ({limit(output.dtype)})",
        confidence="certain",
        lines=("clamp the difference of the log-probabilities before the exponential",),
        remedies=at_the_line(evidence),
        where=event.module,
    )


def confirm(evidence: Evidence) -> Change | None:
    """Return the difference of log-probabilities whose exponential must be finite."""
    event, _ = first_bad(evidence, FORWARD)
    if event is None:
        return None
    return Change(kind="bound", operand=0, value=MODEST_EXPONENT)


def _edge(dtype: str) -> str:
    """Return the argument from which on exp leaves a format."""
    return f"{math.log(FORMAT_MAX[dtype]):.2f}"


def _drift(evidence: Evidence) -> Diagnosis | None:
    logged = [(step, abs(value)) for step, value in series_values(evidence, "kl")]
    kl = [value for _, value in logged[-1:]]
    if kl and (kl[0] >= MOST_KL or math.isinf(kl[0])):
        step, first = logged[0]
        if step <= 1 and first >= MOST_KL:
            return _apart(first)
        cause = f"the estimate of the KL divergence is {number(kl[0])} nats a token"
        return _moved(cause, certain=kl[0] >= MOST_KL**2)
    gap, first = typical(evidence, RATIO, last=4), typical(evidence, RATIO_AT_ONCE)
    if gap is None or gap < MOST_RATIO or (first is not None and first > gap / 4):
        return None
    before = f", {number(first)} before the first one" if first is not None else ""
    cause = f"log-probabilities move {number(gap)} nats a token within the updates of one batch"
    return _moved(cause + before, certain=False)


def _apart(first: float) -> Diagnosis:
    """Return the finding of two policies that were far apart before any update."""
    return Diagnosis(
        code="NS702",
        title="the policy is far from the one it is compared with",
        cause=f"the estimate of the KL divergence is {number(first)} nats a token at step 0, "
        "before any update",
        confidence="certain" if first >= MOST_KL**2 else "likely",
        lines=(_ANOTHER_MODEL,),
        where="policy",
    )


def _moved(cause: str, *, certain: bool) -> Diagnosis:
    return Diagnosis(
        code="NS702",
        title="the policy runs away from the one it is compared with",
        cause=cause,
        confidence="certain" if certain else "likely",
        lines=("a smaller learning rate, or fewer updates for each batch of completions",),
        where="policy",
    )


RULE = Rule(
    "NS702",
    "ratio-or-kl-blow-up",
    "the ratio or KL of two policies explodes",
    check,
    ("incident", "gauge"),
    confirm=confirm,
)
