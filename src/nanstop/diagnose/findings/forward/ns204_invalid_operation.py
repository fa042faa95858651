"""An operation is undefined for the values that it got.

## What happened
An operation got finite inputs and produced NaN or Inf, and repeating it in a wider format gives the
same. The value is not too large for the format: the operation has no value there. Some operations
raise instead: `normal expects all elements of std >= 0.0`.

## Why it happens
0 / 0, log of a negative number, sqrt of a negative number, 1 / 0, asin of 1.0000001. These come
from rounding (a difference of equal numbers that is -1e-9 instead of 0: sqrt(-1e-9) is NaN), from
empty selections, and from data that the formula never met. Where no half format has rounded, more
bits do not help. So is 0 x Inf: a choice that a mask of -Inf forbids has the probability 0 and the
log-probability -Inf, and their product, in an entropy say, is NaN. With -1e4 in its place it is 0;
that is proven where -2e4 gives the same loss and gradients. A row that a mask of -Inf hides in full
has the logsumexp -Inf, and label smoothing counts each choice, the hidden ones too. A CTC loss is
Inf for a text that its frames cannot spell. A missing value that is marked by NaN is not left out
by a product with 0.

## Example
```python
import torch

p = torch.tensor([0.0, 1.0], requires_grad=True)
(p * p.log()).data                  # tensor([nan, 0.])
safe = torch.where(p > 0, p, 1.0)
y = torch.where(p > 0, safe * safe.log(), 0.0)
torch.autograd.grad(y.sum(), p)     # (tensor([0., 1.]),)
```

## Fix
1. Use a form that is defined there: `F.log_softmax`, `F.softplus`, or `torch.where` on the *input*
   of the operation, as in the example. `torch.special.xlogy(p, p)` is 0 at 0, and its gradient
   there is NaN. Cost: one line of code.
2. Of a missing value, put a number in its place before anything is computed of it, with the mask
   made first: `known = ~y.isnan(); y = y.nan_to_num()`. Cost: one line.
3. Find out why the value occurs: the report names the sample and its tokens.
   Cost: a look at the data.
4. Drop the sample or the micro-batch that has it. Cost: that data.
5. Where only float16 or bfloat16 rounds it there, keep that module in float32.
   Cost: its part in float32.

## Fix safety
Dropping data changes training; nanstop proves that the rest of the batch is left as it was, and
applies it only when allowed.

## Not to be confused with
NS201: finite in a wider format. NS202 (masked rows), NS205 (mean of nothing) and NS206 (zero norm)
are special cases with cures of their own. NS304: the forward pass is finite and the derivative is
not.

## References
- https://github.com/huggingface/trl/issues/2564
- https://github.com/huggingface/trl/pull/1491
- https://github.com/p-e-w/heretic/pull/348
"""

from __future__ import annotations

import math

from nanstop.diagnose.evidence.candidates import (
    Candidates,
    at_the_line,
    finite_entry,
    left_out,
    wider_before,
    without_rows,
)
from nanstop.diagnose.evidence.descent import (
    Operand,
    at_pole,
    is_below_0,
    kept_from_zero,
    of_weights,
    operand,
    outside_of,
    zero_divisor,
)
from nanstop.diagnose.evidence.hidden_choices import (
    hidden_advice,
    hidden_cause,
    hidden_title,
)
from nanstop.diagnose.evidence.reading import (
    WRITTEN,
    fails_in_loss,
    first_bad,
    foreign_kernel,
    in_float64,
    lost_eps,
    raised_message,
    raised_op,
    refuses_some,
    rounded_at,
    written_at,
)
from nanstop.diagnose.evidence.rule import Rule
from nanstop.diagnose.evidence.script_writes import writing_lines
from nanstop.records import Diagnosis, Evidence, OpEvent, TensorStats, op_name
from nanstop.records.formats import NARROW
from nanstop.records.values import entry_of
from nanstop.wording import number

