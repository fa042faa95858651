"""The run stands on a combination of hardware and libraries with a published defect.

## What happened
Nothing in the training is wrong. This GPU, driver or library version, used in this way, is known to
give NaN, a wrong gradient or a dead process. The row that matches is named with its source.

## Why it happens
Libraries choose a kernel by shape, format and hardware, so a defect shows for one shape on one GPU
and nowhere else. cuBLAS from 12.1 to before 12.3.4.1 divides an integer by zero while it plans some
half-precision products on H20: 64 x 14688 x 1536 in float16 dies with SIGFPE, the same product in
float32 does not. cuDNN's attention backward (torch 2.11 to 2.13 on Hopper) computes exp(0 -
logsumexp) for a padded tile: below -88.7 that is above 3.4e38, so Inf, and Inf x 0 is NaN.

## Example
```
gpu NVIDIA H20, cublas 12.1.3.1, bf16=True
Floating point exception (core dumped)
```

## Fix
1. Do what the row says: mostly one `pip install` of a newer library. Cost: an update.
2. Until then, another kernel or float32, as the row says. Cost: speed.

## Fix safety
A newer library, another kernel and float32 are the same mathematics.

## Not to be confused with
NS602: a kernel that was seen to be wrong in this run, known or not. NS104: a format that the device
does not have. A match is no proof: the defect may need a shape that this run never uses.

## References
- https://github.com/huggingface/trl/issues/2906
- https://github.com/huggingface/trl/issues/7181
- https://github.com/pytorch/pytorch/issues/196678
- https://github.com/pytorch/pytorch/issues/103749
- https://github.com/tloen/alpaca-lora/issues/170
"""

from __future__ import annotations

from nanstop.diagnose.evidence.reading import machine_of, standing
from nanstop.diagnose.evidence.rule import Rule
from nanstop.diagnose.evidence.stacks import Stack, stacks
from nanstop.records import Diagnosis, Environment, Evidence


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the first stack that this run stands on and whose defect fits its failure."""
    environment = machine_of(evidence)
    if environment is None:
        return None
    facts = standing(evidence)
    failed = evidence.localization is not None
    known = (one for one in stacks() if failed or not one.said_by)
    found = [one for one in known if one.stands(environment, facts)]
    if failed:
        found = [one for one in found if one.fits(evidence)]
    if not found:
        return None
    first, *others = found
    return Diagnosis(
        code="NS108",
        title=f"known-bad stack: {first.title}",
        cause=f"{first.cause}; cure: {first.cure}",
        confidence="likely" if failed else "possible",
        lines=(_versions(first, environment), f"source: {first.source}", *map(_briefly, others)),
        where=first.id,
    )


def _versions(stack: Stack, environment: Environment) -> str:
    """Return the facts of this machine that the row asks for."""
    names = ("gpu", "capability", "driver", "torch", "cuda", "cublas", "cudnn")
    asked = [name for name in names if getattr(stack.where, name) is not None]
    have = [f"{name} {getattr(environment, name)}" for name in asked]
    installed = dict(environment.packages)
    have += [f"{name} {installed[name]}" for name in stack.where.packages or {}]
    return f"here: {', '.join(have)}"


def _briefly(stack: Stack) -> str:
    return f"also: {stack.title}; {stack.cure}"


RULE = Rule(
    "NS108",
    "known-bad-stack",
    "a combination with a published defect",
    check,
    ("static", "incident"),
)
