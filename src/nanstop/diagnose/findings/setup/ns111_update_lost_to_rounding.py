"""Updates are smaller than the weights' format can hold: training stands still.

## What happened
Nothing is NaN and the loss is finite, but most weights are bit for bit the same after an update.
The update was computed, added, and rounded away.

## Why it happens
bfloat16 keeps 8 bits: between 1 and 2 its numbers are 1/128 apart. A sum rounds to the nearest, so
that w + u is w again wherever |u| is less than half of that distance: for |u| < |w| / 512 always,
up to |w| / 256 at most. An Adam update is about the learning rate. With lr = 1e-6 every weight
above 512 x 1e-6 = 0.0005 stays where it is; of weights with a deviation of 0.02 that is 98 %.
float16 keeps 11 bits and loses updates below |w| / 4096. The next update is rounded away just the
same: they never add up. A script that makes its updates by itself, without an optimizer, is told
the same: what its line adds is seen, and of the weights with a gradient 95 % or more stay in three
looks in a row. So are weights that are held in float32 and rounded after each update: a callback
that stores a half copy by `model.half()`, and makes the model float again.

## Example
```python
import torch

def trained(dtype):
    weight = torch.nn.Parameter(torch.full((1,), 0.02, dtype=dtype))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], lr=1e-6, weight_decay=0.0)
    for _ in range(1000):
        optimizer.step()
    return weight.data

trained(torch.bfloat16)             # tensor([0.0200], dtype=torch.bfloat16)
trained(torch.float32)              # tensor([0.0190])
```

## Fix
1. Store the trainable parameters in float32 and compute in bfloat16 (`bf16=True` on a model loaded
   with `dtype=torch.float32`, which is autocast with master weights; transformers 5 loads a
   checkpoint in its own format, and TRL 1.16 casts the adapters of a quantised base to bfloat16).
   Cost: 8 bytes more a trainable parameter.
2. Train adapters (LoRA) in float32 over the half base. Cost: none worth naming;
   it is another parametrisation.
3. An optimizer with stochastic rounding or Kahan summation for bfloat16 weights, such as torchao's
   `_AdamW(bf16_stochastic_round=True)`. Cost: noise in each update, or 2 bytes more a parameter.
4. A larger learning rate. Cost: it is another training, and the small updates are still lost.

## Fix safety
float32 trainables are safe: the same mathematics with more bits. All else changes training.

## Not to be confused with
NS303: the gradient is flushed to zero before the optimizer sees it. NS701: the objective gives no
gradient. NS113: a learning rate that is too small in any format.

## References
- https://github.com/meta-pytorch/torchtune/issues/2254
- https://github.com/pytorch/ao/pull/1124
- https://github.com/pytorch/pytorch/issues/120376
- https://github.com/workofart/ml-by-hand/pull/85
"""

from __future__ import annotations

import math

from nanstop.diagnose.evidence.accounts import LOST, quoted, repeated, update_line
from nanstop.diagnose.evidence.candidates import fp32_trainables, updated_in_half
from nanstop.diagnose.evidence.reading import sighting, standing
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Confidence, Diagnosis, Evidence, RunFacts, UpdateRow
from nanstop.wording import listed, percent

_TWICE, _THRICE = 2, 3
MOST = 0.5
MANY = 0.1
TYPICAL_DEVIATION = 0.02
"""Of the weights of most pretrained language models (`initializer_range`)."""

