"""An attention row has nothing to attend to.

## What happened
Softmax or attention got a row whose every key is masked, and returned NaN for it.

## Why it happens
Softmax subtracts the row's maximum first. With all scores at -inf that is -inf - (-inf) = NaN;
written out, every term is exp(-inf) = 0 and the sum is 0, so each weight is 0 / 0. One such row in
a batch of 32 x 2048 = 65536 rows is enough: the loss is a mean over all of them. Left padding makes
such rows with any causal mask: the query of a padded position sees itself and what stands before
it, all of it padding. A sliding window makes more of them.

## Example
```python
import torch

causal = torch.ones(3, 3).tril().bool()
visible = causal & torch.tensor([False, True, True])      # the first position is padding
scores = torch.zeros(3, 3, requires_grad=True)
weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
weights[0].data                     # tensor([nan, nan, nan])
x = torch.ones(1, 1, 3, 2, requires_grad=True)
y = torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=visible)
y[0, 0, 0].data                     # tensor([0., 0.])
torch.autograd.grad(y.sum(), x)[0].isfinite().all()       # tensor(True)
```

## Fix
1. Use a kernel that returns 0 for such rows:
   `attn_implementation="sdpa"` with torch 2.5 or later. Cost: none.
2. Pad on the right, or let padded queries attend to themselves. Cost: none;
   it is the collator's or the mask's code.
3. Drop the sample that has no visible key. Cost: that sample.

## Fix safety
Another kernel is safe: rows that nothing reads become 0. Dropping a sample changes training.

## Not to be confused with
NS203, where the mask overflowed while it was built. bfloat16, lower learning rates and clipping do
not help: 0 / 0 is NaN in every format.

## References
- https://github.com/pytorch/pytorch/issues/103749
- https://github.com/pytorch/pytorch/pull/131060
- https://github.com/huggingface/transformers/issues/32390
"""

from __future__ import annotations

from nanstop.diagnose.evidence.candidates import at_the_line, kernels
from nanstop.diagnose.evidence.descent import CONTRACTIONS
from nanstop.diagnose.evidence.reading import FORWARD, born, standing
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Change, Diagnosis, Evidence, OpEvent, op_name
from nanstop.wording import counted


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if the first NaN is in rows that are masked throughout."""
    event = born(evidence, FORWARD)
    if event is None or event.fully_masked_rows == 0:
        return None
    if not any(output.nan for output in event.outputs) or not _weighs_values(event):
        return None
    rows = counted(event.fully_masked_rows, "row")
    return Diagnosis(
        code="NS202",
        title=f"attention row without a visible key in `{op_name(event.op)}`",
        cause=f"{rows} masked throughout: softmax divides 0 by 0",
        confidence="certain",
        lines=("no format helps: 0/0 is not a number in any of them",),
        remedies=(
            *kernels(standing(evidence)),
            *at_the_line(evidence),
        ),
        where=event.module,
    )


def confirm(evidence: Evidence) -> Change | None:
    """Return the key in sight that softmax must be finite with."""
    event = born(evidence, FORWARD)
    if event is None:
        return None
    hidden = [place for place, stats in enumerate(event.inputs) if stats.neginf]
    masks = [place for place, stats in enumerate(event.inputs) if stats.dtype == "bool"]
    place = next(iter((*hidden, *masks)), None)
    visible = 1.0 if place is not None and not hidden else 0.0
    return Change(kind="unmask", operand=place, value=visible) if place is not None else None


def _weighs_values(event: OpEvent) -> bool:
    """Return whether the op is attention: its rows weigh values, inside of it or right after.

    A router or a policy hides choices too; what its rows do is be chosen from.
    """
    if event.name not in ("_softmax", "softmax", "_safe_softmax", "_masked_softmax"):
        return True
    return not event.read_by or any(name in CONTRACTIONS for name in event.read_by)


RULE = Rule(
    "NS202",
    "fully-masked-row",
    "attention row without a visible key",
    check,
    ("incident",),
    yields_to=("NS203",),
    beside=("NS108",),
    confirm=confirm,
)