_ALIGNMENTS = ("_ctc_loss", "_cudnn_ctc_loss")
_NO_PATH = (
    "a text has more labels than its frames can spell, with a blank between two that are equal"
)
_LEAVE_OUT = (
    "`zero_infinity=True` (in transformers `config.ctc_zero_infinity`) leaves such texts out"
)

_NO_CANCELLING = (
    "Let nothing cancel before it: `x.var()` in place of the mean of squares less the square of "
    "the mean, or float64 up to there."
)
_KEEP_FROM_0 = (
    "Keep that number from 0 where the program makes it: a schedule, a temperature, a count, an "
    "option."
)
_WITHIN_BOUNDS = (
    "Keep that number where the function has a value, where the program makes it: a share, a "
    "schedule, an option."
)
_FROM_0_ON = (
    "Keep it from 0 on where it is made: `F.softplus(x) + 1e-6` for what is learned, `x.var()` for "
    "the mean of squares less the square of the mean, `x.clamp(min=1e-12)` where only rounding "
    "takes it below."
)
_WITHIN_CHECK = (
    "Keep it within its bounds where it is made: `F.softplus(x) + 1e-6` for what has to be above "
    "0, `x.clamp(1e-6, 1 - 1e-6)` for a share."
)
_DIAGONAL = (
    "a matrix that is singular, or nearly so, usually gets something small on its diagonal: "
    "`A + 1e-4 * torch.eye(A.shape[-1])`, more than 1e-6 of its largest number in float32"
)


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if the first bad op is not finite in a wider format either."""
    late = left_out(evidence)
    if late and fails_in_loss(evidence):
        return _left_out_late(evidence, late)
    refused = raised_op(evidence)
    if refused is not None or refuses_some(evidence):
        return _refusal(evidence, refused)
    event, output = first_bad(evidence, WRITTEN)
    if event is None or output is None or foreign_kernel(event) or event.wider == "finite":
        return None
    if _is_brought_in(evidence):
        return None
    written = _written(evidence, event)
    if any(stats.nan for stats in event.inputs) and not written:  # every op hands a NaN on
        return None
    untested = event.wider == "unknown"
    if untested and output.dtype in NARROW:
        return None
    made = f"born here: {_made(evidence, event, output, written)}"
    return Diagnosis(
        code="NS204",
        title=_title(evidence, event, written),
        cause=", ".join((made, *_tested(evidence, event))),
        lines=(
            *of_weights(event),
            *lost_eps(evidence),
            *(in_float64(evidence) or _rounded_out(evidence, event)),
            *written_at(evidence),
            *writing_lines(evidence),
            *((_LEAVE_OUT,) if _does_not_fit(event) else ()),
        ),
        confidence="likely" if untested else "certain",
        remedies=_remedies(evidence, event),
        usual_cure=_usual(evidence, event),
        where=event.module,
    )


def _remedies(evidence: Evidence, event: OpEvent) -> Candidates:
    """Return what may cure the line. What is not 0 has no quotient by 0 that could be meant, and of
    what is hidden no result: the number, or the mask, itself is wrong.
    """
    if _over_the_number_0(event):
        return ()
    is_hidden = bool(hidden_advice(evidence)) and not any(one.nan for one in event.outputs)
    if is_hidden:
        return without_rows(evidence)
    return (*wider_before(evidence, event), *at_the_line(evidence))


def _left_out_late(evidence: Evidence, name: str) -> Diagnosis:
    """Return the finding of a value that is missing on purpose, and is left out of the loss by an
    operation that keeps a NaN.
    """
    return Diagnosis(
        code="NS204",
        title=f"NaN where `{name}` is left out",
        cause=f"the loss leaves out what is not finite in `{name}`: another number there gives the "
        "same loss and the same gradients. But 0 times NaN is NaN",
        confidence="certain",
        remedies=finite_entry(evidence),
        where=name,
    )


def _usual(evidence: Evidence, event: OpEvent) -> str:
    if _by_the_number_0(event):
        return _KEEP_FROM_0
    found = evidence.localization
    if found is not None and found.held_at is not None:
        return (
            f"Give {found.held_at.short} nothing that is 0, to divide by or to take a logarithm of."
        )
    if _rounded_out(evidence, event):
        return _NO_CANCELLING
    alone = operand(event, 0) if len(event.inputs) == 1 else None
    if alone is not None and alone.is_constant and outside_of(event):
        return _WITHIN_BOUNDS
    return hidden_advice(evidence) or _off_zero(event) or (_FROM_0_ON if is_below_0(event) else "")


def _off_zero(event: OpEvent) -> str:
    """Return what keeps from 0 what was divided by, or what a function has a pole at."""
    read = zero_divisor(event)
    is_nan = any(stats.nan for stats in event.outputs)
    if read is not None:
        return kept_from_zero(read, is_nan=is_nan)
    alone = operand(event, 0) if len(event.inputs) == 1 else None
    has_pole = alone is not None and alone.stats.zeros == sum(o.num_bad for o in event.outputs)
    if alone is None or not alone.stats.zeros or not has_pole or alone.is_a("probability"):
        return ""
    return kept_from_zero(alone)


def _by_the_number_0(event: OpEvent) -> bool:
    """Return whether something was divided by a 0 that is no tensor's."""
    return event.name == "div" and 0.0 in event.scalars


