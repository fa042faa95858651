"""A sum of attention masks left its format: what meant "hidden" became -inf in a whole row.

## What happened
Softmax or attention got a row that is -inf throughout and returned NaN for it. No mask of the
program holds -inf: the values came out of an addition of large negative numbers, or of a number
that the mask's format cannot hold. `masked_fill` raises for such a number:
`value cannot be converted to type at::Half without overflow`.

## Why it happens
A mask that hides with the lowest number of its format leaves a row without visible keys finite: all
its scores are about -65504 in float16, and softmax makes them equal weights. Added to a second mask
the same place is -65504 - 65504 = -131008, beyond float16, which ends at 65504: -inf. So is -65504
+ score for each score below -16, half the distance between the last two numbers. In float32 and
bfloat16 the lowest number is -3.4e38 and twice of it is -inf as well. A row of -inf has the maximum
-inf, and -inf - (-inf) = NaN.

## Example
```python
import torch

low = torch.finfo(torch.float16).min            # -65504
row = torch.full((4,), low, dtype=torch.float16)
torch.softmax((row + low).float(), dim=-1)      # tensor([nan, nan, nan, nan])
torch.softmax((row - 20.0).float(), dim=-1)     # tensor([nan, nan, nan, nan])
clamped = (row - 20.0).clamp(min=low)
torch.softmax(clamped.float(), dim=-1)          # tensor([0.2500, 0.2500, 0.2500, 0.2500])
```

## Fix
1. Combine masks as booleans and fill once:
   `scores.masked_fill(~(causal & padding), low)`. Cost: one line of code.
2. Compute attention with a fused kernel (`attn_implementation="sdpa"`), which takes the mask as it
   is. Cost: none.
3. Add mask and scores in float32. Cost: two casts;
   it helps against -65504 + score and not against twice -3.4e38.
4. `torch.clamp(scores + mask, min=low)` after the addition. Cost: one operation a layer.

## Fix safety
Kernels and islands are safe. Replacing the finite mask by -inf is no cure: a row without a visible
key is then -inf by intention (NS202). A bias that is added to a mask of a few thousand can also
lift hidden keys back into view ("revived"): nothing fails then, and future tokens leak; a causality
probe shows it.

## Not to be confused with
NS202: the mask itself is -inf, and the row has nothing to attend to by intention. NS201:
a score, not a mask, left the format.

## References
- https://github.com/huggingface/transformers/pull/17437
- https://github.com/huggingface/transformers/pull/17306
- https://github.com/huggingface/transformers/pull/27114
"""

from __future__ import annotations

import math

from nanstop.diagnose.evidence.candidates import at_the_line, held_fill, kernels, precision
from nanstop.diagnose.evidence.reading import FORWARD, born, limit, raised_op, standing
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import FORMAT_MAX, Diagnosis, Evidence, OpEvent, TensorStats, op_name
from nanstop.wording import counted, number


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if fully masked rows come of additions that overflow, only."""
    refused = raised_op(evidence)
    if refused is not None:
        return _too_low(refused, evidence)
    event, found = born(evidence, FORWARD), evidence.localization
    if event is None or found is None or not event.fully_masked_rows:
        return None
    if not any(output.nan for output in event.outputs):
        return None
    sums = [one for one in found.masks if one.wider == "finite" and _largest(one)]
    made = max((one.fully_masked_rows for one in sums), default=0)
    if not sums or len(sums) < len(found.masks):
        return None
    source = max(sums, key=lambda one: one.fully_masked_rows)
    facts, output = standing(evidence), source.outputs[0]
    return Diagnosis(
        code="NS203",
        title=f"mask overflows {output.dtype} in `{op_name(source.op)}`",
        cause=_cause(source, output),
        confidence="certain" if made >= event.fully_masked_rows else "likely",
        lines=(
            (
                f"{counted(event.fully_masked_rows, 'row')} -inf throughout reach "
                f"`{op_name(event.op)}`"
            ),
            "no mask of the program is -inf: the same operation is finite in a wider format",
            *_made_at(source),
        ),
        remedies=(
            *kernels(facts),
            *precision(source, facts, output.dtype),
            *at_the_line(evidence),
        ),
        where=source.module,
    )


def _too_low(event: OpEvent, evidence: Evidence) -> Diagnosis | None:
    """Return the finding if a fill raised because its number is beyond the format of the scores."""
    if event.name not in ("masked_fill", "where") or not event.inputs:
        return None
    scores, facts = event.inputs[0], standing(evidence)
    beyond = [one for one in event.scalars if abs(one) > FORMAT_MAX.get(scores.dtype, math.inf)]
    if not beyond or math.isinf(beyond[0]):
        return None
    return Diagnosis(
        code="NS203",
        title=f"a mask's number does not fit {scores.dtype}",
        cause=f"{number(beyond[0])} is to hide scores; "
        f"{scores.dtype} ends at {limit(scores.dtype)}",
        confidence="certain",
        confirmed="the operation raised for it",
        remedies=(
            *held_fill(evidence),
            *kernels(facts),
            *precision(event, facts, scores.dtype),
        ),
        where=event.module,
    )


def _largest(event: OpEvent) -> float:
    """Return the largest magnitude that an op read that made -inf only; 0 for others."""
    only = all(output.neginf and not output.nan and not output.posinf for output in event.outputs)
    if not only or not event.outputs:
        return 0.0
    return max((*(abs(s) for s in event.scalars), *(i.absmax for i in event.inputs)), default=0.0)


def _made_at(event: OpEvent) -> tuple[str, ...]:
    source = event.source
    if source is None:
        return ()
    return (f"made at {source.file.rpartition('/')[-1]}:{source.line} {source.text}".rstrip(),)


def _cause(event: OpEvent, output: TensorStats) -> str:
    return (
        f"-inf from finite operands as large as {number(_largest(event))}; "
        f"{output.dtype} ends at {limit(output.dtype)}"
    )


RULE = Rule(
    "NS203",
    "mask-arithmetic-overflow",
    "masks added up beyond their format",
    check,
    ("incident",),
    beside=("NS108",),
)
