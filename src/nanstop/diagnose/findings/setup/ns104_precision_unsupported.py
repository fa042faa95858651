"""The device has no such format, or the option that asks for it does nothing.

## What happened
The run asks for a format that this device cannot compute in. Either the request is ignored without
a word and the run trains in another format, or the format is emulated: results are right, speed and
kernels are not. Nothing has failed.

## Why it happens
bfloat16 units came with compute capability 8.0 (Ampere). V100 is 7.0, T4 7.5.
`torch.cuda.is_bf16_supported()` is True there all the same: it counts emulation, which widens every
operand to float32, multiplies, and rounds back to 8 bits. So transformers accepts `bf16=True`, and
TRL, whose configs set `bf16=True` whenever `fp16` is not, uses it unasked. One product then costs a
float32 product and three conversions, and kernels without a fallback refuse. On a CPU accelerate
switches no autocast on for `fp16=True`: the run computes in float32, four bytes a value where two
were expected, and shows nothing of what the same script does on a GPU. TF32 needs 8.0 as well,
float8 products 8.9.

## Example
```python
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, mixed_precision="fp16")
with accelerator.autocast():
    y = torch.nn.functional.linear(torch.ones(1, 4), torch.ones(4, 4))
y.dtype                             # torch.float32
```

## Fix
1. Before Ampere: `fp16=True, bf16=False` with float32 weights, and float32 for the modules that
   leave float16's range (`nanstop plan`). Cost: none for models that fit; some casts otherwise.
2. Train in float32. Cost: twice the memory of half precision, and no tensor cores.
3. On a CPU: say `bf16=True`, which is carried out, or nothing. Cost: none.

## Fix safety
Every one of these changes the format that the run computes in:
float32 keeps 24 bits, float16 11, bfloat16 8.

## Not to be confused with
NS101: the format exists and the model does not fit it. NS107: a quantised set-up that is wrong on
any device. NS108: a combination that computes wrongly; emulation is right and slow.

## References
- https://github.com/pytorch/pytorch/pull/148322
- https://github.com/pytorch/pytorch/issues/124996
- https://github.com/QwenLM/Qwen3/issues/670
- https://github.com/MakazhanAlpamys/Soup/issues/387
- https://github.com/huggingface/diffusers/pull/14129
"""

from __future__ import annotations

from nanstop.diagnose.evidence.reading import machine_of, standing
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Diagnosis, Environment, Evidence, RunFacts

FIRST_CAPABILITY = {"bfloat16": (8, 0), "tf32": (8, 0), "float8": (8, 9)}
"""The first compute capability of NVIDIA with units for a format."""


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if a format is asked for and ignored, or used without units."""
    facts, machine = standing(evidence), machine_of(evidence)
    return _ignored(facts) or _without_units(facts, machine)


def _ignored(facts: RunFacts) -> Diagnosis | None:
    asked = facts.precision
    if asked is None or asked.requested != "float16" or facts.device != "cpu":
        return None
    if facts.autocast is not None or facts.scaler is not None:
        return None
    return Diagnosis(
        code="NS104",
        title=f"`{asked.option}` does nothing on this device",
        cause="accelerate has no float16 autocast for a CPU: the run computes in the format of "
        "its weights",
        confidence="certain",
        lines=("what float16 does to this model shows on a GPU only, or under `nanstop plan`",),
        where=facts.host,
    )


def _without_units(facts: RunFacts, machine: Environment | None) -> Diagnosis | None:
    capability = _capability(machine)
    if capability is None or facts.device != "cuda":
        return None
    lacking = [name for name in _used(facts) if capability < FIRST_CAPABILITY[name]]
    if not lacking:
        return None
    name, gpu = lacking[0], machine.gpu if machine is not None else None
    first = ".".join(map(str, FIRST_CAPABILITY[name]))
    here = f"{gpu or 'this GPU'} has {'.'.join(map(str, capability))}"
    effect = "it is emulated" if name == "bfloat16" else "the request has no effect or is refused"
    asked = facts.precision if _asked_for(facts, name) else None
    lines = [f"asked for by `{asked.option}`"] if asked is not None else []
    return Diagnosis(
        code="NS104",
        title=f"{name} on a GPU that has no units for it",
        cause=f"{name} needs compute capability {first}, {here}: {effect}",
        confidence="certain",
        lines=(
            *lines,
            "use float16 with float32 where it is too narrow (`nanstop plan`), or float32",
        ),
        where=facts.host,
    )


def _used(facts: RunFacts) -> list[str]:
    """Return the formats with units of their own that the run computes in or asks for."""
    asked = facts.precision
    packed = facts.quantized.compute_dtype if facts.quantized is not None else None
    names = {group.dtype for group in facts.param_groups} | {facts.autocast, packed}
    names |= {asked.requested, "tf32" if asked.tf32 else None} if asked is not None else set()
    return [name for name in FIRST_CAPABILITY if name in names]


def _asked_for(facts: RunFacts, name: str) -> bool:
    return facts.precision is not None and facts.precision.requested == name


def _capability(machine: Environment | None) -> tuple[int, int] | None:
    parts = machine.capability.split(".") if machine is not None and machine.capability else []
    return (int(parts[0]), int(parts[1])) if len(parts) == 2 else None


RULE = Rule(
    "NS104", "precision-unsupported", "a format that the device does not have", check, ("static",)
)
