"""An operation's true result does not fit its narrow format.

## What happened
An operation got finite inputs and produced Inf or NaN. The same operation on the same inputs is
finite in float32. The result was right; the format could not hold it.

## Why it happens
float16 ends at 65504, float8 at 448 (e4m3) or 57344 (e5m2). A query and a key of 128 elements of 25
each have the product 128 x 25 x 25 = 80000: finite in float32, Inf in float16. One more operation
turns Inf into NaN (Inf - Inf in softmax, 0 x Inf under a mask), which is why the module where NaN
is first seen is often not the one that made it. float32 and bfloat16 end at 3.4e38: a square of
2e19 leaves them. That they overflowed is certain; why a value was so large is a question of its
own, and the finding says `possible`.

## Example
```python
import torch

q = torch.full((1, 128), 25.0, dtype=torch.float16)
q @ q.T                             # tensor([[inf]], dtype=torch.float16)
q.float() @ q.float().T             # tensor([[80000.]])
```

## Fix
1. In float16 or float8: keep the module that overflows in float32 (an island). Cost: two casts and
   one module in float32, usually below 1 % of step time. Under half weights without autocast the
   rest needs autocast to accept float32.
2. If it is attention in float16, use a fused kernel (`attn_implementation="sdpa"`), which scales
   and accumulates in float32. Cost: none.
3. In float16: train in bfloat16. Cost: 3 bits of precision; a GPU that has it.

In float32 and bfloat16 no format of training is wider: look for what made the values so large (one
row of the data, NS504; a training that runs away, NS404; an exponential, NS207), or divide by their
largest before they are multiplied.

## Fix safety
Islands and kernels are safe: the same mathematics with more bits. bfloat16 changes training.
Clamping is not offered: it is finite and computes another function.

## Not to be confused with
NS301, where the forward pass is finite and the gradient overflows. NS204, which is not finite in
any format. NS602, where the same format is finite with another kernel. NS404: values that grew from
step to step; one that was close to the limit may need some steps to cross it (T5, after 34).

## References
- https://github.com/huggingface/trl/issues/3236
- https://github.com/QwenLM/Qwen3/issues/670
- https://github.com/huggingface/transformers/pull/33317
- https://github.com/unslothai/unsloth/pull/4014
- https://github.com/huggingface/transformers/pull/36832
"""

from __future__ import annotations

import math

from nanstop.diagnose.evidence.candidates import at_the_line, precision
from nanstop.diagnose.evidence.reading import (
    FORWARD,
    first_bad,
    foreign_kernel,
    growth_lines,
    limit,
    standing,
)
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import FORMAT_MAX, Diagnosis, Evidence, OpEvent, op_name
from nanstop.records.formats import NARROW, wider
from nanstop.wording import number

_NO_WIDER = (
    "no format of training holds more: look for what makes values that large, or divide by the "
    "largest of them before they are multiplied"
)

_KEEP_FROM_0 = (
    "keep what it divides by farther from 0: a clamp, or a bound of the number that it is an "
    "exponential or a square of"
)


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the overflow if a wider format holds the result of the first bad op."""
    event, output = first_bad(evidence, FORWARD)
    if event is None or output is None or foreign_kernel(event):
        return None
    if event.wider != "finite":
        return None
    narrow = output.dtype in NARROW
    has_wider = FORMAT_MAX.get(output.dtype, 0.0) < FORMAT_MAX["bfloat16"]
    divided = _small_divisor(event, output.dtype)
    return Diagnosis(
        code="NS201",
        title=f"{output.dtype} overflow in `{op_name(event.op)}`",
        cause=(
            f"born here: every input was finite and so is the result in {wider(output.dtype)}; "
            f"{output.dtype} ends at {limit(output.dtype)}"
        ),
        # That float32 overflowed is certain; why values were so large before is another question.
        confidence="certain" if narrow else "possible",
        lines=(
            *growth_lines(evidence.localization),
            *divided,
            *(() if has_wider else (_KEEP_FROM_0 if divided else _NO_WIDER,)),
        ),
        remedies=precision(event, standing(evidence), output.dtype)
        if narrow
        else at_the_line(evidence),
        usual_cure="" if has_wider else _KEEP_FROM_0 if divided else _NO_WIDER,
        where=event.module,
    )


def _small_divisor(event: OpEvent, dtype: str) -> tuple[str, ...]:
    """Return how near to 0 what the op divides by comes, where that is what makes it so large."""
    place = event.divisor
    if place is None or place >= len(event.inputs):
        return ()
    least = event.inputs[place].absmin_nonzero
    others = [one.absmax for at, one in enumerate(event.inputs) if at != place]
    is_usual = max(others, default=1.0) <= math.sqrt(FORMAT_MAX.get(dtype, math.inf))
    return (f"it divides by numbers as small as {number(least)}",) if is_usual and least else ()


RULE = Rule(
    "NS201",
    "fp16-overflow",
    "overflow of a narrow format",
    check,
    ("incident",),
    yields_to=("NS105", "NS202", "NS203", "NS404", "NS602"),
    beside=("NS101", "NS108", "NS404", "NS504"),
)
