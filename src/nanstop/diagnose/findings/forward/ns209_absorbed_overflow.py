"""An overflow was turned back into a finite number.

## What happened
Inside the step an operation overflowed to Inf, and a later one made a finite number of it. The loss
is finite and wrong; nothing in the log shows it.

## Why it happens
1 / Inf = 0, and 1 / 90000 is not. The classic case is RMS normalisation in
float16: for x = 300, x^2 = 90000 exceeds 65504, the mean is Inf, rsqrt(Inf) = 0, and the layer
returns exactly 0 where the right answer is 1. The model then trains with that layer cut out.

## Example
```python
import torch

x = torch.full((64,), 300.0, dtype=torch.float16)
(x * torch.rsqrt(x.pow(2).mean() + 1e-6)).unique()    # tensor([0.], dtype=torch.float16)
x = x.float()
(x * torch.rsqrt(x.pow(2).mean() + 1e-6)).unique()    # tensor([1.])
```

## Fix
1. Keep the module in float32 (an island). Cost: two casts;
   normalisations are memory-bound, below 1 % of step time.
2. If it is attention, use a fused kernel. Cost: none.
3. Train in bfloat16. Cost: 3 bits of precision.

## Fix safety
Islands and kernels are safe: the same mathematics with more bits. bfloat16 changes training.

## Not to be confused with
A mask, where -Inf is meant to become 0, and all else where the right number would have given the
same: exp(-90000) is 0 too, and tanh(90000) is 1. The step is run again with large finite numbers in
place of the infinities; where loss and gradients stay the same to the bit, nothing is reported.
NS201: the overflow reaches the loss.

## References
- https://github.com/huggingface/transformers/pull/33317
- https://github.com/huggingface/transformers/pull/33312
- https://github.com/huggingface/transformers/issues/35151
- https://github.com/huggingface/transformers/pull/36832
"""

from __future__ import annotations

from nanstop.diagnose.evidence.candidates import Candidates, kernels, precision
from nanstop.diagnose.evidence.reading import bad_output, limit, loss_is_bad, sighting, standing
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Diagnosis, Evidence, OpEvent, op_name
from nanstop.wording import counted


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the first absorbed overflow of a step whose loss is finite."""
    event = _absorbed(evidence)
    output = bad_output(event) if event is not None else None
    if event is None or output is None:
        return None
    found = evidence.localization
    others = len(found.absorbed) - 1 if found is not None else 0
    more = (f"{counted(others, 'more overflow')} absorbed in the same step",) if others > 0 else ()
    # Of a failure the place of the operation itself is told.
    line = event.source if evidence.incident is None else None
    return Diagnosis(
        code="NS209",
        title=f"overflow in `{op_name(event.op)}` became a finite number",
        cause=(
            f"{output.dtype} ends at {limit(output.dtype)}; the Inf was absorbed downstream: "
            "the loss is finite and wrong"
        ),
        confidence="certain" if event.wider == "finite" else "likely",
        lines=(*((line.quoted,) if line is not None else ()), *more),
        remedies=_remedies(evidence, event, output.dtype),
        where=event.module,
        source=line,
        seen=sighting(evidence, event.phase, op=event.op),
    )


def _remedies(evidence: Evidence, event: OpEvent, dtype: str) -> Candidates:
    """Return what cures it; another attention kernel only where it will be tried: whether the op is
    a part of attention, the trial says.
    """
    facts = standing(evidence)
    untried = kernels(facts) if evidence.incident is None else ()
    return tuple(one for one in precision(event, facts, dtype) if one not in untried)


def _absorbed(evidence: Evidence) -> OpEvent | None:
    found = evidence.localization
    if found is None:
        return None
    if found.origin == "absorbed":
        return found.first_bad or (found.absorbed[0] if found.absorbed else None)
    if found.absorbed and found.first_bad is None and not loss_is_bad(evidence):
        return found.absorbed[0]
    return None


RULE = Rule(
    "NS209",
    "absorbed-overflow",
    "overflow turned into a finite number",
    check,
    ("incident", "gauge"),
    beside=("NS101",),
)
