"""The loss scaler skips step after step.

## What happened
The GradScaler found non-finite gradients in many steps in a row. It halves its scale and skips the
update each time, so the run goes on, the log is written, and no weight moves. A GradScaler with
float16 parameters does not get that far: it raises `Attempting to unscale FP16 gradients`. A scale
that rises too soon (`growth_interval=1`) leaves its format again and again: half of all updates are
skipped, and the loss falls all the same.

## Why it happens
The scale starts at 65536 = 2^16 and settles after 3 to 8 skips in a healthy run. A failure that
does not depend on the scale (NaN in the forward pass, 0 / 0) is not cured by halving: after 100
skips the scale is 2^-84 = 5.2e-26. After 144 it is 2^-128, whose inverse is Inf in float32: the
next good step multiplies its gradients by Inf, after the check, and writes Inf into every weight,
NaN where a gradient is 0. After 166 skips the scale itself is 0.

## Example
```python
import torch

weight = torch.nn.Parameter(torch.ones(2))
optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cpu")
for factor in [torch.nan] * 144 + [1.0]:
    optimizer.zero_grad()
    scaler.scale(weight[0] * factor).backward()               # the last step is a good one
    scaler.step(optimizer)
    scaler.update()
scaler.get_scale()                  # 2.938735877055719e-39
weight.data                         # tensor([-inf, nan])
```

## Fix
1. Cure the operation that makes the gradients non-finite; the report names it where it was
   localized. Cost: see its page.
2. Store the trainable parameters in float32. Cost: 8 bytes more a trainable parameter.
3. Train in bfloat16, which needs no scaler. Cost: 3 bits of precision.

## Fix safety
Float32 trainables are safe. bfloat16 changes training. Raising the scaler's floor or fixing the
scale only silences the alarm: the overflow stays.

## Not to be confused with
The first skips of a healthy run.
NS303, gradients that are flushed to zero because the scale is too small.

## References
- https://github.com/hiyouga/LlamaFactory/issues/315
- https://github.com/ymcui/Chinese-LLaMA-Alpaca/issues/534
- https://github.com/deepspeedai/DeepSpeedExamples/issues/418
- https://github.com/deepspeedai/DeepSpeed/issues/4021
"""

from __future__ import annotations

from itertools import pairwise

from nanstop.diagnose.evidence.candidates import BF16, Candidates, fp32_trainables, precision
from nanstop.diagnose.evidence.reading import bad_output, series_values, standing
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Diagnosis, Evidence, op_name
from nanstop.wording import counted, number

_ONE_OF = 4
"""Steps of which one at least is skipped where a scale grows too fast."""
HEALTHY_SKIPS = 8
"""A scaler that starts at 65536 finds its scale in at most this many skips in a healthy run."""


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the collapse if the scale fell more often in a row than a start explains."""
    values = tuple(value for _, value in series_values(evidence, "scale"))
    skips = consecutive_falls(values)
    reported = evidence.incident is not None and any(
        signal.source == "scaler" for signal in evidence.incident.signals
    )
    if skips <= HEALTHY_SKIPS and not reported:
        return _overgrown(values)
    return Diagnosis(
        code="NS302",
        title="the loss scaler skips every step",
        cause=_cause(values, skips),
        confidence="certain" if skips > HEALTHY_SKIPS else "likely",
        lines=_culprit(evidence),
        remedies=_remedies(evidence),
        where=_where(evidence),
    )


def _overgrown(values: tuple[float, ...]) -> Diagnosis | None:
    """Return the finding of a scale that has found its place, and leaves it again and again."""
    steps = tuple(pairwise(values))
    start = next((n for n, (before, after) in enumerate(steps) if after >= before), len(steps))
    num_falls = sum(after < before for before, after in steps[start:])
    num_rises = sum(after > before for before, after in steps[start:])
    if num_falls < HEALTHY_SKIPS or 2 * num_rises < num_falls:
        return None
    if num_falls * _ONE_OF < len(steps) - start:
        return None
    return Diagnosis(
        code="NS302",
        title="the loss scale grows too fast",
        cause=f"in {counted(len(steps) - start, 'step')} it rose {num_rises} times and fell "
        f"{num_falls} times: as many updates were not applied",
        confidence="certain",
        lines=("a scale is to rise after 2000 steps without an overflow (`growth_interval`)",),
    )


def consecutive_falls(values: tuple[float, ...]) -> int:
    """Return how often in a row the scale has fallen up to now."""
    falls = 0
    for before, after in zip(reversed(values[:-1]), reversed(values), strict=False):
        if after >= before:
            break
        falls += 1
    return falls


def _cause(values: tuple[float, ...], skips: int) -> str:
    if not skips:
        return "non-finite gradients in step after step; no update was applied"
    start, end = values[-1 - skips], values[-1]
    return (
        f"{counted(skips, 'step')} skipped in a row: scale {number(start)} -> {number(end)}; "
        "no update was applied"
    )


def _culprit(evidence: Evidence) -> tuple[str, ...]:
    found = evidence.localization
    if evidence.incident is None:  # seen in the run's numbers: what fails, an incident tells
        return ("the scaler reports the effect, not the cause",)
    if found is None or found.first_bad is None:
        return ("the operation was not localized; the scaler reports the effect, not the cause",)
    event = found.first_bad
    where = f" in `{event.module}`" if event.module else ""
    return (f"the gradients fail in {event.phase}: `{op_name(event.op)}`{where}",)


def _remedies(evidence: Evidence) -> Candidates:
    facts, found = standing(evidence), evidence.localization
    event = found.first_bad if found is not None else None
    output = bad_output(event) if event is not None else None
    first = fp32_trainables(facts)
    if event is None or output is None:
        return (*first, *BF16)
    return (*first, *precision(event, facts, output.dtype))


def _where(evidence: Evidence) -> str:
    found = evidence.localization
    return found.first_bad.module if found is not None and found.first_bad is not None else ""


RULE = Rule(
    "NS302",
    "loss-scale-collapse",
    "the loss scaler skips step after step",
    check,
    ("incident", "gauge"),
    role="symptom",
    beside=("NS101", "NS102"),
)
