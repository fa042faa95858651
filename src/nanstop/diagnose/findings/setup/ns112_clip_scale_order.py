"""Gradients are clipped while they are still scaled, before there are any, or after the update; or
float16 computes without a loss scale.

## What happened
The loop multiplies its loss by a loss scale and clips the gradients before `scaler.unscale_`; or it
computes under float16 autocast and has no scaler; or the norm by which it clips is itself kept in
float16. Nothing fails: training is slower, or stands still, than the numbers in the script say.
Where the call stands ahead of `loss.backward()`, between `zero_grad()` and it, there is nothing to
clip: it returns 0 each time, and no update is clipped. Nor is any where the call stands behind
`optimizer.step()`, and `zero_grad()` throws away what it has clipped; nor where it is given what
`model.parameters()` once returned and the optimizer has read: a generator is empty then. Where
`optimizer.step()` is called in place of `scaler.step(optimizer)`, the scale stays on the gradients:
SGD runs away within a few steps. So it does where a script scales by hand, `(loss *
1024).backward()`, and divides nothing afterwards.

## Why it happens
With a scale of 65536 every gradient, and their norm, is 65536 times too large. Clipped to 1.0 they
are divided by that norm, and then `scaler.step` divides them by 65536 once more: the update sees a
norm of 1 / 65536 = 1.5e-5 where 1.0 was meant. AdamW divides by the size of the gradients and hides
it, until gradients come near its epsilon of 1e-8; SGD stands still. Without a scale, what is below
6e-8 is 0 in float16: a mean over 2048 tokens alone divides by 2048. A norm in float16 is Inf above
65504, and clipping by Inf turns every healthy gradient into 0.

## Example
```python
import torch

def update(unscaled):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cpu")
    scaler.scale(3.0 * weight.sum()).backward()
    if unscaled:
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    scaler.step(optimizer)
    return weight.data

update(unscaled=True)               # tensor([-1.0000])
update(unscaled=False)              # tensor([-1.5259e-05])
```

## Fix
1. `scaler.unscale_(optimizer)` before clipping, and `scaler.step(optimizer)` after it. Cost: none.
2. A `torch.amp.GradScaler` around float16 autocast, or bfloat16, which needs none. Cost: none.
3. Store what is trained in float32; the norm then is too. Cost: memory of the trainables.
4. `backward`, then clip, then `optimizer.step()`. Cost: none.
5. Take a factor of your own off again: `p.grad /= factor` ahead of the update, or no factor where
   nothing needs it. Cost: none.

## Fix safety
Changes training: the update becomes what the script asks for.
The learning rate may have been tuned to the fault.

## Not to be confused with
NS302, a scale that falls step after step. NS303, gradients that are flushed to zero, measured.
NS305, one bad gradient that spoils the others through clipping. NS115, a scale that was not
restored.

## References
- https://github.com/Lightning-AI/pytorch-lightning/issues/9599
- https://github.com/milesial/Pytorch-UNet/issues/468
- https://github.com/pytorch/examples/issues/1196
"""

from __future__ import annotations

from dataclasses import replace

from nanstop.diagnose.evidence.accounts import (
    CLIPPED,
    changed_last,
    clipped_by_hand,
    follows_size,
    has_signal,
    repeated,
    same,
    since,
    update_line,
)
from nanstop.diagnose.evidence.candidates import fp32_trainables
from nanstop.diagnose.evidence.reading import has_masters, sighting, standing
from nanstop.diagnose.evidence.rule import Reason, Rule
from nanstop.diagnose.evidence.shorter_updates import (
    applied_scale,
    made_anew,
    passing_unscaled,
)
from nanstop.records import (
    Diagnosis,
    Evidence,
    GradientAccount,
    RunFacts,
    Sighting,
    SourceLine,
)
from nanstop.wording import number

_THREE = 3
"""Updates that show a loss scale which a script forgets: one may be a trial of another loss."""


