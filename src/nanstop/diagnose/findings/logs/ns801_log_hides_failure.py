"""The logged loss is not the real one: the log filter hides NaN and Inf.

## What happened
Losses were NaN or Inf, and the log shows a finite number: 0.0, a smooth curve, or something like
1.19e34. Training went on with broken weights.

## Why it happens
`logging_nan_inf_filter` is on by default. It replaces a non-finite micro-batch loss by sum / n,
with n = 1 + the number of steps since the last log, so each bad micro-batch multiplies the running
sum by 1 + 1/n. If the first losses of the window are bad, the sum is 0 and stays 0 until a good one
comes: where none does, the log shows 0.0; after one bad loss and three good ones of 4.16 it shows
3.12. If step 0 was healthy and all of the 24 others were not, with 32 micro-batches a step, the
factors are (3/2 x 4/3 x ... x 26/25)^32 = 13^32, and 13^32 x 0.672 / 25 = 1.19e34: the number of
TRL issue 2367. Read backwards, its one healthy step had a loss of 0.672, about ln 2.

## Example
```
{'loss': 3.18e+32, 'grad_norm': nan}
{'loss': 0.0, 'grad_norm': nan}
```

## Fix
1. Read the raw losses in this report instead. Cost: none.
2. `logging_nan_inf_filter=False`, so that the log shows NaN when the loss is. Cost: none.
3. Cure the failure itself; this finding stands beside the one that names it. Cost: see there.

## Fix safety
Nothing is changed in the training: the filter acts on the log only.

## Not to be confused with
NS404, a loss that truly grows. NS802, a loss that is 0 by design (its gradient norm is finite and
not 0). NS503: the loss alone is NaN, and the log shows a gradient norm of 0. Vanishing gradients:
0.0 in the log says nothing about them.

## References
- https://github.com/huggingface/trl/issues/2367
- https://github.com/huggingface/trl/issues/6702
- https://github.com/huggingface/transformers/pull/13619
- https://github.com/hiyouga/LlamaFactory/issues/2893
- https://github.com/2U1/Qwen-VL-Series-Finetune/issues/143
"""

from __future__ import annotations

import math

from nanstop.diagnose.evidence.log_filter import HUGE, Decoded, decode_logged, explain_number
from nanstop.diagnose.evidence.reading import series_values, standing
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Diagnosis, Evidence
from nanstop.wording import number


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the last logged number that hides non-finite losses, decoded."""
    facts = standing(evidence)
    logs = series_values(evidence, "loss_logged")
    if not facts.nan_inf_filter or not logs:
        return None
    hidden = _from_losses(evidence, logs)
    certain = hidden is not None
    if hidden is None:
        hidden = _from_numbers(evidence, logs)
    if hidden is None:
        return None
    start, decoded = hidden
    return Diagnosis(
        code="NS801",
        title=f"the logged loss {decoded.logged:.4g} is not the real one: the log hides NaN",
        cause=_cause(start, decoded),
        confidence="certain" if certain else "likely",
        lines=_lines(decoded),
        where="loss",
    )


def _from_losses(
    evidence: Evidence, logs: tuple[tuple[int, float], ...]
) -> tuple[int, Decoded] | None:
    """Return (first step, decoded) of the last window whose raw losses give its logged number
    through the filter.

    A log at step k covers the steps from the previous log (or 0) up to, but not including, k. Each
    loss is looked at twice at most: a healthy run asks at every log.
    """
    raw: dict[int, list[float]] = {}
    first_bad = math.inf
    for step, loss in series_values(evidence, "loss_raw"):
        raw.setdefault(step, []).append(loss)
        if not math.isfinite(loss):
            first_bad = min(step, first_bad)
    if first_bad == math.inf:
        return None
    first_known = min(raw)
    starts = (0, *(step for step, _ in logs[:-1]))
    for start, (end, logged) in reversed(list(zip(starts, logs, strict=True))):
        if end <= first_bad or start < first_known:
            continue  # a window without a bad loss, or one that is not known as a whole
        window = [raw.get(at, []) for at in range(start, end)]
        decoded = decode_logged(logged, window) if window and all(window) else None
        if decoded is not None:
            return start, decoded
    return None


def _from_numbers(
    evidence: Evidence, logs: tuple[tuple[int, float], ...]
) -> tuple[int, Decoded] | None:
    """Return the one plausible reading of the last log, where raw losses are missing."""
    end, logged = logs[-1]
    start = logs[-2][0] if len(logs) > 1 else 0
    if series_values(evidence, "loss_raw") or end <= start:
        return None
    norms = series_values(evidence, "grad_norm")
    norm_is_bad = bool(norms) and not math.isfinite(norms[-1][1])
    if not (abs(logged) > HUGE or (logged == 0.0 and norm_is_bad)):
        return None
    num_micro = standing(evidence).num_micro
    readings = explain_number(logged, num_steps=end - start, num_micro=num_micro)
    return (start, readings[0]) if len(readings) == 1 else None


def _cause(start: int, decoded: Decoded) -> str:
    at = f"step {start + decoded.first_step}, micro-batch {decoded.first_micro}"
    amount = f"{decoded.num_bad} of {decoded.num_losses} losses were not finite, the first at {at}"
    instead = "in the place of each the trainer's log takes the mean of those before"
    if decoded.before is None:
        return f"{amount}; {instead}, and there was none: 0"
    return f"{amount}; {instead}, which made their sum {decoded.multiplier:.3g} times as large"


def _lines(decoded: Decoded) -> tuple[str, ...]:
    real = "since the log before, no loss was finite before it"
    if decoded.before is not None:
        real = f"the real loss before it was {number(float(f'{decoded.before:.4g}'))} on average"
    return (real, "with `logging_nan_inf_filter=False` (TrainingArguments) the log shows NaN")


RULE = Rule(
    "NS801",
    "log-hides-failure",
    "the logged loss is not the real one",
    check,
    ("incident", "gauge"),
    role="log",
)
