"""The loss depends on how a batch is split into micro-batches.

## What happened
With gradient accumulation the run optimises something else than without it: each micro-batch is
averaged over its own tokens although they have different numbers of them, or the losses of the
window are added up and divided by nothing, or divided twice, or divided and never added up, or a
BatchNorm sees one micro-batch at
a time, or gradients of many micro-batches are summed in half precision, which rounds the late ones
away.

## Why it happens
Two micro-batches of 10 and 100 tokens: the mean of their means gives each token of the first 1 / (2
x 10), each of the second 1 / (2 x 100), ten times less; of the whole batch it is 1 / 110 for all.
transformers therefore tells the loss how many tokens the window has (`num_items_in_batch`) and then
does not divide by the number of micro-batches. A `compute_loss` of one's own that does not pass it
on returns a mean that nobody divides: with 8 micro-batches the gradient is 8 times too large, which
AdamW hides and clipping turns into another learning rate. The trainer goes by the signature of
`forward`: a model that takes `**kwargs` counts as one that divides. In transformers 5.23 the heads
for sequence and token classification of Llama and Bert, and Bert's for masked words, take them and
do not: at 8 micro-batches loss and gradient are exactly 8 times too large (transformers issue
47688). A model whose `forward` takes neither is averaged by micro-batch.
`Accelerator(gradient_accumulation_steps=8)` of accelerate 1.15 divides the loss of each
`accelerator.backward` by 8, inside of `accelerator.accumulate(model)` or not; outside of it each
`optimizer.step()` makes an update: 8 times as many as were meant, of gradients that are 8 times too
small, while the schedule runs 8 times too fast.

## Example
```python
import torch

losses = [torch.full((10,), 1.0), torch.full((100,), 3.0)]    # of each token, in two micro-batches
(sum(each.mean() for each in losses) / 2).item()              # 2.0
(sum(each.sum() for each in losses) / 110).item()             # 2.818181...
```

```python
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

sizes = dict(vocab_size=9, hidden_size=8, intermediate_size=8)
config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=1)
model = LlamaForSequenceClassification(config).eval()
batch = {"input_ids": torch.ones(1, 3, dtype=torch.long), "labels": torch.tensor([1])}
of_eight = model(**batch, num_items_in_batch=torch.tensor(8)).loss
of_eight == model(**batch).loss     # tensor(True)
```

## Fix
1. In a `compute_loss` of one's own, pass `num_items_in_batch` on to a model that uses it, or divide
   the summed loss by it. Cost: none.
2. Where the loss is a mean, by design or because the model's head drops the argument, say so:
   `trainer.loss_is_scaled_for_ga = False` (in versions without that attribute,
   `trainer.model_accepts_loss_kwargs = False`). Passing the argument on does not help there. Cost:
   none; each micro-batch then weighs the same.
3. Pack or group by length, so that micro-batches have as many tokens. Cost: order of the data.
4. `with accelerator.accumulate(model):` around each micro-batch. Cost: none.
5. GroupNorm or frozen statistics in place of BatchNorm. Cost: another model.

## Fix safety
Changes training: the gradient becomes that of the whole batch.
A learning rate tuned to the fault has to be tuned again.

## Not to be confused with
NS113, a learning rate that is out of range as written. NS503, rows without any supervised token.
Losses that are a mean over rows or pairs (DPO, reward models): those do not depend on the split
while the micro-batches are of one size. Two losses of one step, as of real and of generated
samples: they are no pieces of one batch, and are not told.

## References
- https://github.com/huggingface/transformers/issues/24725
- https://github.com/huggingface/transformers/pull/34191
- https://github.com/huggingface/transformers/issues/37766
- https://github.com/huggingface/transformers/issues/47688
- https://github.com/huggingface/trl/issues/2175
- https://github.com/ml-explore/mlx-lm/pull/1413
"""

from __future__ import annotations

from nanstop.diagnose.evidence.accounts import repeated, same
from nanstop.diagnose.evidence.reading import sighting, standing
from nanstop.diagnose.evidence.rule import Reason, Rule
from nanstop.records import AccumulationFacts, Diagnosis, Evidence, GradientAccount
from nanstop.wording import counted

_UNEVEN = 1.05
"""Micro-batches whose numbers of tokens differ by less weigh their tokens alike."""

_UPDATES = 2
"""Updates in a row that are sums of means."""

_MANY = 32
"""Micro-batches that each add a thirtieth or less: five of bfloat16's eight bits are lost."""


