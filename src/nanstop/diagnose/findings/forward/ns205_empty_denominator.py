"""A mean, a deviation or a normaliser over no element.

## What happened
An operation divided by a count or a sum of weights that is 0, or took the mean or the standard
deviation of nothing (or, for a sample deviation, of a single element). The result is NaN or Inf.

## Why it happens
sum / count with count = 0 is 0 / 0 = NaN. `torch.std` divides by n - 1: for a group of one
completion that is 0 / 0 again. Counts become 0 when a filter removes every completion of a group,
when truncation leaves no answer, or when one of the two sides of a paired batch is empty. One empty
group among 64 makes the mean loss NaN.

## Example
```python
import torch

rewards, lengths = torch.tensor([1.0, 0.0, 1.0], requires_grad=True), torch.tensor([600, 700, 900])
kept = rewards[lengths < 512]       # none was shorter
(kept.sum() / len(kept)).item()     # nan
mean = kept.sum() / max(len(kept), 1)
mean.item()                         # 0.0
torch.autograd.grad(mean, rewards)  # (tensor([0., 0., 0.]),)
```

## Fix
1. Floor the count: `total / count.clamp(min=1)`. Cost: one line; an empty group then contributes 0.
2. Of a deviation take `x.std(correction=min(1, len(x) - 1))`, also of `var` and `torch.cov`: that
   of one element is 0 then. Cost: one argument; its group contributes 0.
3. Skip groups with fewer than two elements before the statistics are taken.
   Cost: these groups, which teach nothing.
4. Drop the micro-batch when it happens. Cost: its data.

## Fix safety
Dropping data changes training; it is applied only when allowed.

## Not to be confused with
NS503, the same division where all labels are masked. NS206:
the count is fine and a row's norm is 0.

## References
- https://github.com/huggingface/trl/pull/3248
- https://github.com/huggingface/trl/issues/6548
- https://github.com/unslothai/unsloth-zoo/pull/1286
- https://github.com/deepspeedai/DeepSpeedExamples/issues/571
"""

from __future__ import annotations

import math

from nanstop.diagnose.evidence.candidates import at_the_line
from nanstop.diagnose.evidence.descent import Operand, operand, without_zeros, zero_divisor
from nanstop.diagnose.evidence.reading import WRITTEN, emptied_at, first_bad
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Change, Diagnosis, Evidence, OpEvent, op_name

STATISTICS = ("mean", "std", "var", "var_mean", "std_mean", "nanmean", "median")
DEVIATIONS = ("std", "var", "var_mean", "std_mean")
_NONE = "it reads no element at all: 0/0"
_EMPTY = "the sum over no element is divided by their number: 0/0"
_ONE = "the sample deviation of one element divides by n - 1 = 0"


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if the first bad op divides by a count of 0 or reduces no element."""
    event, output = first_bad(evidence, WRITTEN)
    if event is None or output is None or event.wider == "finite":
        return None
    few = _reduces_too_few(event) or _divides_nothing(event)
    cause = few or _divides_by_no_count(event) or _weighs_nothing(event)
    total = _divides_by_no_total(event) if cause is None else None
    if cause is None and total is None:
        return None
    return Diagnosis(
        code="NS205",
        title=_title(event, few, total),
        cause=cause or total or "",
        confidence="certain",
        confirmed=f"the operation's own shape: {few}" if few else "",
        lines=emptied_at(evidence) if few == _NONE else (),
        remedies=at_the_line(evidence),
        where=event.module,
    )


def _title(event: OpEvent, few: str | None, total: str | None) -> str:
    if few is not None:
        return f"`{op_name(event.op)}` over {'one' if few == _ONE else 'no'} element"
    if total is None and _weighs_nothing(event) is None:
        return "division by a count of 0"
    return "division by a sum of 0"


def confirm(evidence: Evidence) -> Change | None:
    """Return the count of 1 that the division must be finite with."""
    event, _ = first_bad(evidence, WRITTEN)
    if event is None:
        return None
    if _weighs_nothing(event) is not None:
        return Change(kind="raise_zeros", operand=2)
    return without_zeros(event)


def _divides_by_no_count(event: OpEvent) -> str | None:
    divisor = zero_divisor(event)
    if divisor is None or not divisor.is_a("count") or divisor.is_a("norm"):
        return None
    return _came_to_zero(divisor, "count")


def _divides_by_no_total(event: OpEvent) -> str | None:
    """Return the cause if it divides by a sum, of weights or masses, that is 0."""
    divisor = zero_divisor(event)
    if divisor is None or not divisor.is_a("total") or divisor.is_a("norm", "probability"):
        return None
    return _came_to_zero(divisor, "sum")


def _came_to_zero(divisor: Operand, what: str) -> str:
    number = math.prod(divisor.stats.shape)
    if number == 1:
        return f"it divides by a {what}, and the {what} is 0"
    return f"of the {number} {what}s that it divides by, {divisor.stats.zeros} came to 0"


def _divides_nothing(event: OpEvent) -> str | None:
    """Return the cause if a sum over no element is divided by a number of the program's, 0."""
    summed = operand(event, 0)
    if op_name(event.op) != "div" or event.divisor is not None or 0.0 not in event.scalars:
        return None
    return _EMPTY if summed is not None and summed.is_a("empty") else None


def _weighs_nothing(event: OpEvent) -> str | None:
    """Return the cause if a weighted mean of finite scores is NaN. All ignored: NS503."""
    name = op_name(event.op)
    weighted = name.startswith("nll_loss") and "backward" not in name and len(event.inputs) > 2
    if not weighted or not event.outputs[0].nan or not all(one.finite for one in event.inputs):
        return None
    return "the weights of this batch's classes sum to 0"


def _reduces_too_few(event: OpEvent) -> str | None:
    name = op_name(event.op)
    if name not in STATISTICS or not event.inputs:
        return _NONE if _averages_nothing(event) else None
    num_elements = math.prod(event.inputs[0].shape)
    num_results = math.prod(event.outputs[0].shape) if event.outputs else 1
    if num_elements == 0:
        return _NONE
    if name in DEVIATIONS and num_elements in (1, num_results):
        return _ONE
    return None


def _averages_nothing(event: OpEvent) -> bool:
    """Return whether an op makes one NaN of operands that hold no element: a mean loss."""
    sizes = [math.prod(one.shape) for one in event.inputs]
    made = [one for one in event.outputs if one.nan]
    return bool(sizes) and not any(sizes) and [math.prod(one.shape) for one in made] == [1]


RULE = Rule(
    "NS205",
    "empty-denominator",
    "mean or normaliser over no element",
    check,
    ("incident",),
    yields_to=("NS503",),
    confirm=confirm,
)
