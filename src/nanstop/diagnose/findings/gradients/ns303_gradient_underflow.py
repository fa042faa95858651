"""Gradients are too small for their format and come out as zero.

## What happened
The loss is finite and so are all gradients, but many of them are exactly 0 where float32 has a
number: those weights are not trained.

## Why it happens
The smallest number of float16 is 2^-24 = 5.96e-08, and below 6.1e-05 its digits go one by one. The
gradient of a mean over 4096 tokens is the gradient of one divided by 4096, so that a value of 1e-4
becomes 2.4e-08 and rounds to 0. A loss scale of 65536 lifts it to 1.6e-03; without a scaler, or
when the scaler has gone down to a small scale, it is lost. bfloat16 has the exponents of float32
and does not know the problem.

## Example
```python
import torch

weight = torch.zeros(1, 2, requires_grad=True)                # float32
with torch.autocast("cpu", torch.float16):
    y = torch.nn.functional.linear(torch.ones(4096, 2), weight)
loss = y.float().mean() * 2.0**-16
torch.autograd.grad(loss, weight, retain_graph=True)          # (tensor([[0., 0.]]),)
(scaled,) = torch.autograd.grad(loss * 65536, weight)
scaled / 65536                      # tensor([[1.5259e-05, 1.5259e-05]])
```

## Fix
1. Float16 with a loss scale: `torch.amp.GradScaler`, or `fp16=True` in the trainer, on parameters
   in float32. Cost: some skipped steps at the start.
2. Train in bfloat16. Cost: 3 bits of precision.
3. Find what drives the scale down (NS302) where there is a scaler already. On parameters in float16
   a GradScaler raises `Attempting to unscale FP16 gradients`. Cost: none.

## Fix safety
A power of two as loss scale changes no digit of what stays in range, but the weights that stood
still now train. bfloat16 changes training.

## Not to be confused with
NS111: the gradient is there and the update is rounded away. NS114: nothing leads from the loss to
the weight, in any format. NS301, the other end of the range.

## References
- https://github.com/engichang1467/Open-Rig3R/issues/35
- https://github.com/verl-project/verl/pull/6150
- https://github.com/pytorch/torchtitan/issues/1735
- https://github.com/pytorch/pytorch/pull/26512
"""

from __future__ import annotations

from nanstop.diagnose.evidence.candidates import BF16, Candidates
from nanstop.diagnose.evidence.reading import sighting, standing
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Atom, Diagnosis, Evidence, GradientRow, RunFacts
from nanstop.wording import listed, number, percent

MANY = 0.1
MOST = 0.5
_NARROW = ("float16", "float8_e4m3fn", "float8_e5m2")


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if a tenth of all gradients that pass a short-range format are zero
    there and not in float32.
    """
    probe = evidence.probe
    rows = [row for row in probe.gradients if row.dtype in _NARROW] if probe is not None else []
    flushed, total = sum(r.num_flushed for r in rows), sum(r.num_nonzero for r in rows)
    if probe is None or not total or flushed < MANY * total:
        return None
    facts = standing(evidence)
    worst = sorted((row for row in rows if row.num_flushed), key=lambda row: -row.num_flushed)
    scale = probe.loss_scale
    under = f"under a loss scale of {number(scale)}" if scale else "and the loss is not scaled"
    return Diagnosis(
        code="NS303",
        title="gradients are flushed to zero",
        cause=f"{percent(flushed, total)} of the gradients are 0 in {worst[0].dtype}, {under}",
        confidence="certain" if flushed >= MOST * total else "likely",
        lines=_lines(worst),
        remedies=_remedies(facts, scale),
        where=worst[0].parameter,
        seen=sighting(evidence, "backward", since=probe.since),
    )


def _lines(worst: list[GradientRow]) -> tuple[str, ...]:
    names = listed(row.parameter for row in worst)
    return (f"zero here and not in float32: {names}", f"largest in float32: {worst[0].absmax:.2g}")


def _remedies(facts: RunFacts, scale: float | None) -> Candidates:
    larger: Candidates = ((Atom(remedy="loss_scale", value="256"),),)
    return (*(larger if scale or facts.scaler else ()), *BF16)


RULE = Rule("NS303", "gradient-underflow", "gradients are flushed to zero", check, ("gauge",))
