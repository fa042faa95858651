"""Gradients do not reach the optimizer as backward made them.

## What happened
Between a backward and the update that it is for, gradients were added to those of the update
before, thrown away, counted twice, multiplied by a number that the loss does not know of, or had
their NaN replaced by numbers, by a line of the script or by a hook. Nothing fails. Training
is slower, noisier or steeper than the script says, or rests on a part of the model that has none.
The other way round, a line that writes to finite gradients makes NaN of them: what the backward
left is finite each time that it is run again, and what the optimizer takes is not.

## Why it happens
`backward` adds to `.grad`, it never replaces it. Without `zero_grad` update k takes the sum of all
k gradients so far: after 100 steps it is 100 times too long, and points to where the model was. The
other way round, `zero_grad` at the begin of each of 8 micro-batches leaves those of the last: 7 of
8 forwards and backwards are for nothing, and as each loss was divided by 8, what is left is 1/8
of what was meant. A second `backward` of the same loss (`retain_graph=True` lets it pass) doubles
it. `nan_to_num` makes 0 of each NaN: 5 % of NaN are 5 % of weights that are not trained.

These are found in a sample of at most 4096 gradients, copied at updates 0, 1, 2, 4, 8 and so on,
around each backward and where the optimizer takes them: by what is there, whatever the script
called, and ahead of each hook of a parameter. Two updates in a row must show it. Gradients that a
script has computed with before it cleared them (saliency, PCGrad, per-sample clipping), that an
input or another optimizer asked for, or that weights which have moved since have outdated (SAM,
meta-learning) are meant to go. A factor is held against the one that the loss was multiplied by: 64
times a mean, and every gradient divided by 4096, leaves 1/64 of it, and to an optimizer that
follows the size of gradients that is a learning rate 64 times smaller. It is said below 1/50 and
above 50, where it is the same in three looks, and `likely` at most: a script may mean it. A rate of
1 leaves the rate to the gradients.

## Example
```python
import torch

def last_gradient(cleared):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for _ in range(100):
        if cleared:
            optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
    return weight.grad

last_gradient(cleared=True)         # tensor([1.])
last_gradient(cleared=False)        # tensor([100.])
```

## Fix
1. One `optimizer.zero_grad()` for each update, after `optimizer.step()` or before the first
   backward of the window, and none in between. Cost: none.
2. One backward for each loss. Sum losses that share a graph: `(a + b).backward()`. Cost: none; the
   graph is walked once less.
3. Take the replacement of NaN out, let nanstop locate the operation that makes them, and cure that.
   Cost: a run that stops where it went on.
4. Where a line of the script makes NaN of finite gradients: keep from 0 what it divides them by,
   `norm.clamp(min=1e-6)`. Cost: none.

## Fix safety
Changes training: updates become what the script asks for. A learning rate that was tuned to the
fault may have to be tuned again.

## Not to be confused with
NS307: next to nothing of the gradients is left. NS112: they are clipped or applied with their loss
scale. NS117: the division by the micro-batches is wrong, their gradients are all there. NS305: one
bad gradient spoils the others by clipping. NS304: where NaN in gradients comes from.

## References
- https://github.com/huggingface/accelerate/issues/1299
- https://github.com/starVLA/starVLA/issues/395
- https://docs.pytorch.org/tutorials/recipes/recipes/zeroing_out_gradients.html
"""

from __future__ import annotations

from nanstop.diagnose.evidence.accounts import (
    doubled,
    follows_size,
    is_rescaled,
    quoted,
    repeated,
    same,
    shown,
    thrown_away,
)
from nanstop.diagnose.evidence.reading import averaged_by_script, is_rewritten, sighting
from nanstop.diagnose.evidence.rule import Reason, Rule
from nanstop.records import Diagnosis, Evidence, GradientAccount
from nanstop.wording import counted, listed, number

_THRICE = 3
"""Updates that show a factor: a clip, or a count, has another one each time."""
_TWICE = 2
"""Updates in a row that show it: one may be the script's own way with a bad batch."""


def check(evidence: Evidence) -> Diagnosis | None:
    """Return what became of gradients between their backward and the optimizer."""
    if is_rewritten(evidence):
        return None if averaged_by_script(evidence) else _spoilt(evidence)
    twice = repeated(evidence.accounts, _TWICE)
    hidden = tuple(account for account in evidence.accounts if account.num_hidden)
    reason = _hidden(hidden) or _carried(twice) or _thrown_away(twice) or _doubled(twice)
    reason = reason or _scaled(repeated(evidence.accounts, _THRICE))
    if reason is None:
        return None
    first = (hidden or twice or evidence.accounts)[0]
    seen = sighting(evidence, "optimizer", since=first.at.step)
    return reason.diagnosis("NS306", seen=seen)


