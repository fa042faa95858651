"""Gradients are gone before the update.

## What happened
Backward leaves healthy gradients, and the optimizer is given zeros, or next to it. Loss and
gradient norm are finite, the norm that is logged is that before the clip, and nothing is learned:
with weight decay the weights even shrink.

## Why it happens
Clipping multiplies by `max_norm / norm`. A limit of 0, which in some programs means "do not clip",
multiplies by 0 here. So does a norm that overflows: the square of a gradient of 2e19 is beyond
float32 (3.4e38), of 256 beyond float16 (65504), the norm becomes Inf and 1 / Inf is 0, although
every gradient is finite. A limit of 1e-9 leaves a norm of 1e-9, far below the 1e-8 that Adam adds
to its denominator. Gradients that are divided by a count too many times, or zeroed by a mask that
covers all, end alike.

A sample of at most 4096 gradients is compared as backward left it and as the optimizer took it. It
is said where less than 1e-8 of what arrived is taken, its loss scale aside: after three updates
where the limit of the clipping, the size of the gradients or the line that made their norm infinite
says how, or the lines that empty them do so in each step (no condition stands over them, and no
number of the script goes in); else in six looks over 16 updates, for a script may hold its weights
still for the first updates by zeros. A norm that becomes infinite later in a run is looked at in
the updates that follow. It is certain where the limit says so, or an infinite norm of finite
gradients that are clipped: gradients beyond 1.8e19, of which float32 has no norm, have a reason of
their own, and where that is known (NS105, NS207, NS404, NS504, NS702) it is said alone. A run that
trains nothing by it has met an incident, though every number is finite: it goes on, unless the
policy is to stop.

An update can also be made and taken back. A copy of the best weights that is loaded in every step,
and is that of the start, leaves each forward with the weights that the update before it had
replaced: said where two forwards in a row find them so. Or it is made of something else: `p = p -
lr * p.grad` binds a name, and `w -= lr * p.grad` moves a copy; said of scripts without an
optimizer, where such a line is seen, gradients arrive and no weight moves in three looks in a row.
Or it is never made at all: `optimizer.step()` of accelerate does nothing while gradients are summed
up, and a window longer than the run is never full. That is said at the end of a run that has asked
for 32 updates or more and has made none.

## Example
```python
import torch

def taken(limit):
    weight = torch.nn.Parameter(torch.zeros(4))
    weight.sum().backward()
    torch.nn.utils.clip_grad_norm_([weight], limit)
    return weight.grad

taken(limit=float("inf"))           # tensor([1., 1., 1., 1.])
taken(limit=0.0)                    # tensor([0., 0., 0., 0.])
```

## Fix
1. No clipping: leave the call out, or a limit of `float("inf")`. Cost: none.
2. A limit of the size of usual norms, 1.0 for language models. Cost: none.
3. The norm in float32, or in float64 where it overflows:
   `torch.stack([g.double().norm() for g in gradients]).norm()`. Cost: one pass over the gradients.
4. Load kept weights at the end, or where the measure has become worse. Cost: none.

## Fix safety
All of these change training from nothing to something.

## Not to be confused with
NS111: the update arrives, and is rounded away. NS113: the learning rate is too small. NS114: no
gradient arrives at all. NS303: the gradient is 0 after backward. NS305: a gradient that is not
finite makes the others zero. NS112: the loss scale is divided out twice.

## References
- https://github.com/strands-labs/robots/pull/2028
- https://github.com/OpenNMT/OpenNMT-py/issues/1140
- https://github.com/kohya-ss/sd-scripts/issues/911
"""

from __future__ import annotations

import math
from typing import Any

from nanstop.diagnose.evidence.accounts import (
    has_signal,
    is_swallowed,
    quoted,
    repeated,
    shown,
    update_line,
)
from nanstop.diagnose.evidence.reading import sighting, standing, too_long_step
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Atom, Diagnosis, Evidence, GradientAccount, SourceLine
from nanstop.wording import number

