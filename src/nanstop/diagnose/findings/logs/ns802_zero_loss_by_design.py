"""The loss is 0 and should be: not a failure.

## What happened
The log shows a loss of exactly 0.0 and a gradient norm that is finite and not 0. The model learns.

## Why it happens
On-policy GRPO with one update per batch has a ratio of exp(logp - logp) = 1 for every token. The
loss is minus the mean of ratio x advantage, and advantages are centred in their group: (1, 0, -1)
sums to 0. Where each completion counts the same (`loss_type="grpo"` in TRL) the value is 0 whatever
the model does, while its gradient is the advantage-weighted gradient of the log-probabilities,
which is not 0. TRL's default, `dapo`, averages over tokens: completions of 10, 20 and 40 tokens
give (10 x 1 - 40 x 1) / 70 = -0.43, and a loss of 0.43. It is 0 there only for completions of one
length.

## Example
```
{'loss': 0.0, 'grad_norm': 0.41, 'reward': 0.62, 'reward_std': 0.31}
```

## Fix
1. Nothing. Watch the reward, its spread in the groups and the gradient norm. Cost: none.

## Fix safety
Nothing is changed.

## Not to be confused with
NS801: 0.0 because every loss was NaN and the log filter replaced it (the gradient norm is then
NaN). NS503: no token was supervised (the gradient norm is then 0). NS701: 0 because all rewards of
a group are equal (the gradient norm is then 0 too).

## References
- https://github.com/huggingface/trl/issues/3452
- https://github.com/huggingface/open-r1/issues/239
"""

from __future__ import annotations

import math

from nanstop.diagnose.evidence.reading import series_values, standing
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Diagnosis, Evidence
from nanstop.wording import number


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if the last logged loss is 0 by design and the gradient is alive."""
    reason = standing(evidence).zero_loss_by_design
    losses = series_values(evidence, "loss_logged") or series_values(evidence, "loss_raw")
    norms = series_values(evidence, "grad_norm")
    if reason is None or not losses or not norms:
        return None
    norm = norms[-1][1]
    if losses[-1][1] != 0.0 or not math.isfinite(norm) or norm == 0.0:
        return None
    return Diagnosis(
        code="NS802",
        title="loss of 0 by design",
        cause=f"{reason}; the gradient norm is {number(norm)}: the model learns",
        confidence="certain",
        lines=("watch the reward and its spread, not the loss",),
        where="loss",
    )


RULE = Rule("NS802", "zero-loss-by-design", "loss of 0 by design", check, ("gauge",), role="log")
