"""Weights were NaN or infinite before training began.

## What happened
The loaded weights, or the files of the checkpoint, hold NaN or Inf. The run has not failed yet; it
will as soon as a batch reaches that weight, which for a rare token or a seldom chosen expert may
take thousands of steps.

## Why it happens
A run that had already failed was saved: one update with a NaN gradient makes every parameter NaN,
and the next checkpoint holds them. Or a merge overflowed: W + (alpha / r) * B A in float16 is
infinite as soon as it exceeds 65504, and with alpha / r = 16 and an element of B A of 6400 it does.
Or a cast did: a bfloat16 weight of 1e5 is Inf in float16. Or memory was never filled, and its bits
read as NaN: of random 16-bit patterns 1 in 32 (float16) or 1 in 256 (bfloat16) is not finite.

## Example
```python
import copy, torch
from peft import LoraConfig, get_peft_model

base = torch.nn.Sequential(torch.nn.Linear(4, 4)).half()
model = get_peft_model(base, LoraConfig(r=1, lora_alpha=16, target_modules=["0"]))
base[0].lora_A.default.weight.data[:] = 1.0
base[0].lora_B.default.weight.data[:] = 6400.0      # 16 x 6400 = 102400
merged = copy.deepcopy(model).merge_and_unload()
[n for n, weight in merged.named_parameters() if not weight.isfinite().all()]     # ['0.weight']
model = model.merge_and_unload(safe_merge=True)   # ValueError: NaNs detected in the merged weights
```

## Fix
1. Load an earlier checkpoint, after `nanstop scan CHECKPOINT`. Cost: the steps since.
2. Where a merge or a cast made it, repeat it in float32 or bfloat16;
   `merge_and_unload(safe_merge=True)` looks before it writes, and raises. Cost: twice the memory
   for the time of the merge.
3. Fetch the file again where its hash is not the published one. Cost: the download.
4. Initialise the bad tensors anew and train them. Cost: what they had learned.

## Fix safety
Another checkpoint and a merge with more range change nothing else. Replacing NaN by 0 hides how it
came about and is not offered. nanstop never writes a checkpoint that is not finite.

## Not to be confused with
NS401, which says the same of a step that failed by it. NS105: values that are finite and were never
learned. A stored attention mask is -Inf where nothing may be seen; it is no weight and is not
reported.

## References
- https://github.com/IntMeGroup/FineVQ/issues/5
- https://github.com/pytorch/torchtitan/pull/2450
- https://github.com/mst272/LLM-Dojo/issues/11
- https://github.com/huggingface/transformers/issues/28968
"""

from __future__ import annotations

from nanstop.diagnose.evidence.reading import bad_counts, limit, weights_of
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Diagnosis, Evidence, TensorStats
from nanstop.wording import counted, listed

MOST_LINES = 4


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the weights that are not finite, as scanned or as loaded."""
    bad = [stats for stats in weights_of(evidence) if not stats.finite and not _is_mask(stats)]
    if not bad:
        return None
    names = [stats.name or "a tensor" for stats in bad]
    lines = [_described(stats) for stats in bad[:MOST_LINES]]
    if len(bad) > MOST_LINES:
        lines.append(f"and {len(bad) - MOST_LINES} more")
    if all(stats.dtype == "float16" and not stats.nan for stats in bad):
        lines.append(
            f"only infinities, in float16: a merge or a cast exceeded {limit('float16')}, as its "
            "end is"
        )
    when = "as they were loaded" if evidence.checkpoint is not None else "when the run began"
    return Diagnosis(
        code="NS106",
        title=f"weights not finite {when}: {listed(names)}",
        cause=f"{counted(len(bad), 'tensor')} with NaN or Inf before any step",
        confidence="certain",
        lines=tuple(lines),
        where=names[0],
    )


def _is_mask(stats: TensorStats) -> bool:
    """Return whether there are only 0 and -Inf: an additive mask that was stored."""
    return bool(stats.neginf) and not (stats.nan or stats.posinf) and stats.absmax == 0.0


def _described(stats: TensorStats) -> str:
    shape = ", ".join(str(size) for size in stats.shape)
    first = ", ".join(str(at) for at in stats.first_bad or ())
    place = f"; first at [{first}]" if stats.first_bad is not None else ""
    return f"`{stats.name}` {stats.dtype} [{shape}]: {bad_counts(stats)}{place}"


RULE = Rule(
    "NS106", "checkpoint-not-finite", "weights not finite as they were loaded", check, ("static",)
)
