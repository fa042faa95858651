"""The update broke weights that were good: not finite, or moved out of all proportion.

## What happened
The gradients were finite, the weights were finite before the update and are not after it. Every
later step fails, and blames the first operation that touches a broken weight. Or every number stays
finite, and the update moves weights more than 10 times as far as the same gradients do in float32:
the model is lost, and nothing says so but the loss.

## Why it happens
AdamW moves a weight by lr x m / (sqrt(v) + eps). In float16 both parts of the denominator vanish:
eps = 1e-8 is below 2.98e-8, half of the smallest positive value, and so is v = 0.001 x g^2 for
every |g| < 5.4e-3. What is left is m / 0 = Inf, or 0 / 0 = NaN where the gradient was 0. A fused
kernel computes in float32 and rounds what it stores: its first update is right, but v is 0 from
then on, and every later one too long, by thousands of learning rates where the gradient is 0 and m
is not. With 8-bit moments, a v that is small in its block of 256 rounds to 0, and the update is m /
eps = m x 1e8. A learning rate can do it alone only by the size of the update: 1e5 x an update of 1
leaves float16.

## Example
```python
import torch

weight = torch.nn.Parameter(torch.tensor([0.02, 0.02], dtype=torch.float16))
weight.grad = torch.tensor([1e-4, 0.0], dtype=torch.float16)
torch.optim.AdamW([weight], lr=1e-3).step()
weight.data                         # tensor([-inf, nan], dtype=torch.float16)
```

## Fix
1. Store the trainable parameters in float32 (with autocast, so that they can meet half weights).
   Cost: 8 bytes more a trainable parameter.
2. Use 32-bit optimizer states, or AdamW instead of an 8-bit optimizer.
   Cost: 6 bytes more a trainable parameter.
3. Where eps was set to 0, give it back its 1e-8, on parameters in float32: what never had a
   gradient is 0 / 1e-8 = 0 then. Cost: none.
4. In an optimizer of your own, keep what it divides by from 0, and what it takes a root of from
   below 0. Cost: none.
5. Lower the learning rate. Cost: a slower run; right only where the update overflows by its size.

## Fix safety
Float32 trainables and states are safe. Another optimizer, an eps in place of 0, another form of an
own optimizer's line, another learning rate and re-initialised rows change training. A larger eps is
not offered: where v is 0 the update is lr x m / eps, 100 times the learning rate for a gradient of
1e-3 and an eps of 1e-5 (NS110).

## Not to be confused with
NS401: already broken, and the update that did it is not known. The log seldom shows this failure:
with the default `logging_nan_inf_filter` the next numbers are astronomically large or 0 (NS801).

## References
- https://github.com/huggingface/trl/issues/2367
- https://github.com/NVIDIA/apex/issues/240
- https://github.com/google-deepmind/optax/issues/1754
- https://github.com/bitsandbytes-foundation/bitsandbytes/issues/227
- https://github.com/huggingface/peft/issues/1715
"""

from __future__ import annotations

import math

from nanstop.diagnose.evidence.candidates import (
    Candidates,
    forms,
    fp32_trainables,
    initialised,
    updated_in_half,
)
from nanstop.diagnose.evidence.reading import (
    breaking_update,
    lost_squares,
    reached,
    squares_gradients,
    standing,
    too_long_step,
)
from nanstop.diagnose.evidence.rule import Rule
from nanstop.diagnose.evidence.script_writes import finite_numbers_only, named_writers
from nanstop.records import (
    Atom,
    Confidence,
    Diagnosis,
    Evidence,
    Localization,
    OpEvent,
    RunFacts,
)
from nanstop.records.formats import vanishes
from nanstop.wording import counted, listed