def _spoilt(evidence: Evidence) -> Diagnosis:
    """Return the finding where the script itself has made of finite gradients what is not."""
    incident, replay = evidence.incident, evidence.replay
    lines = (incident.rewritten_at if incident is not None else None) or ()
    where = f", at {listed(tuple(map(shown, lines)))}" if lines else ""
    runs = counted(replay.runs if replay is not None else 0, "replay")
    return Diagnosis(
        code="NS306",
        title="gradients that backward left finite are not when the optimizer takes them",
        cause=f"{runs} of forward and backward leave finite gradients; the script writes to them "
        f"before the update{where}",
        confidence="likely",
        lines=tuple(map(quoted, lines)),
        where=shown(lines[-1]) if lines else "",
        source=lines[-1] if lines else None,
        usual_cure="Print what the script multiplies its gradients by there, or divides them by: a "
        "norm or a count that is 0 has no inverse, and is kept from 0 by `clamp(min=...)`.",
    )


def _hidden(hidden: tuple[GradientAccount, ...]) -> Reason | None:
    # The line that hides them is looked for at the next update.
    if not hidden or (len(hidden) < _TWICE and not hidden[-1].changed_at):
        return None
    account = hidden[-1]
    share = f"{account.num_hidden} of {account.num_elements} sampled gradients"
    cause = f"{share} are not finite after the backward, and numbers when the optimizer takes them"
    source = account.changed_at[-1] if account.changed_at else None
    return Reason(
        "certain",
        "gradients that are not finite are hidden from the optimizer",
        cause,
        "find the operation that makes them: without the replacement nanstop locates it",
        source,
        account.called_at[-1:] if source is not None else (),
    )


def _carried(accounts: tuple[GradientAccount, ...]) -> Reason | None:
    if not accounts or not all(account.is_carried for account in accounts):
        return None
    source = accounts[-1].contributions[0].source
    cause = (
        f"update {accounts[-1].at.step} begins with what update {accounts[-1].at.step - 1} "
        "consumed, and adds to it: each update is the sum of all gradients before it"
    )
    fix = "optimizer.zero_grad() before the first backward of each update"
    return Reason("certain", "gradients of earlier updates are never cleared", cause, fix, source)


def _thrown_away(accounts: tuple[GradientAccount, ...]) -> Reason | None:
    if not accounts or not all(thrown_away(account) for account in accounts):
        return None
    account = accounts[-1]
    if account.was_read is None:
        return None  # probes of a gradient throw theirs away as well
    num = len(account.contributions)
    cause = (
        f"of the {counted(num, 'backward')} of a window the gradients of {num - 1} are gone "
        "before its update, which uses those of the last alone"
    )
    source = next(iter(account.changed_at), None) or account.contributions[-1].source
    fix = "clear gradients after the update, not where a micro-batch begins"
    return Reason(
        "certain", "gradients are cleared within an accumulation window", cause, fix, source
    )


def _doubled(accounts: tuple[GradientAccount, ...]) -> Reason | None:
    found = [doubled(account) for account in accounts]
    if not found or not all(found) or found[-1] is None:
        return None
    cause = "a backward adds the very gradients once more that the same loss had given before"
    fix = "one backward for each loss: without retain_graph torch refuses the second"
    return Reason("certain", "gradients are counted twice", cause, fix, found[-1].source)


def _scaled(accounts: tuple[GradientAccount, ...]) -> Reason | None:
    """Return the finding where one number that the loss does not know of is on every gradient."""
    factors = [account.factor for account in accounts]
    if not accounts or not all(factors) or not same(factors):
        return None
    if not all(map(is_rescaled, accounts)) or not follows_size(accounts):
        return None
    account = accounts[-1]
    if not account.changed_at:
        return None
    factor, given = account.factor or 0.0, account.loss_factor or 0.0
    of = "the mean that is the loss" if given == 1.0 else f"a loss of {number(given)} times a mean"
    cause = (
        f"every sampled gradient of {of} is multiplied by {number(factor)} before the update: "
        f"it takes {number(factor * given)} of that mean's, at each update"
    )
    fix = "where that is meant as a learning rate, change the optimizer's"
    title = "gradients bear a factor that the loss has not"
    return Reason("likely", title, cause, fix, account.changed_at[-1], account.called_at[-1:])


RULE = Rule(
    "NS306",
    "gradient-changed-before-update",
    "gradients do not reach the optimizer as backward made them",
    check,
    ("incident", "account"),
)
