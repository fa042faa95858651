"""Everything is finite, and the numbers are wrong.

## What happened
No value left its range, and the model's answers are not those of the same model in float32:
positions were counted in half precision, a difference of large numbers lost its digits, a sum was
kept in half precision term after term, or a score was read at a padding token.

## Why it happens
bfloat16 has 8 bits, so that its whole numbers end at 256: 257 becomes 256, and positions 256 and
257 are one. A sum of ones stands still there: 256 + 1 is 256, and of 600 terms most are lost. It is
told where a tenth of what was added is missing. float16 ends at 2048. An angle of 1045 in float16
is right to 0.5 radian, so that its cosine is any number. When `model.to(torch.bfloat16)` has
rounded `inv_freq`, the angle at position 4096 is off by up to half a unit of the last place, 4096 /
512 = 8 radians, even if sine and cosine are computed in float32: 5.0 for a base of 10000 and 7.3
for one of 500000, at heads of 128. The mean of x^2 less the square of the mean: 10000.5 - 10000 is
0 in float16. A classifier whose config names another padding token than the tokenizer pads with
pools a padding token, and so does `states[:, -1]` of rows that are padded on the right: told where
the loss changes with what is read there. In float32 the same difference is lost where the numbers
are around 4000: 16000000 has neighbours 1 apart. Autocast keeps the bfloat16 copies of weights that
it has made until it is left: entered once around a loop of 1000 steps, it computes all of them with
the first weights.

## Example
```python
import torch

positions = torch.arange(300).to(torch.bfloat16)
positions.unique().numel()          # 279

inv_freq = 1.0 / 10000.0 ** (torch.arange(0, 128, 2) / 128)
error = (inv_freq.to(torch.bfloat16).float() - inv_freq).abs() * 4096
error.max()                         # tensor(5.0100)
```

## Fix
1. Count positions and compute angles in float32, and cast sine and cosine afterwards; load with
   `from_pretrained(dtype=...)` rather than `.to(...)`, which rounds `inv_freq` too. An island comes
   too late for numbers that are rounded already. Cost: none.
2. Keep the module that loses the digits in float32. Cost: two casts.
3. Set `model.config.pad_token_id` to the id that the tokenizer pads with. Cost: none.
4. Take the mean of squared differences from the mean, in place of a difference of means.
   Cost: one more pass.
5. Enter autocast around each forward pass, not around the loop: the copies live as long as the
   outermost block, also one with `enabled=False`. Cost: none.

## Fix safety
float32 where digits are lost is safe. A model that was trained with coarse positions or the wrong
token changes its answers when this is put right: do it before training.

## Not to be confused with
NS209, where an overflow was hidden. NS111: the forward pass is right and the weights stand still. A
distance to float32 of some hundredths of a nat a token is what bfloat16 costs, and no fault.

## References
- https://github.com/EleutherAI/gpt-neox/issues/1003
- https://github.com/NVIDIA/Megatron-LM/issues/535
- https://github.com/huggingface/transformers/issues/25681
- https://github.com/huggingface/transformers/pull/29285
- https://github.com/huggingface/transformers/issues/29496
"""

from __future__ import annotations

import math

from nanstop.diagnose.evidence.candidates import Candidates
from nanstop.diagnose.evidence.reading import sighting
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import (
    Atom,
    CancelledRow,
    CoarseRow,
    Confidence,
    Diagnosis,
    DriftRow,
    Evidence,
    LostSumRow,
    Probe,
    op_kind,
    op_name,
)
from nanstop.wording import counted, number

LEAST_ANGLE = 0.5
"""Radians; less is lost in what half precision costs anyway."""
LEAST_DISTANCE = 0.1
"""Nats a token, on average: a tenth off the probability of every next token."""
LEAST_LOSS_GAP = 0.05
LEAST_LOSS = 0.01
"""Losses below this (of an objective that adds up to 0) have no relative distance."""

_ANGLES = ("sin", "cos")
_READ_AT_THE_LAST = (
    "read each row at the last token that its mask keeps; a model of transformers looks for "
    "`model.config.pad_token_id`: give it the id that texts are padded with"
)


def check(evidence: Evidence) -> Diagnosis | None:
    """Return what the probe saw: pooled padding, colliding positions, distant logits."""
    probe = evidence.probe
    if probe is None:
        return None
    coarse = [row for row in probe.coarse if not _is_angle(row) or row.error >= LEAST_ANGLE]
    coarse.sort(key=_is_angle)  # angles are wrong because of the counts that they come from
    distant = _distant(probe)
    causes = [*_pooled(probe), *_stale(probe), *map(_coarse_cause, coarse[:1])]
    causes += [*map(_cancelled_cause, probe.cancelled[:1])]
    causes += [*map(_lost_cause, probe.lost_sums[:1]), *distant]
    if not causes:
        return None
    places = [row.module for row in probe.drift if distant]
    stale, cancelled = probe.stale is not None, bool(probe.cancelled)
    met = [*coarse, *probe.cancelled, *probe.lost_sums]
    return Diagnosis(
        code="NS208",
        title=_title(probe, causes),
        cause=causes[0],
        confidence=_confidence(probe, coarse),
        lines=(
            *filter(None, (probe.pooled_at, *(row.line for row in met[:1]))),
            *causes[1:],
            *((_READ_AT_THE_LAST,) * bool(_pooled(probe))),
            *map(_advice, coarse[:1]),
            *(("enter autocast anew for each forward, or with cache_enabled=False",) * stale),
            *(("keep the sum in float32",) * bool(probe.lost_sums)),
            *(("take the mean of squared differences from the mean",) * cancelled),
            *(map(_drift_line, probe.drift[:1]) if distant else ()),
        ),
        remedies=_islands(places),
        where=next(filter(None, (*(row.module for row in met), *places)), ""),
        seen=sighting(evidence, "forward", op=next((row.op for row in met), None)),
    )


