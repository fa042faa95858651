"""Parameters were never trained, or never filled at all.

## What happened
A model starts with weights that no checkpoint gave it: memory that was allocated and never written,
an adapter whose second half is still zero, or tensors that the checkpoint lacks although its config
expects them, so that loading draws them anew. With `strict=False` a state dict whose keys have
other names (`module.`, `fc.` for `head.`) leaves the model's own as they were drawn: that is told
where it has as many tensors of the same shapes too many, and of `from_pretrained` where the folder
was written by a model of the same class besides: of another class a new head is meant. So it is
of a script that copies tensors of a dict by name itself. Nothing need
have failed yet; where an operation overflows and weights were beyond 2**20 as they were loaded,
they are the cause.

## Why it happens
`torch.empty` returns memory as it was. Read as float32, the 64-bit pointers and small integers that
lie there are numbers from 1e-45 to 1e38. Trained weights are not like that: of n values with a
bounded density around zero the smallest is about 1/n of the usual one, so that 16777216 weights
span some 24 + 5 doublings from smallest to largest. A tensor that spans 40 doublings more than
log2(n), and reaches beyond 2**20, was not sampled from anything. `from_pretrained` builds a model
on the meta device, so that what its `__init__` drew is lost, allocates what the checkpoint lacks
with `torch.empty` and asks `_init_weights` to fill it. In transformers 5 that of the base class
knows Linear, Embedding, convolutions and norms; a bare Parameter, or a module that fills itself in
its own `__init__`, keeps what the memory held: values of 1e20 to 1e34, other ones in each run. An
adapter is zero by design when it is new: B = 0 makes the first step exact, and B still 0 on the
disk says that no step was ever made, since any update moves it.

## Example
```python
import tempfile, torch
from transformers import AutoModel, LlamaConfig, PreTrainedModel

class Scaled(PreTrainedModel):
    config_class = LlamaConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = AutoModel.from_config(config)
        self.scale = torch.nn.Parameter(torch.ones(64))     # unknown to _init_weights
        self.post_init()

sizes = dict(vocab_size=9, hidden_size=8, intermediate_size=8)
config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=1)
with tempfile.TemporaryDirectory() as folder:
    AutoModel.from_config(config).save_pretrained(folder)
    scale = Scaled.from_pretrained(folder).scale    # what the memory held: 6.8e+34 once, never ones
(scale == 1).all().item()                                     # False
```

## Fix
1. Implement `_init_weights` for the new module, or call `nn.init` after loading. Cost: none.
2. Save the missing tensors too: `modules_to_save=["lm_head"]` for an adapter with a head,
   `state_dict` of the whole model otherwise. Cost: their size on the disk.
3. Make the config say what the files hold:
   `tie_word_embeddings`, `num_hidden_layers`, `vocab_size`. Cost: none.
4. For an adapter that is still zero: find why no gradient reached it (NS114). Cost: a training.

## Fix safety
All of them change training: from noise to what was meant.

## Not to be confused with
NS103: single rows of a table. NS106: garbage that happens to be NaN or Inf. NS109: a head that is
new on purpose and then not trained. A new head that is trained is a usual set-up and is not
reported.

## References
- https://github.com/huggingface/transformers/issues/28968
- https://github.com/huggingface/transformers/issues/30953
- https://github.com/huggingface/transformers/issues/30374
- https://github.com/pytorch/torchtitan/pull/2450
- https://github.com/huggingface/transformers/issues/26221
"""

from __future__ import annotations

import math

from nanstop.diagnose.evidence.accounts import quoted
from nanstop.diagnose.evidence.reading import FORWARD, born, standing, weights_of
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import (
    CheckpointScan,
    Confidence,
    Diagnosis,
    Evidence,
    LoadFacts,
    TensorScan,
    TensorStats,
)
from nanstop.wording import counted, listed, number

MOST_LINES = 4
BEYOND_WEIGHTS = 2.0**20
BEYOND_SAMPLING_BITS = 40.0
"""A weight's magnitudes span log2(n) doublings and a few more, rounding and decay included."""

_Untrained = tuple[Confidence, str, str, tuple[str, ...]]


def check(evidence: Evidence) -> Diagnosis | None:
    """Return what was never filled, what is missing from the checkpoint, or what was never trained:
    the first of them.

    Of a failure: the weights that had overflowed what they meet.
    """
    scan = evidence.checkpoint
    alone = evidence.incident is None
    reason = _unfilled(weights_of(evidence), alone=alone) or _too_large(evidence)
    if reason is None and scan is not None:
        reason = _missing(scan) or _idle_adapter(scan) or _zero_matrices(scan)
    loaded = standing(evidence).loaded if reason is None and alone else None
    if loaded is not None:
        reason = _under_other_names(loaded)
    if reason is None:
        return None
    confidence, where, cause, lines = reason
    return Diagnosis(
        code="NS105",
        title=f"weights that no training made: {listed((where,))}",
        cause=cause,
        confidence=confidence,
        lines=lines,
        where=where,
        source=loaded.at if loaded is not None else None,
    )