_FEW, _MANY, _LONG = 3, 6, 16
"""Looks in a row of which nothing is left: those of updates 0, 1, 2, and over 16 updates. A script
may freeze its weights for the first updates by zeros.
"""
_ASKED = 32
"""Updates that a run has to ask for before it is no short trial of another."""
_NO_CLIP = 1e-6
_USUAL_CLIP = Atom(remedy="clip", value="1.0")
_NO_WEIGHT = 1e6
"""Factor of a loss that is no weight of it any more."""
_IN_FLOAT64 = (
    "ask first what makes gradients so large; float32 has no norm of them, float64 has: "
    "`torch.stack([g.double().norm() for g in gradients]).norm()`"
)
_NORM_OVERFLOWS = 1.8e19
"""From here on the square of a norm is beyond float32, whichever line computes it."""

_MAKE_IMMENSE = frozenset({"NS105", "NS207", "NS404", "NS504", "NS702"})
"""What makes gradients that large: weights as memory is, an exponential (of two policies, too), a
training that runs away, one row.
"""


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if updates in a row consumed next to nothing of what arrived: a few where
    the clip or a norm beyond float32 says how, many where the script may mean it.
    """
    found = _put_back(evidence) or _made_elsewhere(evidence) or _never_made(evidence)
    if found is not None:
        return found
    accounts = repeated(evidence.accounts, _FEW)
    is_clipped = _clips_to_nothing(evidence)
    is_seen = bool(accounts) and bool(accounts[-1].overflowed_at)
    are_immense = all(map(_has_no_norm, accounts))
    is_alike = bool(accounts) and accounts[-1].is_changed_alike
    if not (is_clipped or is_seen or are_immense or is_alike):
        accounts = _through(repeated(evidence.accounts, _MANY))
    if are_immense and not is_clipped and not _MAKE_IMMENSE.isdisjoint(evidence.told):
        return None
    if not accounts or not all(map(is_swallowed, accounts)):
        return None
    account = accounts[-1]
    overflow = next(iter(account.overflowed_at), None)
    source = account.changed_at[-1] if account.changed_at else None
    said = (quoted(overflow), quoted(source))
    has_norm = not all(one.norm == math.inf for one in accounts)
    divides = not has_norm and standing(evidence).clip is not None
    return _found(
        title="gradients are gone before the update",
        cause=(
            f"the model does not learn: {len(accounts)} updates that were looked at, one after "
            f"the other, changed nothing by their gradients; backward left a norm of "
            f"{number(account.arrived)} in the sampled weights, {number(account.consumed)} of it "
            f"came to the optimizer{_made_by(overflow, account, divides=divides)}"
        ),
        confidence="certain" if is_clipped or divides else "likely",
        lines=tuple(dict.fromkeys(line for line in said if line)),
        remedies=_typed(account, is_clipped=is_clipped),
        usual_cure=_advice(evidence, account, source),
        where=shown(overflow or source) or standing(evidence).host,
        source=overflow or source,
        seen=sighting(evidence, "optimizer", since=accounts[0].at.step),
    )


def _found(**known: Any) -> Diagnosis:
    return Diagnosis(code="NS307", trains_nothing=True, **known)


def _made_by(overflow: SourceLine | None, account: GradientAccount, *, divides: bool) -> str:
    """Return what made nothing of the gradients, as far as that was seen."""
    said = ""
    if overflow is not None:
        said = f"; at {shown(overflow)} finite gradients became a number that is not finite"
    elif divides:
        said = "; every gradient is finite, their norm is not, and clipping divides by it"
    factor = account.loss_factor or 0.0
    if factor >= _NO_WEIGHT:
        said += f"; the loss is a mean times {number(factor)}"
    return said


def _put_back(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if forwards find the weights as they were ahead of the updates."""
    twice = repeated(evidence.accounts, 2)
    if not twice or not all(account.is_put_back for account in twice):
        return None
    source = next(iter(twice[-1].rewritten_at[-1:]), None)
    return _found(
        title="the weights are put back after each update",
        cause=(
            f"the forward after update {twice[-1].at.step - 1} finds the sampled weights as they "
            "were before that update, to 1 % of what it had changed"
        ),
        confidence="certain",
        lines=("look for a state, or an average, that is copied over them in every step",),
        usual_cure="load kept weights at the end, or where the measure has become worse",
        where=standing(evidence).host,
        seen=sighting(evidence, "forward", since=max(twice[0].at.step - 1, 0)),
    ).at(source)