def check(evidence: Evidence) -> Diagnosis | None:
    """Return what of clipping and scaling is out of order."""
    facts = standing(evidence)
    if (
        evidence.incident is not None
        and (failed_by := _failed_by_scale(evidence, facts)) is not None
    ):
        return failed_by
    reason = _applied_scaled(facts)
    if evidence.incident is None:
        reason = reason or _clipped_scaled(facts)
    source = facts.sink_at if reason else None
    if reason is None and evidence.incident is None and not evidence.accounts:
        reason = _clipped_before(facts)
        source = facts.clipping.at if facts.clipping is not None else None
    if evidence.accounts:  # what the order of calls has told is told
        reason = None if reason else _measured(evidence.accounts)
    elif evidence.incident is None:
        reason = reason or _unscaled_half(facts) or _norm_in_half(facts)
    if reason is None:
        return None
    source = source or changed_last(evidence.accounts) or update_line(evidence)
    if clipped_by_hand(repeated(evidence.accounts, 2)):
        latest = evidence.accounts[-1]
        source = next(iter(latest.changed_at), source)
        reason = replace(reason, behind=latest.called_at[:1])
    seen = _seen(evidence, facts, source)
    return reason.diagnosis("NS112", where=facts.host, seen=seen).at(source)


def _seen(evidence: Evidence, facts: RunFacts, source: SourceLine | None) -> Sighting | None:
    if source is not None and source is facts.sink_at:
        return Sighting(step=0, phase="optimizer")  # sinks are those of the first window
    if facts.clipping is not None and source is facts.clipping.at:
        return sighting(evidence, "optimizer", since=0)
    if not evidence.accounts:
        return None
    return sighting(evidence, "optimizer", since=since(evidence.accounts))


def _measured(accounts: tuple[GradientAccount, ...]) -> Reason | None:
    """Return what two updates in a row show, by whatever means the script scales and clips."""
    twice = repeated(accounts, 2)
    if clipped_by_hand(twice):
        factor = number(twice[-1].loss_factor or 1.0)
        cause = (
            f"the loss was multiplied by {factor}, and gradients were made smaller before they "
            "were divided by it: each update's norm is "
            f"{number(twice[-1].norm_consumed or 0.0)}, whatever backward left"
        )
        return Reason("certain", "scaled gradients are clipped", cause, "divide first, then clip")
    if (left_on := _left_on(repeated(accounts, _THREE))) is not None:
        return left_on
    if not twice or not all(one.scale > 1.0 and has_signal(one) for one in twice):
        return None
    scale = number(twice[-1].scale)
    if all(one.until_unscale is None and _is_whole(one.factor) for one in twice):
        cause = f"the optimizer takes gradients as a loss scale of {scale} has made them"
        return Reason("certain", "scaled gradients are applied", cause, "scaler.step(optimizer)")
    limits = [one.norm_at_unscale for one in twice if one.until_unscale is not None]
    before = {one.until_unscale for one in twice}
    # A division by a count is the same each time; a clip leaves the same norm each time.
    if len(limits) < len(twice) or len(before) < len(twice) or not same(limits):
        return None
    if not all(one.until_unscale is not None and one.until_unscale < CLIPPED for one in twice):
        return None
    cause = (
        f"when the scaler unscales them gradients have a norm of {number(limits[-1] or 0.0)} at "
        f"each update, whatever backward left: they were clipped at a scale of {scale}"
    )
    return Reason(
        "certain", "scaled gradients are clipped", cause, "scaler.unscale_(optimizer) first"
    )


def _left_on(accounts: tuple[GradientAccount, ...]) -> Reason | None:
    """Return the finding where a script multiplies a loss for its backward alone, by a number as
    loss scales are, and its optimizer makes updates as much longer by it.
    """
    if not accounts or not all(one.is_scaled_apart and _is_whole(one.factor) for one in accounts):
        return None
    factors = [one.loss_factor for one in accounts]
    if not same(factors) or not follows_size(accounts) or any(one.scale > 1.0 for one in accounts):
        return None
    factor = number(factors[-1] or 1.0)
    cause = (
        f"the backward gets {factor} times the loss that the script holds, and the optimizer the "
        f"gradients as they are: each update is {factor} times as long as that loss and its rate "
        "say"
    )
    fix = f"divide gradients by {factor} before the update; where it is meant, raise the rate"
    return Reason("likely", "scaled gradients are applied", cause, fix)


def _is_whole(factor: float | None) -> bool:
    return factor is not None and abs(factor - 1.0) < 1e-3