def spans(stats: TensorStats) -> float:
    """Return how many doublings lie between the smallest and the largest magnitude of a tensor."""
    return math.log2(stats.absmax / stats.absmin_nonzero) if stats.absmin_nonzero else 0.0


def is_unfilled(stats: TensorStats) -> bool:
    """Return whether the finite values of a tensor are those of memory that was never written."""
    usual = math.log2(max(2, math.prod(stats.shape))) + BEYOND_SAMPLING_BITS
    return stats.absmax > BEYOND_WEIGHTS and spans(stats) > usual


def is_large_throughout(stats: TensorStats) -> bool:
    """Return whether no value has a weight's size; one number throughout is a mask's."""
    least = 0.0 if stats.zeros else stats.absmin_nonzero or 0.0
    return least > BEYOND_WEIGHTS and spans(stats) >= 1.0


def _unfilled(weights: tuple[TensorStats, ...], *, alone: bool) -> _Untrained | None:
    """Return the weights of memory that nothing wrote. ``alone``: no failure is to be explained."""
    found = [
        stats for stats in weights if is_unfilled(stats) or (alone and is_large_throughout(stats))
    ]
    if not found:
        return None
    lines = [
        f"`{stats.name}` {stats.dtype}: from {stats.absmin_nonzero:.2g} to {stats.absmax:.2g}, "
        f"{spans(stats):.0f} doublings"
        for stats in found[:MOST_LINES]
    ]
    cause = f"{counted(len(found), 'tensor')} with numbers as in memory that was never written"
    return "likely", found[0].name or "", cause, tuple(lines)


def _too_large(evidence: Evidence) -> _Untrained | None:
    """Return the weights behind an overflow that were far too large as they were loaded."""
    event = born(evidence, (*FORWARD, "backward"))
    if event is None or event.wider != "finite":
        return None
    found = [s for s in standing(evidence).odd_weights if s.finite and s.absmax > BEYOND_WEIGHTS]
    if not found:
        return None
    lines = [
        f"`{stats.name}` {stats.dtype}: up to {stats.absmax:.3g}" for stats in found[:MOST_LINES]
    ]
    cause = (
        f"{counted(len(found), 'tensor')} as large as no training makes it, before the first step"
    )
    return "likely", found[0].name or "", cause, tuple(lines)


def _missing(scan: CheckpointScan) -> _Untrained | None:
    lost = [problem for problem in scan.keys if problem.new_on_load]
    if not lost:
        return None
    lines = [f"`{problem.name}`: {problem.detail}" for problem in lost[:MOST_LINES]]
    if len(lost) > MOST_LINES:
        lines.append(f"and {len(lost) - MOST_LINES} more")
    cause = f"the checkpoint lacks {counted(len(lost), 'part')} that loading would then draw anew"
    return "likely", lost[0].name, cause, tuple(lines)


def _under_other_names(loaded: LoadFacts) -> _Untrained:
    """Return the weights that stayed as they were drawn, for what was loaded has other names."""
    num = f"{len(loaded.missing)} of {counted(loaded.num_tensors, 'tensor')}"
    cause = (
        f"{num} are not in what was loaded, which has as many of the same shapes under other "
        f"names: {listed(loaded.unexpected)}"
    )
    advice = "rename the keys, and load with strict=True"
    return "likely", loaded.missing[0], cause, tuple(filter(None, (quoted(loaded.at), advice)))


def _idle_adapter(scan: CheckpointScan) -> _Untrained | None:
    second = [tensor for tensor in scan.tensors if "lora_B" in tensor.name]
    if not second or any(not _is_zero(tensor) for tensor in second):
        return None
    cause = (
        f"all {len(second)} lora_B matrices are zero: the adapter adds nothing and was never "
        "trained"
    )
    return "likely", second[0].name, cause, ()


def _zero_matrices(scan: CheckpointScan) -> _Untrained | None:
    tables = {rows.parameter for rows in scan.token_rows}
    found = [
        tensor
        for tensor in scan.tensors
        if tensor.name.endswith("weight")
        and len(tensor.stats.shape) >= 2
        and "lora_" not in tensor.name
        and tensor.name not in tables
        and _is_zero(tensor)
    ]
    if not found:
        return None
    lines = [
        f"`{one.name}` {one.stats.dtype}: all {number(one.num_elements)} values are 0"
        for one in found
    ]
    cause = f"{counted(len(found), 'weight')} of zeros alone"
    return "possible", found[0].name, cause, tuple(lines[:MOST_LINES])


def _is_zero(tensor: TensorScan) -> bool:
    stats = tensor.stats
    return bool(tensor.fits) and stats.finite and stats.absmax == 0.0 and stats.zeros > 0


RULE = Rule(
    "NS105", "uninitialised-weights", "weights that no training made", check, ("static", "incident")
)
