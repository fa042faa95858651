"""exp or log leaves the range although a stable form exists.

## What happened
An exponential exceeded the range of float32, or a logarithm met an exact 0 that is a rounded
probability.

## Why it happens
float32 ends at 3.4e38 = exp(88.72): exp(89) is Inf. A log-ratio summed over 200 tokens of 0.5 each
is 100. The other way round, 1 - exp(logp) is 0 as soon as logp > -3e-8, because float32 keeps 24
bits, and log(0) = -Inf. In both cases the quantity that is wanted afterwards is an ordinary number;
only the way to it leaves the range.

## Example
```python
import torch

logp = torch.tensor(-1e-9, requires_grad=True)
torch.log1p(-torch.exp(logp)).item()          # -inf
y = torch.log(-torch.expm1(logp))
y.item()                            # -20.723...
torch.autograd.grad(y, logp)        # (tensor(-1.0000e+09),)
```

## Fix
1. Use the stable form: `F.log_softmax`, `F.logsigmoid`, `torch.logsumexp`, `torch.expm1`, or
   log(-expm1(x)) in place of log1p(-exp(x)). Cost: one line.
2. Clamp the *argument* of exp where the objective allows it (a ratio clipped at 10 anyway).
   Cost: no gradient there.
3. Drop the sample or micro-batch that reaches it. Cost: that data.

## Fix safety
Dropping data changes training; it is applied only when allowed.
An eps inside the logarithm biases the loss.

## Not to be confused with
NS201: the format is narrow and float32 is enough. NS204:
the logarithm of a negative number has no stable form.

## References
- https://github.com/huggingface/trl/issues/2564
- https://github.com/huggingface/trl/pull/6549
- https://github.com/NVIDIA-NeMo/RL/issues/874
- https://github.com/MakazhanAlpamys/Soup/issues/342
"""

from __future__ import annotations

from nanstop.diagnose.evidence.candidates import without_rows
from nanstop.diagnose.evidence.reading import FORWARD, first_bad, limit, number, op_name
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Diagnosis, Evidence, OpEvent, TensorStats
from nanstop.records.formats import NARROW

EXPONENTIALS = ("exp", "exp2", "expm1", "sinh", "cosh")
LOGARITHMS = ("log", "log1p", "log2", "log10")


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if an exp or log gave Inf first, in a format that is not narrow."""
    event, output = first_bad(evidence, FORWARD)
    if event is None or output is None or output.nan:
        return None
    if output.dtype in NARROW and event.wider != "nonfinite":
        return None
    cause = _cause(event, output)
    if cause is None:
        return None
    return Diagnosis(
        code="NS207",
        title=f"`{op_name(event.op)}` leaves the range of {output.dtype}",
        cause=cause,
        confidence="certain",
        lines=("a form that stays in range exists; more bits only move the edge",),
        remedies=without_rows(evidence),
        where=event.module,
    )


def _cause(event: OpEvent, output: TensorStats) -> str | None:
    name = op_name(event.op).rstrip("_")
    if name in EXPONENTIALS and event.inputs:
        reached = number(event.inputs[0].absmax)
        return f"an argument of up to {reached}; {output.dtype} ends at {limit(output.dtype)}"
    if name in LOGARITHMS:
        return "the logarithm of an exact 0: a probability or a difference was rounded away"
    return None


RULE = Rule(
    "NS207",
    "exp-or-log-overflow",
    "exp or log leaves the range",
    check,
    ("incident",),
    yields_to=("NS702",),
    beside=("NS404", "NS504"),
)
