"""Trainable parameters are stored in half precision.

## What happened
Some of the parameters that the optimizer updates are stored in float16 or bfloat16: LoRA matrices,
a classification head in `modules_to_save`, or the whole model. The optimizer then computes its
moments and its update in that format.

## Why it happens
AdamW divides by sqrt(v) + eps. In float16 the default eps of 1e-8 is below half of the smallest
positive value (2^-24 / 2 = 2.98e-8) and rounds to 0. A gradient of 1e-4 squares to 1e-8, times 1 -
beta2 = 0.001 gives v = 1e-11, which rounds to 0 as well. torch's default kernels compute in the
format of the weights: the update is m / (0 + 0) = inf, and one step turns 0.02 into -inf. A
gradient of exactly 0 gives 0 / 0 = NaN. The fused kernel (`fused=True`, and transformers' default
`adamw_torch_fused`) computes in float32, where eps is not 0, and its first update is right. But it
stores v in float16, where it is 0: the next update divides by what the present gradient alone puts
in v, and where that is 0 by eps. After a gradient of 1e-4 and one of 0 a weight moves 4700 learning
rates. Every number is finite, and the loss climbs from 5.8 to 400. In bfloat16 nothing overflows,
but a weight keeps 8 bits: an update smaller than 1/512 of the weight is rounded away, and training
stands still without any sign. A GradScaler refuses to unscale the gradients of float16 parameters;
without one (`optimizer.step()` on a model in half) nothing says so. TRL 1.16 casts the adapters of
a quantised base to bfloat16, as the QLoRA paper did.

## Example
```python
import torch

weight = torch.nn.Parameter(torch.tensor([0.02], dtype=torch.float16))
weight.grad = torch.tensor([1e-4], dtype=torch.float16)
optimizer = torch.optim.AdamW([weight], lr=1e-3)
optimizer.step()
weight.data                         # tensor([-inf], dtype=torch.float16)

scaler = torch.amp.GradScaler("cpu")
scaler.scale(weight.float().sum()).backward()
scaler.step(optimizer)              # ValueError: Attempting to unscale FP16 gradients.
```

## Fix
1. Store the trainable parameters in float32 and compute under autocast. Cost: 8 bytes more a
   trainable parameter (weight, gradient and two moments), little for LoRA.
2. Load the model in float32 (`dtype=torch.float32`; transformers 5 takes the checkpoint's format
   otherwise) and let `bf16=True` or `fp16=True` choose the computing format. Cost: memory of the
   weights.

## Fix safety
Float32 trainables are safe: the same mathematics with more bits, saved in the format that you
chose. A larger eps is not offered: where v is 0 an update is lr x m / eps, so that with 1e-5 the
first step at gradients of 1e-4, 1e-3 and 5e-3 is 10, 100 and 500 times too long. At 1e-2 none is
too long, and those at 1e-4 are 100 times too short: Adam has become SGD.

## Not to be confused with
NS402, the failure that this causes. NS301: a half parameter also has a half gradient, which no
float32 island around the forward pass can keep from overflowing.

## References
- https://github.com/huggingface/trl/issues/2367
- https://github.com/huggingface/peft/issues/341
- https://github.com/huggingface/peft/pull/1706
- https://github.com/NVIDIA/apex/issues/240
- https://github.com/google-deepmind/optax/issues/1754
- https://github.com/meta-pytorch/torchtune/issues/2254
"""

from __future__ import annotations

from nanstop.diagnose.evidence.candidates import fp32_trainables
from nanstop.diagnose.evidence.reading import (
    has_masters,
    lost_squares,
    sighting,
    squares_gradients,
    standing,
)
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Confidence, Diagnosis, Evidence, RunFacts
from nanstop.records.formats import EPSILON, HALF, vanishes
from nanstop.wording import counted, listed


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the trainable half groups; likely to do harm in float16."""
    facts = standing(evidence)
    groups = [group for group in facts.param_groups if group.trainable and group.dtype in HALF]
    if not groups or has_masters(facts):
        return None
    formats = tuple(dict.fromkeys(group.dtype for group in groups))
    num_tensors = sum(group.num_tensors for group in groups)
    names = tuple(name for group in groups for name in group.examples)
    shown = listed(names, of=num_tensors)
    confidence, cause = _harm(facts, formats)
    # A set-up is read anew in mid-run where a scaler does not take the gradients of these.
    is_refused = "param_groups" in evidence.learned and "float16" in formats
    lines = (f"{counted(num_tensors, 'tensor')}: {shown}",) if names else ()
    if is_refused:
        lines = (cause, *lines)
        confidence = "certain"
        cause = "the loss scaler has refused their gradients, as it does those of float16"
    return Diagnosis(
        code="NS102",
        title=f"trainable parameters stored in {' and '.join(formats)}",
        cause=cause,
        confidence=confidence,
        lines=lines,
        remedies=fp32_trainables(facts),
        where=names[0] if names else "",
        seen=sighting(evidence, "optimizer") if is_refused else None,
    )


def _harm(facts: RunFacts, formats: tuple[str, ...]) -> tuple[Confidence, str]:
    optimizer = facts.optimizer
    eps = optimizer.eps if optimizer is not None else None
    if "float16" not in formats or not squares_gradients(facts):
        part = round(4.0 / EPSILON[formats[0]])
        return "possible", f"an update below 1/{part} of a {formats[0]} weight is rounded away"
    squares = lost_squares(facts, "float16")
    if optimizer is not None and optimizer.fused and squares:
        return "likely", f"{squares}, and later updates divide by eps alone"
    if eps is not None and vanishes(eps, "float16"):  # some compute in float32 all the same
        rounded = f"the optimizer's eps {eps:g} rounds to 0 in float16"
        return "likely", f"{rounded}, and then nothing keeps its divisor from 0"
    return "likely", "squared gradients below 2.98e-08 round to 0 in float16"


RULE = Rule(
    "NS102",
    "half-precision-trainables",
    "trainable parameters stored in half precision",
    check,
    ("static",),
)