def _title(probe: Probe, causes: list[str]) -> str:
    """Return the title; a score that is read at the wrong place is so in every format."""
    only_pooled = causes == [*_pooled(probe)]
    return "scores read at padding" if only_pooled else "finite, and not what float32 computes"


def _confidence(probe: Probe, coarse: list[CoarseRow]) -> Confidence:
    if probe.num_rows_pooled_at_padding or probe.stale or probe.cancelled or probe.lost_sums:
        return "certain"
    return "likely" if coarse or _logit_distance(probe) >= LEAST_DISTANCE else "possible"


def _pooled(probe: Probe) -> tuple[str, ...]:
    rows = probe.num_rows_pooled_at_padding
    return (f"{counted(rows, 'row')} of the batch scored at a padding token",) if rows else ()


def _stale(probe: Probe) -> tuple[str, ...]:
    if probe.stale is None:
        return ()
    kept, anew = probe.stale
    computes = "autocast still computes with weights that it cast before an update"
    return (f"{computes}: the loss is {kept:.4g}, with the present ones {anew:.4g}",)


def _cancelled_cause(row: CancelledRow) -> str:
    place = f" in `{row.module}`" if row.module else ""
    return (
        f"a difference{place} is made of rounding errors: one rounding of what it is taken from "
        f"changes the loss by {100 * row.change:.2g} %"
    )


def _lost_cause(row: LostSumRow) -> str:
    place = f" in `{row.module}`" if row.module else ""
    return (
        f"a sum of {row.num_terms} terms is kept in {row.dtype}{place}: it lacks "
        f"{100 * row.share:.2g} % of what was added, as float64 has it"
    )


def _is_angle(row: CoarseRow) -> bool:
    return op_kind(row.op) in _ANGLES


def _coarse_cause(row: CoarseRow) -> str:
    place = f" in `{row.module}`" if row.module else ""
    if _is_angle(row):
        return (
            f"angles up to {number(row.absmax)}{place} come from {row.dtype}: "
            f"off by up to {row.error:.2g} radians"
        )
    return (
        f"whole numbers up to {number(row.absmax)} are written in {row.dtype} by "
        f"`{op_name(row.op)}`{place}: different ones come out equal"
    )


def _advice(row: CoarseRow) -> str:
    """Return what helps; no island, since the numbers come to it rounded."""
    if _is_angle(row):
        return "`from_pretrained(dtype=...)` spares `inv_freq`, which `model.to(...)` rounds"
    return "count in integers or float32, and round sines and cosines only"


def _logit_distance(probe: Probe) -> float:
    return probe.logits.logprob_mean if probe.logits is not None else 0.0


def strays(probe: Probe) -> bool:
    """Return whether loss or log-probabilities are far enough from float32 to look on."""
    return _logit_distance(probe) >= LEAST_DISTANCE or _loss_strays(probe)


def _loss_strays(probe: Probe) -> bool:
    loss, true = probe.loss, probe.reference_loss
    if loss is None or true is None or not abs(true) >= LEAST_LOSS:
        return False
    return LEAST_LOSS_GAP * abs(true) <= abs(loss - true) < math.inf


def _distant(probe: Probe) -> tuple[str, ...]:
    """Return how far answers are from float32; of an op that loses digits, the loss."""
    gap = probe.logits
    if gap is not None and gap.logprob_mean >= LEAST_DISTANCE:
        distance = f"{gap.logprob_mean:.2g} nats a token off float32 on average"
        return (f"log-probabilities are {distance}, {gap.logprob_max:.2g} at most",)
    if not probe.drift or not _loss_strays(probe):
        return ()
    return (f"the loss is {probe.loss:.4g} where float32 has {probe.reference_loss:.4g}",)


def _drift_line(row: DriftRow) -> str:
    place = f" of `{row.module}`" if row.module else ""
    return (
        f"`{op_name(row.op)}`{place} reads numbers {row.before:.1g} off float32 and writes them "
        f"{row.after:.1g} off"
    )


def _islands(places: list[str]) -> Candidates:
    modules = dict.fromkeys(filter(None, places))
    return tuple(
        (Atom(remedy="island", target=module, value="float32->input"),) for module in modules
    )


RULE = Rule(
    "NS208", "silent-precision-loss", "finite, and not what float32 computes", check, ("gauge",)
)
