"""Every label of the micro-batch is masked.

## What happened
The loss of the micro-batch is NaN because there is nothing to average: all labels are -100, or the
number that the loss leaves out in its place (`ignore_index`). Its gradients are exactly 0.

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

from itertools import chain

from nanstop.diagnose.evidence.candidates import Candidates, forms
from nanstop.diagnose.evidence.descent import operand, without_zeros
from nanstop.diagnose.evidence.reading import failing_batch, loss_is_bad
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import (
    Atom,
    BatchFact,
    Change,
    Diagnosis,
    Evidence,
    Localization,
    OpEvent,
    TensorStats,
)
from nanstop.records.formats import is_float
from nanstop.wording import number

STATISTICS = ("mean", "nanmean")
_EMPTY = "look for rows without a text: `dataset.filter(lambda row: row['text'])`"
_DECODE = "decode one row to see why: truncation, the template, or a row without any answer"
TARGET = 1
"""The place of the labels among what a negative log-likelihood reads."""


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if nothing is supervised and the loss is a mean of that."""
    if not loss_is_bad(evidence) or not _may_be_empty(evidence):
        return None
    fact, event = _empty_entry(evidence), _first_bad(evidence)
    over_none = event is not None and _is_of_nothing(event)
    ignored = _ignored(event) if event is not None and fact is None else None
    nothing_counts = ignored is not None or (
        event is not None and over_none and _is_likelihood(event)
    )
    alone = _alone(evidence) if fact is None and not nothing_counts else None
    fact = fact or alone
    if fact is None and not nothing_counts:
        return None
    shape = fact.shape if fact is not None else ignored.shape if ignored is not None else ()
    what = {1: "sample", 3: "pixel"}.get(len(shape), "token")
    return Diagnosis(
        code="NS503",
        title=f"no supervised {what} in the micro-batch",
        cause=_left_out(ignored) if ignored is not None else _cause(fact, is_alone=fact is alone),
        confidence="certain" if event is not None else "likely",
        confirmed="the mean is over no element" if over_none else "",
        lines=(_EMPTY,) if alone is not None else (_DECODE,) if what == "token" else (),
        remedies=_remedies(evidence, fact),
        where=fact.name if fact is not None else "",
    )


def _ignored(event: OpEvent) -> TensorStats | None:
    """Return the labels of a mean over likelihoods that none of them counts in: the kernel returns
    what it divides by, and that is 0. With weights it may be these that are 0: then every label has
    to be the one that it leaves out.
    """
    if not (_is_likelihood(event) and len(event.inputs) > TARGET and len(event.outputs) > 1):
        return None
    loss, total, labels = event.outputs[0], event.outputs[1], event.inputs[TARGET]
    if not (loss.nan and total.absmax == 0.0 and all(one.finite for one in event.inputs)):
        return None
    if 0 in labels.shape:  # none is left out of what has none
        return None
    only = event.scalars[-1] if event.scalars else None
    unweighted = len(event.inputs) == TARGET + 1
    return labels if unweighted or labels.minimum == labels.absmax == only else None


def _left_out(labels: TensorStats) -> str:
    named = f"`{labels.name}` {list(labels.shape)}" if labels.name else "the labels"
    return f"the loss leaves out every entry of {named}, {number(labels.absmax)}: its mean is 0/0"


def _empty_entry(evidence: Evidence) -> BatchFact | None:
    """Return the entry of the batch of which nothing counts: labels that are all ignored, or what
    chooses none of the log-probabilities whose mean the loss is.
    """
    found, facts = evidence.localization, failing_batch(evidence)
    counted = found.counted if found is not None and _averages_likelihoods(found) else ()
    chosen = (f for f in facts if f.name in counted and f.minimum == f.maximum == 0.0)
    return next(chain((f for f in facts if f.num_supervised == 0), chosen), None)


def _averages_likelihoods(found: Localization) -> bool:
    summed = operand(found.first_bad, 0) if found.first_bad is not None else None
    return summed is not None and summed.is_a("log_probability")


def _alone(evidence: Evidence) -> BatchFact | None:
    """Return an entry of the batch whose texts are one token long, as all are, where the loss is a
    sum of nothing over a count of 0: no token is there to be predicted.
    """
    event = _first_bad(evidence)
    texts = [f for f in failing_batch(evidence) if len(f.shape) == 2 and not is_float(f.dtype)]
    is_one = all(fact.shape[1] == 1 for fact in texts)
    if event is None or not _is_zero_over_zero(event) or not texts or not is_one:
        return None
    return next((fact for fact in texts if "label" in fact.name), texts[0])


def _is_zero_over_zero(event: OpEvent) -> bool:
    """Return whether one number of 0 is divided by another, a tensor's."""
    read = event.inputs
    return (
        event.name == "div"
        and len(read) == 2
        and all(one.finite and not one.shape and one.absmax == 0.0 for one in read)
    )


def _cause(fact: BatchFact | None, *, is_alone: bool) -> str:
    if fact is None:
        return "no token of the micro-batch reaches the loss: its mean is 0/0"
    if is_alone:
        texts = f"every text of `{fact.name}` {list(fact.shape)} is one token long"
        return f"{texts}, and none is there to be predicted: the mean loss is 0/0"
    every = f"every entry of `{fact.name}` {list(fact.shape)} is {number(fact.maximum or 0.0)}"
    return f"{every}: the mean loss is 0/0"


def _remedies(evidence: Evidence, fact: BatchFact | None) -> Candidates:
    micro = fact.micro if fact is not None else None
    if micro is None and evidence.incident is not None:
        micro = evidence.incident.at.micro
    # A mean of nothing has no logarithm to be kept: what is left is a value for what has none.
    defined = tuple(one for one in forms(evidence) if one[0].remedy == "form")
    left_out = (Atom(remedy="drop_micro", target=str(micro)),)
    return (*defined, left_out) if micro is not None else defined


def confirm(evidence: Evidence) -> Change | None:
    """Return the label, or the count of labels, that the loss must be finite with."""
    event = _first_bad(evidence)
    if event is None:
        return None
    if _is_likelihood(event):
        left_out_is_0 = bool(event.scalars) and event.scalars[-1] == 0.0
        return Change(kind="supervise", operand=TARGET, value=1.0 if left_out_is_0 else 0.0)
    return without_zeros(event)


def _first_bad(evidence: Evidence) -> OpEvent | None:
    found = evidence.localization
    return found.first_bad if found is not None else None


def _is_likelihood(event: OpEvent) -> bool:
    return event.name in ("nll_loss_forward", "nll_loss2d_forward")


def _is_of_nothing(event: OpEvent) -> bool:
    averages = event.name in STATISTICS or _is_likelihood(event)
    return averages and bool(event.inputs) and 0 in event.inputs[0].shape


def _may_be_empty(evidence: Evidence) -> bool:
    """Return whether what failed first takes labels, or counts them, or takes what they chose."""
    event = _first_bad(evidence)
    if event is None or not event.descent or _is_of_nothing(event) or _is_zero_over_zero(event):
        return True
    read = [operand(event, place) for place in range(len(event.inputs))]
    return any(one is not None and one.is_a("ids", "mask", "count") for one in read)


RULE = Rule(
    "NS503",
    "no-supervised-tokens",
    "every label is masked",
    check,
    ("incident",),
    confirm=confirm,
)
