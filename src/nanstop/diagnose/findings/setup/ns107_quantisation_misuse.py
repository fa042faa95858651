"""The quantised set-up cannot train as it stands.

## What happened
The base model is quantised to 4 or 8 bits, and something that training on top of it needs is
missing: adapters, a computing format that fits the run, float32 for the parameters that were not
quantised, or a GPU that can multiply int8.

## Why it happens
A quantised weight has no gradient: 16 levels (NF4) or 256 (int8) cannot take a step of 1e-4. What
`from_pretrained` leaves trainable are the parameters that were not quantised, norms, embedding and
head: 0.1 to 10 % of the model, which then has to learn everything, and whose gradients pass through
each rounding on the way; of a 70B model in int8 they were NaN. The Trainer of transformers refuses
such a model, a loop of one's own does not. A 4-bit layer casts its input to
`bnb_4bit_compute_dtype`, whatever autocast says, so that float16 there makes Inf of what is beyond
65504 in a run that says bfloat16 everywhere else. Its product follows autocast where `F.linear`
makes it (on a CPU), and the compute dtype without autocast and in the fused kernels (bitsandbytes
0.50). And int8 products need integer tensor cores, which begin with compute capability 7.5; V100 is
7.0, where losses jumped and then read 0.0.

## Example
```python
import bitsandbytes, torch

layer = bitsandbytes.nn.Linear4bit(64, 64, compute_dtype=torch.float16, quant_type="nf4").to("cpu")
layer.weight.requires_grad          # False
x = torch.zeros(1, 64)
x[0, 0] = 1e5
with torch.autocast("cpu", torch.bfloat16):
    y = layer(x)
y.isfinite().any()                  # tensor(False)
```

## Fix
1. Attach adapters: `get_peft_model(prepare_model_for_kbit_training(model), LoraConfig(...))`. Cost:
   the adapters are below 1 % of the model; for the rest see 3.
2. Set `bnb_4bit_compute_dtype` to the run's own format. Cost: none.
3. Call `prepare_model_for_kbit_training` before the adapters are attached. Cost: norms, embedding
   and head in float32: of a 4-bit 8B model with 128256 tokens that is 37 % more memory for the
   weights.
4. On a GPU before 7.5: `load_in_4bit`, or half precision. Cost: memory for the latter.

## Fix safety
The computing format and float32 for the rest are the same mathematics with more range or bits.
Adapters change what is trained.

## Not to be confused with
NS102: adapters that are themselves stored in half. NS104: a format that the device does not have.
NS114: nothing at all can learn. A head that is trained alone on a quantised base is a sound set-up.

## References
- https://github.com/huggingface/transformers/issues/30526
- https://github.com/huggingface/transformers/issues/26207
- https://github.com/tloen/alpaca-lora/issues/170
- https://github.com/huggingface/peft/issues/1715
"""

from __future__ import annotations

from nanstop.diagnose.evidence.reading import machine_of, standing
from nanstop.diagnose.evidence.rule import Reason, Rule
from nanstop.diagnose.evidence.stacks import in_range
from nanstop.records import Diagnosis, Environment, Evidence, QuantizedFacts, RunFacts
from nanstop.wording import counted, listed

FIRST_WITH_INT8 = "7.5"


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the first thing that the packed base of the run lacks."""
    facts, machine = standing(evidence), machine_of(evidence)
    packed = facts.quantized
    if packed is None:
        return None
    reason = (
        _no_adapters(packed, facts)
        or _other_format(packed, facts)
        or _no_integer_units(packed, facts, machine)
        or _unprepared(packed)
    )
    where = facts.model_type or facts.host
    return reason.diagnosis("NS107", where=where) if reason is not None else None


def _no_adapters(packed: QuantizedFacts, facts: RunFacts) -> Reason | None:
    nothing = not any(group.trainable for group in facts.param_groups)
    if packed.num_adapted or not (packed.trained_base or nothing):
        return None
    known = packed.num_layers
    layers = counted(known, f"{packed.bits}-bit layer") if known else f"{packed.bits}-bit layers"
    left = (
        f"only {listed(packed.trained_base)} can learn"
        if packed.trained_base
        else "nothing learns that was quantised"
    )
    return Reason(
        "certain",
        "a quantised base is trained without adapters",
        f"{layers} take no update; {left}",
        "attach LoRA: get_peft_model(prepare_model_for_kbit_training(model), LoraConfig(...))",
    )


def _other_format(packed: QuantizedFacts, facts: RunFacts) -> Reason | None:
    asked = facts.precision.requested if facts.precision is not None else None
    if packed.compute_dtype != "float16" or "bfloat16" not in (facts.autocast, asked):
        return None
    return Reason(
        "likely",
        "quantised layers compute in float16 in a bfloat16 run",
        "bnb_4bit_compute_dtype casts what they read, whatever autocast says: it ends at 65504",
        "set bnb_4bit_compute_dtype=torch.bfloat16",
    )


def _no_integer_units(
    packed: QuantizedFacts, facts: RunFacts, machine: Environment | None
) -> Reason | None:
    capability = machine.capability if machine is not None else None
    on_gpu = facts.device == "cuda" and packed.method == "bitsandbytes" and packed.bits == 8
    if not on_gpu or not in_range(capability, f"<{FIRST_WITH_INT8}"):
        return None
    return Reason(
        "likely",
        "int8 products on a GPU without units for them",
        f"they begin with compute capability {FIRST_WITH_INT8}, this GPU has {capability}",
        "load_in_4bit=True, or half precision, on this GPU",
    )


def _unprepared(packed: QuantizedFacts) -> Reason | None:
    if packed.half_rest != "float16" or not packed.num_adapted:
        return None
    return Reason(
        "possible",
        "a quantised base was not prepared for training",
        "its norms, embedding and head are stored in float16, whose values end at 65504",
        "call prepare_model_for_kbit_training before the adapters are attached",
    )


RULE = Rule(
    "NS107",
    "quantisation-misuse",
    "a quantised set-up that cannot train as it stands",
    check,
    ("static",),
)
