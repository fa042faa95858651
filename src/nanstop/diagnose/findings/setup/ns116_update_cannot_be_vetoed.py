"""The update happens where it cannot be held back: inside backward, or inside an engine.

## What happened
The weights are updated by hooks that run as soon as a gradient is there (LOMO, AdaLOMO, layerwise
GaLore and Adafactor, `optimizer.step` in a post-accumulate hook), or by an engine (DeepSpeed's in a
Trainer). When the last gradient is known, most weights have moved already.

## Why it happens
Such optimizers save the memory of the gradients: of 7e9 parameters in bfloat16, 14 GB. The price is
that no gradient of the window is left to be looked at as a whole: no norm, no clipping by it, no
loss scale that could leave the step out. A NaN that is born in layer 20 of 32 has been written into
layers 32 to 20 before layer 19 has a gradient at all.

## Example
```python
import torch

model = torch.nn.Linear(2, 2)
optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

def step(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()

for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(step)
model(torch.full((1, 2), torch.nan)).sum().backward()
model.weight.isnan().all()          # tensor(True)
```

## Fix
1. Nothing, knowingly: nanstop still sees the failure, replays it where it can and says where it was
   born. It does not skip, redo or repair in such a run. Cost: none.
2. Check the loss before `backward`, in the script:
   a NaN loss is the one sign that comes early. Cost: one read a step.
3. An optimizer that updates after backward: 8-bit AdamW, or GaLore that is not layerwise.
   Cost: memory of the gradients.
4. Save checkpoints often: what was written can only be undone from one. Cost: disk.

## Fix safety
Another optimizer changes training. The others change nothing.

## Not to be confused with
NS402, an update that breaks finite weights from finite gradients.
NS305, clipping that spreads one bad gradient.

## References
- https://github.com/huggingface/transformers/pull/30178
- https://github.com/huggingface/transformers/pull/29588
- https://github.com/hiyouga/LlamaFactory/issues/5887
- https://github.com/OpenLMLab/LOMO/issues/43
"""

from __future__ import annotations

from nanstop.diagnose.evidence.reading import standing
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Diagnosis, Evidence
from nanstop.records.facts import BY_HAND


def check(evidence: Evidence) -> Diagnosis | None:
    """Return why no update can be held back here, unless the script makes it itself."""
    facts = standing(evidence)
    if facts.veto in ("yes", BY_HAND):
        return None
    return Diagnosis(
        code="NS116",
        title="no update can be held back",
        cause=f"in this run {facts.veto}",
        confidence="certain",
        lines=(
            (
                "failures are seen, replayed and explained; none is repaired, and the weights may "
                "have them"
            ),
            "check the loss before backward, and save checkpoints often",
        ),
        where=facts.host,
    )


RULE = Rule(
    "NS116",
    "update-cannot-be-vetoed",
    "the update happens inside backward or inside an engine",
    check,
    ("static",),
)