_BITS = {"bfloat16": 8, "float16": 11}


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if a probed update was mostly lost, or would be at this rate."""
    facts = standing(evidence)
    if evidence.accounts and evidence.probe is None:
        return _own_update(evidence) or _rounded(evidence)
    probe = evidence.probe
    rows = probe.updates if probe is not None else ()
    since = probe.since if probe is not None else None
    confidence, cause, names = _measured(evidence, rows) if rows else _expected(facts)
    if confidence is None:
        return None
    return Diagnosis(
        code="NS111",
        title="updates are lost to the rounding of the weights",
        cause=cause,
        confidence=confidence,
        lines=(
            *((f"standing still: {listed(names)}",) if names else ()),
            *filter(None, (quoted(update_line(evidence)),)),
        ),
        remedies=fp32_trainables(facts),
        where=names[0] if names else "",
        source=update_line(evidence),
        seen=sighting(evidence, "optimizer", since=since) if rows else None,
    )


def _own_update(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if a script's own updates, with no optimizer, were mostly lost."""
    accounts = repeated(evidence.accounts, _THRICE)
    if not accounts or not all(one.is_own and one.asked for one in accounts):
        return None
    if not all(one.share_lost >= LOST for one in accounts):
        return None
    source = update_line(evidence)
    return Diagnosis(
        code="NS111",
        title="updates are lost to the rounding of the weights",
        cause=(
            f"{100 * accounts[-1].share_lost:.3g} % of the sampled weights that have a gradient "
            f"stay as they are where the script's own update adds up to {accounts[-1].asked:.2g}"
        ),
        confidence="certain",
        remedies=fp32_trainables(standing(evidence)),
        seen=sighting(evidence, "optimizer", since=accounts[0].at.step),
    ).at(source)


def _rounded(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if weights are rounded between each update and the next forward, and much
    of the updates is lost by it.
    """
    twice = repeated(evidence.accounts, _TWICE)
    narrow = {account.rounded_to for account in twice}
    if len(narrow) != 1 or not all(one.rounded_to and one.share_undone >= MANY for one in twice):
        return None
    last = twice[-1]
    return Diagnosis(
        code="NS111",
        title="updates are lost where the weights are rounded after them",
        cause=(
            f"the forward after update {last.at.step - 1} finds each sampled weight rounded to "
            f"{last.rounded_to}, and {100 * last.share_undone:.3g} % of those that it had changed "
            "as they were before"
        ),
        confidence="certain",
        lines=(
            "look for what casts the model between two updates, such as a half copy that is stored",
            "cast a copy, not the model: {k: v.half() for k, v in model.state_dict().items()}",
        ),
        usual_cure="Leave the weights that are trained in their format: cast a copy of them.",
        where=standing(evidence).host,
        seen=sighting(evidence, "forward", since=max(twice[0].at.step - 1, 0)),
    ).at(next(iter(last.rewritten_at[-1:]), None))


def _measured(
    evidence: Evidence, rows: tuple[UpdateRow, ...]
) -> tuple[Confidence | None, str, tuple[str, ...]]:
    lost, total = sum(row.num_lost for row in rows), sum(row.num_total for row in rows)
    if lost < MANY * total or not total:
        return None, "", ()
    worst = sorted((row for row in rows if row.num_lost), key=lambda row: -row.num_lost)
    lr = evidence.probe.lr if evidence.probe is not None else None
    rate = f" at learning rate {lr:g}" if lr is not None else ""
    cause = (
        f"{percent(lost, total)} of the weights that an update should move stay as they are "
        f"in {worst[0].dtype}{rate}"
    )
    return (
        "certain" if lost >= MOST * total else "possible",
        cause,
        tuple(row.parameter for row in worst),
    )


def _expected(facts: RunFacts) -> tuple[Confidence | None, str, tuple[str, ...]]:
    optimizer, formats = facts.optimizer, updated_in_half(facts)
    if optimizer is None or not optimizer.lr or not formats:
        return None, "", ()
    if optimizer.per_rate is None or optimizer.per_rate.relative:
        return None, "", ()
    dtype, update = min(formats, key=_BITS.__getitem__), optimizer.per_rate.length * optimizer.lr
    stuck = 2.0 ** (_BITS[dtype] + 1) * update
    if 1.0 - math.erf(stuck / (TYPICAL_DEVIATION * math.sqrt(2.0))) < MOST:
        return None, "", ()
    cause = (
        f"an update of {update:g} is rounded away on every {dtype} weight above {stuck:.2g}: "
        f"most of those of a pretrained model"
    )
    return "likely", cause, ()


RULE = Rule(
    "NS111",
    "update-lost-to-rounding",
    "updates are lost to the rounding of the weights",
    check,
    ("static", "gauge", "account"),
)
