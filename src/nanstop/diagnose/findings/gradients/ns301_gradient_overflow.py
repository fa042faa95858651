"""A gradient does not fit its format, although the forward pass is finite.

## What happened
The loss is finite. In the backward pass an operation got finite inputs and produced Inf; the same
operation in a wider format is finite.

## Why it happens
The gradient of a float16 value is float16, and `.grad` has the parameter's format. With loss
scaling it is multiplied too: a gradient of 1.5 under a scale of 65536 is 98304, beyond 65504.
Halving the scale once is enough there. Where the parameter itself is float16 there may be no such
room: gradients that sum over a batch of 4 x 2048 tokens of 10 each reach 81920 with no scale at
all, and a float32 island around the forward pass cannot help, because the sum is stored in the
parameter's format in the end.

## Example
```python
import torch

weight = torch.ones(1, 1, requires_grad=True)                 # float32
with torch.autocast("cpu", torch.float16):
    y = torch.nn.functional.linear(torch.full((1, 1), 3.0), weight)
loss = y.float().sum() * 0.5
torch.autograd.grad(loss * 65536, weight, retain_graph=True)  # (tensor([[inf]]),)
torch.autograd.grad(loss * 32768, weight)                     # (tensor([[49152.]]),)
```

## Fix
1. Under float16 autocast over float32 parameters: a smaller loss scale. A GradScaler finds it by
   itself in a few skipped steps. Gradients of float16 parameters it refuses (`Attempting to unscale
   FP16 gradients`): see 2. Cost: nothing; small gradients lose range.
2. Where the trainable parameters are float16: store them in float32, which a GradScaler takes.
   Under float16 autocast their gradients are made in float16 all the same: 1 or 3 goes with it, a
   scale of 1/2 for the 81920 above. Cost: 8 bytes more a trainable parameter.
3. Keep the module whose gradient overflows in float32. Cost: two casts.
4. Train in bfloat16. Cost: 3 bits of precision.
5. In float32: compute in log space what is divided by numbers that are nearly 0, as the logarithm
   of a softmax does in its backward (`log_softmax`). Cost: none.

## Fix safety
All but bfloat16 are safe. A power of two as loss scale changes no digit that stays in range.

## Not to be confused with
NS304, not finite in any format. NS302, where no scale is small enough. Tighter clipping does not
help: it divides by a norm that is Inf, so that every healthy gradient becomes 0 and the bad one Inf
x 0 = NaN.

## References
- https://github.com/unslothai/unsloth/pull/5074
- https://github.com/pytorch/pytorch/issues/46849
- https://github.com/huggingface/peft/issues/341
"""

from __future__ import annotations

import math

from nanstop.diagnose.evidence.candidates import (
    Candidates,
    at_the_line,
    fp32_trainables,
    precision,
)
from nanstop.diagnose.evidence.reading import (
    failing_batch,
    first_bad,
    foreign_kernel,
    limit,
    reached,
    standing,
)
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import (
    FORMAT_MAX,
    Atom,
    Diagnosis,
    Evidence,
    OpEvent,
    RunFacts,
    TensorStats,
    op_name,
)
from nanstop.records.formats import NARROW, wider
from nanstop.wording import listed, number


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the overflow if the first bad op is of backward and not bad in every format."""
    event, output = first_bad(evidence, ("backward",))
    if event is None or output is None or foreign_kernel(event) or event.wider == "nonfinite":
        return None
    facts = standing(evidence)
    if _is_weighed_without_end(evidence):
        return None
    if event.wider == "unknown" and not (facts.scaler and output.dtype in NARROW):
        return None
    return Diagnosis(
        code="NS301",
        title=f"{output.dtype} gradient overflow in `{op_name(event.op)}`",
        cause=_cause(event, output, facts),
        confidence="certain" if event.wider == "finite" else "likely",
        lines=_lines(evidence),
        remedies=_remedies(evidence, event, output, facts),
        where=event.module,
        usual_cure="" if output.dtype in NARROW else _SMALLER,
    )


def _is_weighed_without_end(evidence: Evidence) -> bool:
    """Return whether the batch holds what became of an infinite reward: a number at the end of its
    format. Its gradient leaves any format that is as wide.
    """
    incident = evidence.incident
    signals = incident.signals if incident is not None else ()
    if not any(one.source == "reward" and one.value == math.inf for one in signals):
        return False
    facts = ((one.dtype, one.minimum, one.maximum) for one in failing_batch(evidence))
    sizes = ((dtype, max(-(low or 0.0), high or 0.0)) for dtype, low, high in facts)
    return any(size >= 0.5 * FORMAT_MAX.get(dtype, math.inf) for dtype, size in sizes)


_SMALLER = (
    "Look at what has made the gradient so large: a learning rate that is too high, a loss that is "
    "summed and not averaged, a sample far from the others."
)
"""What is left where the format is wide: no loss scale is at work there."""


def _cause(event: OpEvent, output: TensorStats, facts: RunFacts) -> str:
    ends = f"{output.dtype} ends at {limit(output.dtype)}"
    scale = f" under a loss scale of {number(facts.scaler)}" if facts.scaler else ""
    if event.wider == "finite":
        return (
            f"the forward pass is finite and so is this gradient in {wider(output.dtype)}; "
            f"{ends}{scale}"
        )
    return f"the forward pass is finite; {ends}{scale}"


def _lines(evidence: Evidence) -> tuple[str, ...]:
    spoiled = reached(evidence.localization)
    return (f"reaches the gradient of {listed(spoiled)}",) if spoiled else ()


def _remedies(
    evidence: Evidence, event: OpEvent, output: TensorStats, facts: RunFacts
) -> Candidates:
    """Return what leaves the gradient room. A format of training holds no more than a wide one:
    its line is left to write otherwise, as the logarithm of a share that is nearly 0.
    """
    smaller: Candidates = ((Atom(remedy="loss_scale", value="0.00390625"),),)
    scale = smaller if facts.scaler else ()
    line = () if output.dtype in NARROW else at_the_line(evidence)
    return (*scale, *fp32_trainables(facts), *precision(event, facts, output.dtype), *line)


RULE = Rule(
    "NS301",
    "gradient-overflow",
    "gradient exceeds its format",
    check,
    ("incident",),
    yields_to=("NS105", "NS112", "NS207", "NS404", "NS602"),
    beside=("NS101", "NS102", "NS103", "NS108", "NS404", "NS504"),
)
