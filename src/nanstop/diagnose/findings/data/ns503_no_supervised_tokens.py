"""Every label of the micro-batch is masked.

## What happened
The loss of the micro-batch is NaN because there is nothing to average: all labels are -100.
Its gradients are exactly 0.

## Why it happens
Cross-entropy divides the sum over supervised tokens by their number: 0 / 0 = NaN. Its backward
gives ignored tokens a gradient of 0, so that no weight is broken by it. Labels vanish when
truncation cuts the completion away (a prompt of 2100 tokens under `max_length=2048` leaves 0 of the
answer), when the response template is not found in the text, or when a filter masks each truncated
completion. A Trainer of transformers logs a loss of 0 and a grad_norm of 0 for a window without
labels, as if there were nothing left to learn (NS701): its log filter replaces the NaN. Of two
micro-batches with one that is masked the loss stays finite: the sum is divided by the tokens of the
whole window, and 0 is added.

## Example
```python
import torch

logits = torch.zeros(3, 5, requires_grad=True)
loss = torch.nn.functional.cross_entropy(logits, torch.full((3,), -100))
loss.item()                         # nan
loss.backward()
logits.grad.abs().max()             # tensor(0.)
```

## Fix
1. Raise `max_length`, or truncate the prompt instead of the answer. Cost: memory.
2. Check the template: decode one row and look where its labels are not -100. Cost: a minute.
3. Filter rows without supervised tokens before training. Cost: these rows; they teach nothing.
4. Drop the micro-batch when it happens. Cost: nothing is lost; it has no label.

## Fix safety
Dropping the micro-batch changes training formally (the window's mean has one term less);
it is applied only when allowed.

## Not to be confused with
NS802, a loss of 0 by design. NS205, another empty mean.
Precision, learning rate and clipping have no part in it.

## References
- https://github.com/huggingface/trl/issues/6668
- https://github.com/huggingface/trl/issues/1053
- https://github.com/unslothai/unsloth/pull/11333
- https://github.com/huggingface/trl/pull/5826
"""

from __future__ import annotations

from nanstop.diagnose.evidence.reading import failing_batch, loss_is_bad
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Atom, Diagnosis, Evidence

EMPTY_MEANS = ("nll_loss", "cross_entropy", "div", "mean")


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if the micro-batch supervises nothing and its loss is not finite."""
    empty = [fact for fact in failing_batch(evidence) if fact.num_supervised == 0]
    if not empty or not loss_is_bad(evidence):
        return None
    fact = empty[0]
    return Diagnosis(
        code="NS503",
        title="no supervised token in the micro-batch",
        cause=f"every label in `{fact.name}` {list(fact.shape)} is -100: the mean loss is 0/0",
        confidence="certain" if _divides_by_nothing(evidence) else "likely",
        lines=("truncation or the template removed the answers; decode one row to see which",),
        remedies=((Atom(remedy="drop_micro", target=str(fact.micro)),),),
        where=fact.name,
    )


def _divides_by_nothing(evidence: Evidence) -> bool:
    found = evidence.localization
    if found is None or found.first_bad is None:
        return False
    return any(name in found.first_bad.op for name in EMPTY_MEANS)


RULE = Rule("NS503", "no-supervised-tokens", "every label is masked", check, ("incident",))