def _over_the_number_0(event: OpEvent) -> bool:
    """Return whether what is not 0 was divided by a 0 that is no tensor's."""
    is_infinite = any(one.posinf or one.neginf for one in event.outputs)
    return _by_the_number_0(event) and is_infinite


def _number_0(event: OpEvent) -> str:
    """Return what the line spells that is 0, and what its variables hold."""
    if len(event.zeros) != 1:
        return "the number 0 of the program"
    spelled = event.zeros[0]
    if [name for name, _ in spelled.of] == [spelled.text]:
        return f"`{spelled.text}`, which is the number 0"
    held = ", ".join(f"`{name}` is {number(value)}" for name, value in spelled.of)
    return f"`{spelled.text}`, which is the number 0: {held}"


def _does_not_fit(event: OpEvent) -> bool:
    """Return whether finite log-probabilities have no loss: then no path spells the text."""
    return event.name in _ALIGNMENTS and all(stats.finite for stats in event.inputs)


def _tested(evidence: Evidence, event: OpEvent) -> tuple[str, ...]:
    """Return what was seen of wider formats: what float64 has a value for is not said of any."""
    if event.wider == "unknown":
        return ("not repeated in a wider format",)
    found = evidence.localization
    has_value = found is not None and found.in_float64 == "finite"
    return () if has_value else ("for these inputs in any format",)


def _rounded_out(evidence: Evidence, event: OpEvent) -> tuple[str, ...]:
    """Return that only rounding took numbers to where a function has no value, where it did."""
    found = evidence.localization
    if found is None or found.in_float64 != "finite" or not outside_of(event):
        return ()
    return ("computed in float64, with all before it, it is finite: only rounding took it there",)


def _refusal(evidence: Evidence, event: OpEvent | None) -> Diagnosis:
    """Return the finding of an op that raised, or of a check that none is: its own message says
    what it was not given.
    """
    name = f"`{op_name(event.op)}` refuses its inputs" if event is not None else ""
    return Diagnosis(
        code="NS204",
        title=name or "finite numbers are refused by a check",
        cause=raised_message(evidence) or "it raised",
        confidence="certain" if event is not None else "likely",
        lines=(_DIAGONAL,) if event is not None and _is_square(event) else (),
        remedies=at_the_line(evidence),
        where=event.module if event is not None else "",
        usual_cure=_WITHIN_CHECK if event is None else "",
    )


def _is_square(event: OpEvent) -> bool:
    """Return whether an op of linear algebra was given finite square matrices."""
    shape = event.inputs[0].shape if event.inputs else ()
    is_finite = all(stats.finite for stats in event.inputs)
    square = len(shape) > 1 and shape[-1] == shape[-2]
    return "linalg" in event.name and is_finite and square


