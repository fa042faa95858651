"""The derivative is undefined where the function is not.

## What happened
The loss is finite. In the backward pass an operation made NaN or Inf, and does so in a wider format
too.

## Why it happens
sqrt(0) = 0, but its derivative is 1 / (2 sqrt(0)) = Inf. `torch.where(x > 0, sqrt(x), x)` selects
the finite branch in the forward pass; the backward pass multiplies the other branch's gradient by
0, and 0 x NaN = NaN. So is exp(100) = Inf in a branch that is never used: 0 x Inf = NaN.
`nan_to_num` on a loss repairs the number in the log, and backward multiplies its gradient of 0 by
the derivative: 0 x Inf is NaN for sqrt(0) and 0 / 0; for log(-1), or a cross-entropy without
labels, it is 0, and the step teaches nothing. The derivative of eigenvectors (`torch.linalg.eigh`,
`svd`) divides by the differences of eigenvalues or singular values: equal ones have none. The
backward of an `autograd.Function` is a formula that somebody wrote: one that divides by a norm
which the forward clamps fails where the function has a derivative. A missing value that is marked
by NaN, and masked after the difference to the target was squared, has the derivative 0 x NaN, too:
`torch.where(known, (p - y) ** 2, 0)`.

## Example
```python
import torch

x = torch.tensor([-1.0, 4.0], requires_grad=True)
y = torch.where(x > 0, x.sqrt(), x)
torch.autograd.grad(y.sum(), x)     # (tensor([nan, 0.2500]),)

safe = torch.where(x > 0, x, 1.0)
y = torch.where(x > 0, safe.sqrt(), x)
torch.autograd.grad(y.sum(), x)     # (tensor([1.0000, 0.2500]),)
```

## Fix
1. Make the *input* of the operation safe:
   `torch.where(x > 0, x, 1.0).sqrt()` inside the `where`. Cost: one more select.
2. Of a missing value, put a number in its place before anything is computed of it, with the mask
   made first: `known = ~y.isnan(); y = y.nan_to_num()`. Cost: one line.
3. Move away from the singular point: `(x + eps).sqrt()`. Cost: a bias of up to sqrt(eps), and a
   derivative of 1 / (2 sqrt(eps)) at 0: for 1e-6 that is 0.001 and 500, for 1e-12 1e-6 and 500000.
   `F.normalize` with its eps of 1e-12 has a derivative of 1e12 at 0 (NS206).
4. Drop the sample or micro-batch that reaches the point. Cost: that data.

## Fix safety
Dropping data changes training; it is applied only when allowed.

## Not to be confused with
NS301: the gradient is finite in a wider format. More precision, bfloat16, loss scaling and clipping
do not help here. Anomaly mode names the operation whose *backward* failed, which may be the
consumer of an earlier NaN.

## References
- https://github.com/pytorch/pytorch/issues/68425
- https://github.com/pytorch/pytorch/issues/187297
- https://github.com/MakazhanAlpamys/Soup/issues/342
"""

from __future__ import annotations

from nanstop.diagnose.evidence.candidates import at_the_line, finite_entry, left_out
from nanstop.diagnose.evidence.descent import CLAMPED_EXPONENT, zero_divisor
from nanstop.diagnose.evidence.reading import (
    bad_kinds,
    fails_in_loss,
    first_bad,
    foreign_kernel,
    reached,
    rounded_at,
    written_at,
)
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Diagnosis, Evidence, OpEvent, op_kind, op_name
from nanstop.records.formats import NARROW
from nanstop.records.vocabulary import EXPONENTIALS
from nanstop.wording import listed

_DIVISORS = {
    "_linalg_eigh": "the differences of the eigenvalues",
    "linalg_eig": "the differences of the eigenvalues",
    "_linalg_svd": "the singular values, their sums and their differences",
}
"""What the derivatives of decompositions divide by (torch.linalg's pages on eigh, eig and svd)."""
_APART = (
    "keep these apart, as by small distinct numbers on the diagonal of the matrix, or use nothing "
    "that hangs on single vectors of equal values"
)

