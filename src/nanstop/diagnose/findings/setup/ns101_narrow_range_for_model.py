"""The model's values do not fit the range of float16.

## What happened
The run computes in float16 (half weights or float16 autocast), but the model was trained in
bfloat16, is of a family known to exceed float16, or has been seen within a factor of four of its
limit. Or a range, of any format, was seen to grow by the same factor step after step, and to come
that near: then the finding says at which steps it will arrive. Nothing has failed yet.

## Why it happens
float16 has 5 exponent bits: its largest value is 65504. bfloat16 has 8: 3.39e38, as far as float32.
A model that was trained in bfloat16 was never asked to stay below 65504. Gemma3's residual stream
reaches about 8e5, twelve times too much; one element of T5's feed-forward output of 66246 was
enough for NaN. Headroom is counted in doublings: log2(65504 / 20000) = 1.7 bits, so a value of
20000 needs to double less than twice. What doubles every 40 steps has then 1.7 * 40 = 68 steps
left.

## Example
```python
import torch

residual = torch.tensor([2e4, 8e5], dtype=torch.bfloat16)     # Gemma 3 reaches 8e5
residual.half()                     # tensor([19968., inf], dtype=torch.float16)
```

## Fix
1. Train in bfloat16: `bf16=True` instead of `fp16=True`. Cost: none on Ampere or later;
   emulated or missing before.
2. Keep the modules whose values are large in float32 and the rest in float16 (`nanstop plan`).
   Cost: a cast at each region's edge, usually below 1 % of step time.
3. Train in float32. Cost: twice the memory, and two to eight times the time of half precision on a
   GPU.
4. Where a range keeps growing, a wider format only puts the end off: lower the learning rate, or
   stop what feeds the growth (a residual branch without a norm, a weight that is not decayed).
   Cost: training changes.

## Fix safety
float32 regions are safe: the same mathematics with more bits. bfloat16 changes training: it keeps 8
bits of precision where float16 keeps 11.

## Not to be confused with
NS201, which reports an overflow that has happened. Loss scaling protects gradients only: it never
touches the forward pass and cannot help here. Clamping values to 65504 keeps a run finite, and some
report better results with it than without (transformers issue 39972); but it computes another
function than the one that was trained, and is not offered.

## References
- https://github.com/huggingface/trl/issues/3236
- https://github.com/unslothai/unsloth/pull/4014
- https://github.com/huggingface/transformers/issues/39972
- https://github.com/huggingface/transformers/pull/36832
- https://github.com/huggingface/transformers/issues/5651
"""

from __future__ import annotations

import math
from dataclasses import replace

from nanstop.diagnose.evidence.candidates import BF16
from nanstop.diagnose.evidence.reading import standing
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import (
    FORMAT_MAX,
    CheckpointScan,
    Confidence,
    Diagnosis,
    Evidence,
    Probe,
    RangeRow,
    RunFacts,
)
from nanstop.wording import number

LEAST_HEADROOM_BITS = 2.0

_T5 = "https://github.com/huggingface/transformers/issues/9295"
_GEMMA2 = "https://github.com/oobabooga/textgen/issues/6213"
_GEMMA3 = "https://github.com/huggingface/transformers/issues/39972"

EXCEEDS_FLOAT16: dict[str, str] = {
    "falcon_h1": "https://github.com/unslothai/unsloth-zoo/pull/212",
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma4": "https://github.com/huggingface/transformers/pull/46277",
    "longt5": "https://github.com/huggingface/transformers/pull/19229",
    "mt5": "https://github.com/huggingface/transformers/pull/10956",
    "t5": _T5,
    "umt5": _T5,
}
"""Model types whose values were seen to exceed float16, and where."""