def _written(evidence: Evidence, event: OpEvent) -> str:
    """Return the number that is not finite and that the program itself writes here, or ""."""
    constants = [value for value in event.scalars if not math.isfinite(value)]
    if constants:
        return number(constants[0])
    found = evidence.localization
    bad = next((stats for stats in event.inputs if not stats.finite), None)
    if found is None or found.made is None or bad is None:
        return ""
    return "nan" if bad.nan else "inf" if bad.posinf else "-inf"


def _is_brought_in(evidence: Evidence) -> bool:
    """Return whether a line brings in what was computed before it, where no operation is seen."""
    found = evidence.localization
    return found is not None and found.made is not None and not found.is_written


def _title(evidence: Evidence, event: OpEvent, written: str) -> str:
    # A function that a line calls may write it: `torch.logdet` of a determinant below 0.
    found, hidden = evidence.localization, hidden_title(evidence, event)
    if hidden:
        return hidden
    if not written or found is None or "loss" not in found.reaches:
        return f"`{op_name(event.op)}` is undefined for its inputs"
    if not found.is_written and found.made is None:
        return f"{written} that the line does not spell reaches the loss"
    return f"{written} of the program reaches the loss"


def _made(evidence: Evidence, event: OpEvent, output: TensorStats, written: str) -> str:
    """Return what came out of what; an operand from outside may be the culprit."""
    kind = "NaN" if output.nan else "Inf"
    if any(not math.isfinite(value) for value in event.scalars):
        return f"{kind} from the constant {written}"
    if written:
        return f"{kind} from {written} that the program writes"
    if _by_the_number_0(event):
        return f"{kind} from a division by {_number_0(event)}"
    divisor = zero_divisor(event)
    if divisor is not None:
        was = "was rounded to 0" if rounded_at(evidence) else "is 0"
        return f"{kind} from a division by {_meaning(divisor)} that {_where(divisor, was)}"
    given = [stats for stats in event.inputs if not stats.finite]
    outside = outside_of(event) if output.nan and not given else ""
    if outside:
        return f"{kind} from {outside}"
    if _does_not_fit(event) or hidden_cause(evidence):
        return f"{kind}: {hidden_cause(evidence) or _NO_PATH}"
    return f"{kind} from an Inf that it reads" if given else _of_finite(event, kind)


def _of_finite(event: OpEvent, kind: str) -> str:
    """Return what came out of finite numbers that no other sentence knows."""
    if pole := at_pole(event):
        return f"{kind} from {pole}"
    empty = next(
        (one.name for one in event.inputs if one.name and one.shape and not one.absmax), ""
    )
    if empty:
        return f"{kind} from finite inputs: `{empty}` is 0 throughout"
    least = min((stats.minimum or 0.0 for stats in event.inputs), default=0.0)
    below = f", the least of them {number(least)}" if least < 0.0 else ""
    zeros = event.inputs[0].zeros if len(event.inputs) == 1 else 0
    if zeros and zeros == sum(one.num_bad for one in event.outputs):
        return f"{kind} from finite inputs where they are 0"
    return f"{kind} from finite inputs{below}"


def _meaning(divisor: Operand) -> str:
    """Return what a divisor is, as far as it descends from anything."""
    if divisor.is_a("probability"):
        return "a sum of weights" if divisor.is_a("total") else "a probability"
    if divisor.stats.name:
        return f"`{entry_of(divisor.stats.name)}`"
    return "a number of the program" if divisor.is_constant else "a value"


def _where(divisor: Operand, was: str) -> str:
    """Return what a divisor ``was``, and of one with a name in how many of its elements."""
    zeros, num = divisor.stats.zeros, math.prod(divisor.stats.shape)
    return f"{was} in {zeros} of {num} elements" if divisor.stats.name and num > 1 else was


RULE = Rule(
    "NS204",
    "invalid-operation",
    "operation undefined for its inputs",
    check,
    ("incident",),
    yields_to=(
        *("NS118", "NS202", "NS203", "NS205", "NS206", "NS207"),
        *("NS404", "NS502", "NS503", "NS506", "NS602"),
    ),
    beside=("NS108", "NS504"),
)