def _applied_scaled(facts: RunFacts) -> Reason | None:
    scale = applied_scale(facts)
    if scale is None:
        return None
    by = f"gradients {number(scale)} times too large"
    fix = "scaler.step(optimizer)"
    if "clip" in facts.sinks:
        by = f"{by}, clipped as they were"
        fix = f"scaler.unscale_(optimizer) before clipping, and {fix}"
    cause = f"the optimizer's step is its own: updates come from {by}"
    return Reason("certain", "scaled gradients are applied", cause, fix)


def _failed_by_scale(evidence: Evidence, facts: RunFacts) -> Diagnosis | None:
    """Return that a run fails by the number that the loop multiplies its loss by: it does not where
    gradients are divided by it.
    """
    shorter = passing_unscaled(evidence, facts)
    if shorter is None:
        return None
    by_hand = (
        f"the loop multiplies its loss by {number(facts.loss_factor or 1.0)} ahead of the "
        "backward, and updates with what comes of it"
    )
    reason = _applied_scaled(facts)
    return Diagnosis(
        code="NS112",
        title="scaled gradients are applied",
        cause=reason.cause if reason is not None else by_hand,
        confidence="certain",
        confirmed=made_anew(shorter),
        lines=(reason.fix,) if reason is not None else (),
        remedies=(shorter.atoms,),
        of_updates=True,
    ).at(facts.sink_at)


def _clipped_scaled(facts: RunFacts) -> Reason | None:
    if facts.scaler is None or facts.sinks != ("clip", "unscale"):
        return None
    cause = (
        f"in the first window clipping came before `unscale_`, at a scale of {number(facts.scaler)}"
    )
    if facts.clip:
        cause += (
            f": the update's norm is {number(facts.clip / facts.scaler)}, not {number(facts.clip)}"
        )
    return Reason(
        "certain", "scaled gradients are clipped", cause, "scaler.unscale_(optimizer) first"
    )


def _clipped_before(facts: RunFacts) -> Reason | None:
    clipping = facts.clipping
    if clipping is None:
        return None
    if clipping.is_late:
        cause = (
            f"ahead of each of the first {clipping.num_updates} updates gradients were clipped to "
            f"{number(clipping.limit)} after the one before had taken them, and then emptied; one "
            f"of them took a norm of {number(clipping.norm)}"
        )
        title = "gradients are clipped after the update"
        return Reason("certain", title, cause, "clip, then optimizer.step()")
    if clipping.is_of_none:
        cause = (
            f"in each of the first {clipping.num_updates} updates the call that clips to "
            f"{number(clipping.limit)} was given no parameters, and one of them took a norm "
            f"of {number(clipping.norm)}"
        )
        cure = "model.parameters() anew, or a list: a generator is used up once it was read"
        return Reason("certain", "nothing is clipped", cause, cure)
    cause = (
        f"in each of the first {clipping.num_updates} updates there was no gradient yet when they "
        f"were clipped to {number(clipping.limit)}, and one of them took a norm of "
        f"{number(clipping.norm)}"
    )
    title = "gradients are clipped before there are any"
    return Reason("certain", title, cause, "backward, then clip")


def _unscaled_half(facts: RunFacts) -> Reason | None:
    # A trainer of transformers makes its own scaler, and an engine scales by itself.
    if facts.host != "loop" or facts.autocast != "float16" or facts.scaler is not None:
        return None
    if facts.veto != "yes" or "scale" in facts.sinks or not _trains(facts, "float32"):
        return None
    cause = (
        "autocast computes in float16, where what is below 6e-8 is 0, and no GradScaler "
        "scales the loss"
    )
    return Reason(
        "likely",
        "float16 without a loss scale",
        cause,
        "scale the loss by torch.amp.GradScaler, or use bfloat16",
    )


def _norm_in_half(facts: RunFacts) -> Reason | None:
    if not facts.clip or not _trains(facts, "float16") or _trains(facts, "float32"):
        return None
    if has_masters(facts):
        return None
    cause = "gradients have the format of their weights, and so has their norm: Inf above 65504"
    return Reason(
        "possible",
        "the norm to clip by is kept in float16",
        cause,
        "train in float32 or bfloat16",
        remedies=fp32_trainables(facts),
    )


def _trains(facts: RunFacts, dtype: str) -> bool:
    return any(group.trainable and group.dtype == dtype for group in facts.param_groups)


RULE = Rule(
    "NS112",
    "clip-scale-order",
    "clipping and loss scaling are out of order",
    check,
    ("static", "incident", "account"),
)