EXCEEDS_IN_EAGER_ATTENTION: dict[str, str] = {
    "qwen2": "https://github.com/huggingface/transformers/pull/33317",
    "qwen2_vl": "https://github.com/huggingface/transformers/pull/33312",
}
"""Model types whose query-key products exceed float16 in unfused attention only."""


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if a range is about to leave its format, or float16 is too narrow."""
    facts = standing(evidence)
    growing = [row for row in evidence.ranges if row.reaches is not None]
    if growing:
        return _foretold(min(growing, key=lambda row: row.reaches or ()))
    if not _computes_in_float16(facts):
        return None
    ranges = (*evidence.ranges, *_probed(evidence.probe))
    reason = (
        _from_weights(evidence.checkpoint)
        or _from_ranges(ranges)
        or _from_family(facts)
        or _from_declaration(facts)
    )
    if reason is None:
        return None
    confidence, cause = reason
    return Diagnosis(
        code="NS101",
        title="float16 is too narrow for this model",
        cause=cause,
        confidence=confidence,
        lines=("float16 ends at 65504; loss scaling protects gradients only, not these values",),
        remedies=BF16,
        where=facts.model_type or facts.host,
    )


def _foretold(row: RangeRow) -> Diagnosis:
    """Return the finding for a range that the gauge has seen grow, in whatever format."""
    assert row.reaches is not None
    assert row.at is not None
    assert row.growth is not None
    first, last = row.reaches
    return Diagnosis(
        code="NS101",
        title=f"`{row.module}` is about to overflow {row.dtype}",
        cause=(
            f"the {row.op} of `{row.module}` doubles every {max(1, round(1 / row.growth))} steps; "
            "it was "
            f"{number(row.absmax)} at step {row.at} and reaches {number(FORMAT_MAX[row.dtype])} in "
            f"{first - row.at}-{last - row.at} steps"
        ),
        confidence="likely",
        lines=(f"{row.dtype} ends there: expected between step {first} and step {last}",),
        remedies=BF16 if row.dtype == "float16" else (),
        where=row.module,
    )


def _computes_in_float16(facts: RunFacts) -> bool:
    asked = facts.precision.requested if facts.precision is not None else None
    packed = facts.quantized.compute_dtype if facts.quantized is not None else None
    stored = {group.dtype for group in facts.param_groups}
    return "float16" in {facts.autocast, asked, packed} | stored


def _probed(probe: Probe | None) -> tuple[RangeRow, ...]:
    """Return the probed ranges, those of backward without the loss scale, which adapts."""
    if probe is None:
        return ()
    scale = probe.loss_scale or 1.0
    return tuple(
        replace(row, absmax=row.absmax / scale, headroom_bits=row.headroom_bits + math.log2(scale))
        if row.phase == "backward"
        else row
        for row in probe.ranges
    )


def _from_weights(scan: CheckpointScan | None) -> tuple[Confidence, str] | None:
    """Return which weights of a scanned checkpoint float16 cannot hold."""
    over = [
        tensor.stats
        for tensor in (scan.tensors if scan is not None else ())
        for fit in tensor.fits
        if fit.format == "float16" and fit.overflow
    ]
    if not over:
        return None
    worst = max(over, key=lambda stats: stats.absmax)
    return "certain", f"the checkpoint's `{worst.name}` holds {number(worst.absmax)}"


def _from_ranges(ranges: tuple[RangeRow, ...]) -> tuple[Confidence, str] | None:
    close = [
        row for row in ranges if row.dtype == "float16" and row.headroom_bits < LEAST_HEADROOM_BITS
    ]
    if not close:
        return None
    worst = min(close, key=lambda row: row.headroom_bits)
    cause = (
        f"`{worst.module}` reached {number(worst.absmax)} in `{worst.op}`; "
        f"the largest float16 is 65504"
    )
    return ("certain" if worst.headroom_bits <= 0.0 else "likely"), cause


def _from_family(facts: RunFacts) -> tuple[Confidence, str] | None:
    family = facts.model_type or ""
    if family in EXCEEDS_FLOAT16:
        return "likely", f"models of type {family} exceed float16 ({EXCEEDS_FLOAT16[family]})"
    if family in EXCEEDS_IN_EAGER_ATTENTION and facts.attention == "eager":
        source = EXCEEDS_IN_EAGER_ATTENTION[family]
        return "likely", f"eager attention of {family} exceeds float16 ({source})"
    return None


def _from_declaration(facts: RunFacts) -> tuple[Confidence, str] | None:
    if facts.declared_dtype != "bfloat16":
        return None
    return "possible", "the model's own config says bfloat16, the run computes in float16"


RULE = Rule(
    "NS101",
    "narrow-range-for-model",
    "the model's values do not fit float16",
    check,
    ("static", "gauge"),
)