_GUARDED = "where its forward guards against such numbers, its backward has to do so too"


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if the first bad op is in the backward pass and more bits do not help."""
    late = left_out(evidence)
    if late and not fails_in_loss(evidence):
        return _left_out_late(evidence, late)
    event, output = first_bad(evidence, ("backward",))
    if event is None or output is None or foreign_kernel(event) or event.wider == "finite":
        return None
    if event.is_of_hook:  # what a hook computes is no derivative
        return None
    untested = event.wider == "unknown"
    if untested and output.dtype in NARROW:
        return None
    spoiled = reached(evidence.localization)
    of = f" of `{op_name(event.forward_op)}`" if event.forward_op else ""
    what = "backward" if event.is_of_function else "derivative"
    return Diagnosis(
        code="NS304",
        title=f"{what}{of} is undefined in `{op_name(event.op)}`",
        cause=_cause(event, rounded_at(evidence)),
        confidence="likely" if untested else "certain",
        lines=(
            *rounded_at(evidence),
            *written_at(evidence),
            *((f"reaches the gradient of {listed(spoiled)}",) if spoiled else ()),
            *((_APART,) if _equal_values(event) else ()),
            *((_GUARDED,) if event.is_of_function else ()),
        ),
        remedies=at_the_line(evidence),
        usual_cure=CLAMPED_EXPONENT if _is_exponential_beyond(event) else "",
        where=event.module,
    )


def _left_out_late(evidence: Evidence, name: str) -> Diagnosis:
    """Return the finding of a value that is missing on purpose, and is left out of the loss after
    it was computed with.
    """
    spoiled = reached(evidence.localization)
    return Diagnosis(
        code="NS304",
        title=f"0 times NaN in the derivative: `{name}` is left out too late",
        cause=f"the loss leaves out what is not finite in `{name}`: another number there gives the "
        "same loss and the same gradients. What was computed of it before has a derivative that is "
        "not finite, and 0 times NaN is NaN",
        confidence="certain",
        lines=(f"reaches the gradient of {listed(spoiled)}",) if spoiled else (),
        remedies=finite_entry(evidence),
        where=name,
    )


def _is_exponential_beyond(event: OpEvent) -> bool:
    """Return whether the forward op is an exponential that came to Inf."""
    is_exponential = op_kind(event.forward_op or "") in EXPONENTIALS
    return is_exponential and any(stats.posinf for stats in event.forward_outputs)


def _equal_values(event: OpEvent) -> str:
    """Return what a decomposition's derivative divides by where that is 0, "" for anything else."""
    divides = _DIVISORS.get(op_name(event.forward_op)) if event.forward_op else None
    return divides if divides is not None and zero_divisor(event) is not None else ""


def _cause(event: OpEvent, rounded: tuple[str, ...]) -> str:
    """Return what the forward op came to, whose derivative has no value. ``rounded``: says what
    made the 0 that it has no value at of what is not 0.

    A loss that leaves an infinity out (a choice, a saturated function) is finite all the same, and
    a wider format may hold what this one does not: repeating the derivative does not tell.
    """
    made = next((stats for stats in event.forward_outputs if not stats.finite), None)
    if event.is_of_function:
        return _own_formula(event, rounded)
    if made is not None:
        kinds = " and ".join(bad_kinds(made))
        return (
            f"{_forward(event)} came to {kinds} in the forward pass already: "
            "its derivative there has no value"
        )
    if any(not stats.finite for stats in event.inputs):
        return "its derivative reads what is not finite already"
    if event.wider == "unknown":
        return f"{_forward(event)} is finite, its derivative is not; not repeated in a wider format"
    if equal := _equal_values(event):
        return f"{_forward(event)} is finite; its derivative divides by {equal}, and some are 0"
    finite = f"{_forward(event)} is finite, its derivative is not"
    if rounded:
        return f"{finite} where it meets a number that was rounded to 0"
    return f"{finite}; no wider format has one for these numbers either"


def _own_formula(event: OpEvent, rounded: tuple[str, ...]) -> str:
    """Return what is known of a backward that somebody wrote down: whether the function has a
    derivative there is another question.
    """
    if any(not stats.finite for stats in event.inputs):
        return "its own backward reads what is not finite already"
    if rounded:
        return "the formula of its own backward meets a number that was rounded to 0"
    formula = f"the formula of its own backward has no value in {event.outputs[0].dtype}"
    return f"{formula} or a wider format" if event.wider == "nonfinite" else formula


def _forward(event: OpEvent) -> str:
    """Return what was seen to be finite, or not."""
    if event.forward_op and event.forward_outputs:
        return f"`{op_name(event.forward_op)}`"
    return "the loss"


RULE = Rule(
    "NS304",
    "backward-singularity",
    "derivative undefined where the function is not",
    check,
    ("incident",),
    yields_to=("NS404", "NS602"),
    beside=("NS108",),
)