MOST_LENGTHS = 3
ROOTS = frozenset({"sqrt", "rsqrt"})
DIVISIONS = frozenset({"div", "true_divide", "divide"})


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if the replayed update turned finite parameters into non-finite ones."""
    found = evidence.localization
    if found is None:
        return _foreseen(evidence) or _found_later(evidence)
    if found.key.phase != "optimizer":
        return _found_later(evidence)
    if found.origin == "from_state":
        return None
    broken = reached(found) or ((found.culprit,) if found.culprit else ())
    facts = standing(evidence)
    too_long = found.key.kind == "length"
    confidence, cause = _cause(facts, found)
    if too_long and confidence == "certain":  # what the format loses was not measured here
        confidence = "likely"
    rows = () if too_long else _zero_rows(facts, broken)
    own = _own_forms(evidence, facts, found)
    return Diagnosis(
        code="NS402",
        title=_title(broken, evidence, too_long=too_long),
        cause=cause,
        confidence=confidence,
        lines=_lengths(evidence, broken) if too_long else _counts(evidence, broken),
        remedies=(*_remedies(facts), *own, *rows),
        where=broken[0] if broken else "",
        usual_cure=_usual_cure(facts, found.first_bad if own else None),
    ).at(facts.schedule_at if _has_no_rate(facts) else None)


def _usual_cure(facts: RunFacts, own: OpEvent | None) -> str:
    """Return what is usual of a rate, and of an operation of the optimizer's ``own`` that has no
    value; "" where neither is at fault.
    """
    if _has_no_rate(facts):
        return "Make the schedule return a finite rate at every step."
    if own is None:
        return ""
    if own.name.removeprefix("_foreach_") in ROOTS:
        return "Keep it at 0 at least before the root is taken: `x.clamp(min=0).sqrt() + eps`."
    return (
        "Add an epsilon to what it divides by (`v.sqrt() + 1e-8`), and count updates from 1 where "
        "that is `1 - beta ** t`."
    )


def _foreseen(evidence: Evidence) -> Diagnosis | None:
    """Return the finding where an update was held back that could be rehearsed on a sample only."""
    incident = evidence.incident
    if incident is None or incident.phase != "optimizer" or incident.bad_params:
        return None
    expected = (one for one in incident.signals if one.source == "param" and one.value is not None)
    broken = tuple(one.name for one in expected)  # of what was rehearsed the length is known
    if not broken:
        return None
    facts = standing(evidence)
    _, cause = _cause(facts, None)
    return Diagnosis(
        code="NS402",
        title=f"the update would break {listed(broken)}",
        cause=cause,
        confidence="likely",
        lines=("rehearsed on a sample of the weights: not finite there, and finite in float32",),
        remedies=_remedies(facts),
        where=broken[0],
    )


def _found_later(evidence: Evidence) -> Diagnosis | None:
    """Return the finding where the update that broke the weights could not be made again."""
    step, incident = breaking_update(evidence), evidence.incident
    if step is None or incident is None or incident.remade_finite == step:
        return None
    facts, broken = standing(evidence), incident.bad_params
    confidence, cause = _cause(facts, None)
    by = named_writers(incident.written_by)
    if confidence == "possible":  # nothing speaks for the update but that it came last
        cause = (
            f"the update of step {step}, or {by}"
            if by
            else f"the update of step {step}, or what else wrote to them after it"
        )
    back = f"go back to weights from before step {step}, and mend what made that update"
    finding = Diagnosis(
        code="NS402",
        title=f"weights not finite since the update of step {step}: {listed(broken)}",
        cause=cause,
        confidence="likely",
        lines=(
            (
                f"loss and gradients of step {step} were finite; "
                f"{counted(len(broken), 'parameter')} not finite in the next forward pass"
            ),
            (
                "the update could not be made again: where the script itself writes to weights or "
                "gradients, look there first"
            ),
        ),
        where=broken[0],
        usual_cure=finite_numbers_only(by) if by else back,
    )
    return finding.at(incident.written_by[0]) if by else finding


def _title(broken: tuple[str, ...], evidence: Evidence, *, too_long: bool) -> str:
    if too_long:
        return f"the update moves {listed(broken)} far too far"
    before, step = _put_right(evidence), breaking_update(evidence)
    if before and step is not None:
        return f"weights not finite since the update of step {step}: {listed(before)}"
    return f"the update broke {listed(broken)}" if broken else "the update broke the weights"


def _counts(evidence: Evidence, broken: tuple[str, ...]) -> tuple[str, ...]:
    """Return how many weights an update has broken, and how that is known where it was not that
    update.
    """
    num = counted(len(broken), "parameter")
    if _put_right(evidence):
        again = f"with them put right, the next one breaks {listed(broken)}"
        return (f"the update that broke them could not be made again; {again}",)
    return (f"gradients were finite; {num} not finite after the update",)


def _put_right(evidence: Evidence) -> tuple[str, ...]:
    return evidence.incident.put_right if evidence.incident is not None else ()


def _lengths(evidence: Evidence, broken: tuple[str, ...]) -> tuple[str, ...]:
    """Return how many parameters move too far, and of those that stand out how far."""
    signals = evidence.incident.signals if evidence.incident is not None else ()
    held = [s for s in signals if s.source == "param" and s.value is not None and s.threshold]
    worst = sorted(held, key=lambda s: (s.value or 0.0) / (s.threshold or 1.0), reverse=True)
    return (
        f"every number is finite; {counted(len(broken), 'parameter')} moved too far",
        *(f"`{s.name}` moves by {s.value:.3g}, {s.message}" for s in worst[:MOST_LENGTHS]),
    )


def _cause(facts: RunFacts, found: Localization | None) -> tuple[Confidence, str]:
    optimizer, formats = facts.optimizer, updated_in_half(facts)
    name = optimizer.name if optimizer is not None else "the optimizer"
    fused = optimizer is not None and optimizer.fused
    if rate := _rate_at_fault(facts):
        return rate
    if fused and formats and (squares := lost_squares(facts, formats[0])):
        return "likely", f"{name}'s {squares}, and what is left is m / (0 + eps)"
    event = found.first_bad if found is not None and found.origin == "born_here" else None
    own = _own_arithmetic(event) if event is not None else ""
    if lost := _lost_eps(facts, found, event):
        return lost
    if optimizer is not None and optimizer.eps == 0.0:
        return "likely", f"{name}'s eps is 0: where no gradient ever came its update is 0 / 0"
    if own:
        return "likely", f"{name}'s own arithmetic: {own}"
    if optimizer is not None and optimizer.state_bits == 8:
        return (
            "likely",
            f"{name} keeps 8-bit moments: a second moment that rounds to 0 divides by eps alone",
        )
    if formats and squares_gradients(facts):
        return "likely", f"{name} computes in {formats[0]}: squared gradients leave its range"
    highest = optimizer.rate if optimizer is not None else None
    rate = f" (lr {highest:g})" if highest is not None else ""
    return "possible", f"{name}'s update leaves the weights' format{rate}"


def _lost_eps(
    facts: RunFacts, found: Localization | None, event: OpEvent | None
) -> tuple[Confidence, str] | None:
    """Return that the eps of an optimizer is 0 in its format, certain where the divisor that
    failed was seen to be kept from 0 by it.

    What a wider format holds is no division by 0. Of a kernel that is one operation (fused), and of
    an update that was rehearsed, no divisor was seen.
    """
    optimizer = facts.optimizer
    if optimizer is None or optimizer.eps is None:
        return None
    dtype = next((d for d in updated_in_half(facts) if vanishes(optimizer.eps, d)), None)
    if dtype is None or (event is not None and event.wider == "finite"):
        return None
    added = found.vanished if found is not None else None
    seen = added is not None and optimizer.eps in added.scalars
    said = f"{optimizer.name}'s eps {optimizer.eps:g} rounds to 0 in {dtype}"
    return "certain" if seen else "likely", f"{said}: where a second moment is 0 it divides by 0"


def _has_no_rate(facts: RunFacts) -> bool:
    lr = facts.optimizer.rate if facts.optimizer is not None else None
    return lr is not None and not math.isfinite(lr)


def _rate_at_fault(facts: RunFacts) -> tuple[Confidence, str] | None:
    if facts.optimizer is not None and _has_no_rate(facts):
        return "certain", f"the learning rate is {facts.optimizer.rate:g}: look at the schedule"
    moved = too_long_step(facts)
    return ("likely", f"{moved}: no format's doing") if moved else None


def _own_arithmetic(event: OpEvent) -> str:
    """Return what an optimizer does that is undefined for finite numbers; "" if it is range."""
    made = event.name.removeprefix("_foreach_")
    if not all(read.finite for read in event.inputs):
        return ""
    if made in ROOTS and any(output.nan for output in event.outputs):
        return f"`{made}` of a negative number, which a sum of squares cannot be"
    divisors = event.inputs[1:2] if made in DIVISIONS else ()
    if any(divisor.zeros for divisor in divisors):
        return f"`{made}` by 0"
    if event.wider == "nonfinite":
        return f"`{made}` has no value for these numbers, in no format"
    return ""


def _remedies(facts: RunFacts) -> Candidates:
    optimizer = facts.optimizer
    if _has_no_rate(facts):
        return ()
    eight_bit: Candidates = (
        (Atom(remedy="fp32_optimizer_state"),),
        (Atom(remedy="optimizer_swap", value="adamw"),),
    )
    state = eight_bit if optimizer is not None and optimizer.state_bits == 8 else ()
    wide = fp32_trainables(facts)
    # A larger eps cures an eps of 0 only:
    # where v is lost to its format, every eps makes updates too long or too short.
    without = optimizer is not None and optimizer.eps == 0.0 and not wide
    eps: Candidates = ((Atom(remedy="optimizer_eps", value="1e-08"),),) if without else ()
    return (*wide, *state, *eps, (Atom(remedy="lr", value="0.1"),))


def _own_forms(evidence: Evidence, facts: RunFacts, found: Localization) -> Candidates:
    """Return other forms of the line of an optimizer that computes what has no value, where that is
    not for an eps that is 0, or is in its format.
    """
    event, optimizer = found.first_bad, facts.optimizer
    if event is None or found.origin != "born_here" or not _own_arithmetic(event):
        return ()
    by_eps = optimizer is not None and optimizer.eps == 0.0
    return () if by_eps or _lost_eps(facts, found, event) is not None else forms(evidence)


def _zero_rows(facts: RunFacts, broken: tuple[str, ...]) -> Candidates:
    return tuple(
        (initialised(rows, how),)
        for rows in facts.token_rows
        if rows.zero_rows and rows.parameter in broken
        for how in ("mean", "normal")
    )


RULE = Rule(
    "NS402",
    "optimizer-broke-weights",
    "the update broke the weights",
    check,
    ("incident",),
    yields_to=("NS403",),
    beside=("NS102", "NS103", "NS110", "NS113", "NS404"),
)