def _made_elsewhere(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if a script without an optimizer makes its updates of copies of weights,
    or of tensors that it drops.
    """
    accounts = repeated(evidence.accounts, _FEW)
    if not accounts or not all(one.share_moved == 0.0 and has_signal(one) for one in accounts):
        return None
    seen = [one.elsewhere_at[-1] for one in evidence.accounts if one.elsewhere_at]
    if not all(one.is_own for one in accounts) or not seen:
        return None
    return _found(
        title="updates are made, and never of the weights",
        cause=(
            f"a line makes a weight's update into another tensor, and {len(accounts)} looks in a "
            "row show weights that stay as they are while gradients arrive"
        ),
        confidence="likely",
        lines=tuple(map(quoted, accounts[-1].given_at)),
        usual_cure="write to the weight itself, in place and under no_grad",
        seen=sighting(evidence, "optimizer", since=accounts[0].at.step),
    ).at(seen[-1])


def _never_made(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if a run that is over has asked for updates and none was made."""
    account = evidence.accounts[-1] if evidence.accounts else None
    if account is None or account.num_asked < _ASKED or account.lacks_backwards:
        return None
    source = update_line(evidence)
    return _found(
        title="updates are asked for and never made",
        cause=(
            f"{account.optimizer} was asked for an update {account.num_asked} times and has made "
            "none: gradients are summed up over a window that is longer than the run"
        ),
        confidence="certain",
        usual_cure="fewer gradient_accumulation_steps than the run has micro-batches",
        seen=sighting(evidence, "optimizer"),
    ).at(source)


def _typed(account: GradientAccount, *, is_clipped: bool) -> tuple[tuple[Atom, ...], ...]:
    """Return what can be typed against it: another limit, or no factor of the loss."""
    if is_clipped:
        return ((_USUAL_CLIP,),)
    factor = account.loss_factor or 0.0
    if _has_no_norm(account) and factor >= _NO_WEIGHT:
        return ((Atom(remedy="unscale", value=repr(factor)),),)
    return ()


def _has_no_norm(account: GradientAccount) -> bool:
    """Return whether the norm of finite gradients is beyond its format."""
    return account.arrived > _NORM_OVERFLOWS or account.norm == math.inf


def _through(accounts: tuple[GradientAccount, ...]) -> tuple[GradientAccount, ...]:
    """Return looks that are spread over enough updates, else ()."""
    return accounts if accounts and accounts[-1].at.step - accounts[0].at.step >= _LONG else ()


def _clips_to_nothing(evidence: Evidence) -> bool:
    clip = standing(evidence).clip
    return clip is not None and clip < _NO_CLIP


def _advice(evidence: Evidence, account: GradientAccount, source: SourceLine | None) -> str:
    clip, factor = standing(evidence).clip, account.loss_factor or 0.0
    if clip is not None and _clips_to_nothing(evidence):
        return f"a limit of {number(clip)} clips every gradient to it: float('inf') clips nothing"
    if _has_no_norm(account) and factor >= _NO_WEIGHT:
        return f"leave the factor of the loss out, {number(factor)}"
    if account.overflowed_at and account.arrived < _NORM_OVERFLOWS:
        return "take the norm of gradients in float32: float16 ends at 65504"
    if _has_no_norm(account):
        far = too_long_step(standing(evidence))
        return f"a smaller learning rate: {far}" if far else _IN_FLOAT64
    if source is not None:
        return f"take out what empties the gradients at {source.short}, or do it after the update"
    return "look at the norm that gradients are divided by, and at the limit of the clipping"


RULE = Rule(
    "NS307",
    "swallowed-update",
    "gradients are gone before the update",
    check,
    ("account",),
)