def check(evidence: Evidence) -> Diagnosis | None:
    """Return how the split into micro-batches changes what is optimised."""
    facts = standing(evidence)
    sums = facts.accumulation
    if sums is None or (facts.num_micro < 2 and not sums.num_single):
        return None
    if evidence.accounts:
        return _summed(evidence, sums)
    reason = (
        _never_summed(sums)
        or _divided_wrongly(sums, facts.num_micro)
        or _weighed_unevenly(sums)
        or _rounded(sums, facts.num_micro)
        or _normed(sums)
    )
    if reason is None:
        return None
    seen = sighting(evidence, "optimizer", since=0) if sums.num_single else None
    made = sums.backward_at or sums.made_at
    return reason.diagnosis("NS117", where=facts.host, seen=seen).at(made)


def _never_summed(sums: AccumulationFacts) -> Reason | None:
    if not sums.num_single:
        return None
    cause = (
        f"each backward is divided by {sums.num_asked}, its gradient_accumulation_steps, and each "
        f"of {sums.num_single} made an update of its own: accumulate() was never entered"
    )
    fix = "with accelerator.accumulate(model): around each micro-batch"
    return Reason("certain", f"gradients are {sums.num_asked} times too small", cause, fix)


def _summed(evidence: Evidence, sums: AccumulationFacts) -> Diagnosis | None:
    """Return that updates were made of sums of means, where the host leaves it to the loss to be a
    share of its window.
    """
    facts, latest = standing(evidence), repeated(evidence.accounts, _UPDATES)
    if sums.by_micros or not latest or not all(_is_sum(one, facts.num_micro) for one in latest):
        return None
    num = facts.num_micro
    cause = (
        f"each of {num} losses of an update is a mean of its own, as its graph shows, and nothing "
        "divides their sum"
    )
    fix = "set loss_is_scaled_for_ga = False, or divide a sum by num_items_in_batch"
    reason = Reason("likely", f"gradients are {num} times too large", cause, fix)
    seen = sighting(evidence, "backward", since=latest[0].at.step)
    return reason.diagnosis("NS117", where=facts.host, seen=seen)


def _is_sum(account: GradientAccount, num: int) -> bool:
    """Return whether an update took a sum of so many means, if clipped: not divided by their
    number.
    """
    given = account.contributions
    is_whole = len(given) == num and not any(one.is_lost or one.is_again for one in given)
    if not (is_whole and account.are_means and same((account.loss_factor, 1.0))):
        return False
    return bool(account.factor) and account.scale == 1.0 and not same((account.factor, 1.0 / num))


def _divided_wrongly(sums: AccumulationFacts, num_micro: int) -> Reason | None:
    if sums.by_tokens is False and not sums.by_micros:
        cause = (
            f"each of {num_micro} micro-batches is a mean of its own, and nothing divides their sum"
        )
        title = f"gradients are {num_micro} times too large"
        return Reason(
            "certain",
            title,
            cause,
            "set loss_is_scaled_for_ga = False, or divide by num_items_in_batch",
        )
    if sums.by_tokens and sums.by_micros:
        cause = f"divided by the tokens of the window, and by its {num_micro} micro-batches again"
        title = f"gradients are {num_micro} times too small"
        return Reason("certain", title, cause, "set loss_is_scaled_for_ga = True on the trainer")
    return None


def _weighed_unevenly(sums: AccumulationFacts) -> Reason | None:
    counts = [count for count in sums.counts if count]
    if sums.by_tokens is not False or not counts or max(counts) < _UNEVEN * min(counts):
        return None
    ratio = max(counts) / min(counts)
    shown = ", ".join(map(str, sums.counts[:6])) + (", ..." if len(sums.counts) > 6 else "")
    cause = (
        f"micro-batches of {shown} supervised tokens weigh the same: a token of the shortest "
        f"counts {ratio:.3g} times one of the longest"
    )
    fix = "a loss that takes num_items_in_batch, or micro-batches of as many tokens"
    return Reason("likely", "a mean of means over uneven micro-batches", cause, fix)


def _rounded(sums: AccumulationFacts, num_micro: int) -> Reason | None:
    if sums.sum_format is None or num_micro < _MANY:
        return None
    share = f"1/{num_micro}"
    cause = (
        f"a micro-batch adds about {share} of the sum, of which {sums.sum_format} keeps the "
        "leading digits"
    )
    title = f"gradients of {num_micro} micro-batches are summed in {sums.sum_format}"
    return Reason("likely", title, cause, "sum gradients in float32")


def _normed(sums: AccumulationFacts) -> Reason | None:
    if not sums.batch_norms:
        return None
    sees = "sees" if sums.batch_norms == 1 else "see"
    cause = f"{counted(sums.batch_norms, 'BatchNorm')} {sees} one micro-batch at a time"
    return Reason(
        "possible", "statistics of micro-batches", cause, "freeze its statistics, or GroupNorm"
    )


RULE = Rule(
    "NS117",
    "accumulation-changes-loss",
    "the loss depends on how a batch is split into micro-batches",
    check,
    ("static", "account"),
)
