"""Division by the norm or scale of a row that is all zero.

## What happened
A tensor was divided by another one that holds zeros:
the norm, the scale or the maximum of rows of which some are 0.

## Why it happens
x / |x| for x = 0 is 0 / 0 = NaN. Rows of zeros are common: padded tokens, new tokens (NS103),
pruned channels. DoRA divides its magnitude by the norm of each row of W + BA, and B starts at 0: a
zero row of W is 0 / 0 before the first step. A float8 scale of 448 / max(|row|) is 448 / 0 = Inf.
One zero row among 32000 is enough. A layer norm or batch norm whose eps is 0 does the same with a
row that does not vary. Where a kernel divides by norms inside of itself (weight norm), that is
shown by its being finite once each row of zeros has one entry.

## Example
```python
import torch

x = torch.zeros(3, requires_grad=True)
(x / x.norm()).data                 # tensor([nan, nan, nan])
torch.nn.functional.normalize(x, dim=0).sum().backward()
x.grad                              # tensor([1.0000e+12, 1.0000e+12, 1.0000e+12])

empty = (x == 0).all()
safe = torch.where(empty, torch.ones_like(x), x)
y = torch.where(empty, 0.0, safe / safe.norm())
torch.autograd.grad(y.sum(), x)     # (tensor([0., 0., 0.]),)
```

## Fix
1. Keep zero rows out of the division: `torch.where(x == 0, 0, x / norm)` is not enough (NS304);
   replace the *row* before its norm is taken, as in the example. Cost: one line.
2. Put a floor under the norm that suits gradients too: `x / x.norm(dim=-1,
   keepdim=True).clamp(min=1e-3)`, in float32. A zero row then is 0, and what comes to it is divided
   by the floor: with 1e-12, the default of `F.normalize`, its gradient is 1e12, in float16 NaN;
   with 1e-7 it is 1e7, in float16 Inf. Cost: rows shorter than the floor are not of length 1.
3. Initialise the zero rows (NS103). Cost: none.
4. Drop the sample that has such a row. Cost: that sample.

## Fix safety
Initialising rows and dropping data change training; they are applied only when allowed.

## Not to be confused with
NS205: a single count that is 0. NS304:
0 / |0| is avoided in the forward pass and the derivative of the norm is not.

## References
- https://github.com/huggingface/peft/issues/2049
- https://github.com/huggingface/peft/pull/3237
- https://github.com/KohakuBlueleaf/LyCORIS/pull/166
"""

from __future__ import annotations

import math

from nanstop.diagnose.evidence.candidates import Candidates, at_the_line, initialised, islands
from nanstop.diagnose.evidence.descent import Operand, without_zeros, zero_divisor
from nanstop.diagnose.evidence.reading import WRITTEN, first_bad, lost_eps, standing
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Change, Diagnosis, Evidence, OpEvent, op_name
from nanstop.records.formats import HALF
from nanstop.wording import listed, number

_LAYERS = frozenset(
    {"native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit"}
    | {"_fused_rms_norm"}
)
_TITLES = {
    "norm": "division by a norm of 0",
    "deviation": "division by a deviation of 0",
    "range": "division by a range of 0",
    "magnitude": "division by a magnitude of 0",
}
_OF = {
    "norm": "norms or deviations of what does not vary or is all zero",
    "deviation": "deviations of what does not vary",
    "range": "largest values or ranges of what does not vary or is all zero",
}
_OF_HALF = "norms or deviations of what does not vary, is all zero, or has squares that round to 0"
_EPS = "Give it `eps=1e-5` where the layer, or its call, is made"
_ABOVE_0 = (
    "Add a small number to the deviation, `x.std() + 1e-8`: what does not vary is 0 then. "
    "Where it is the root of a variance that a gradient comes through, add it under the root."
)
_NOT_ZERO = "begin these rows with another value than 0, or put an epsilon under their norm"


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if the first bad op divides by a norm, deviation or range of 0."""
    event, output = first_bad(evidence, WRITTEN)
    if event is None or output is None or event.wider == "finite":
        return None
    divisor, advice, title = zero_divisor(event), (), "division by a norm of 0"
    usual = _ABOVE_0 if divisor is not None and divisor.is_a("deviation") else ""
    if divisor is not None and divisor.is_a("norm", "extreme", "magnitude", "square"):
        cause, title = _cause(event, divisor), _TITLES[_kind(divisor)]
    elif _is_layer_without_eps(event):
        cause = (
            f"`{op_name(event.op)}` divides by the deviation of what does not vary, or is all zero,"
            f" and its eps is {number(event.scalars[-1])}: 1e-5 keeps it from 0"
        )
    elif (zeros := _rows_of_zeros(event)) is not None:
        name = event.inputs[zeros].name
        cause = (
            f"`{op_name(event.op)}` divides by the norms of rows, and rows of "
            f"{f'`{name}`' if name else 'what it reads'} are 0 throughout"
        )
        advice = (_NOT_ZERO,)
    else:
        return None
    return Diagnosis(
        code="NS206",
        title=title,
        cause=cause,
        confidence="certain",
        lines=(*lost_eps(evidence), *_eps_of_0(event), *advice),
        remedies=(
            *_wider(event, evidence),
            *_zero_tables(evidence),
            *at_the_line(evidence),
        ),
        usual_cure=_EPS if _is_layer_without_eps(event) else usual,
        where=event.module,
    )


def confirm(evidence: Evidence) -> Change | None:
    """Return the norm of 1 that the division must be finite with, or a variation that leaves no
    deviation of 0.
    """
    event, _ = first_bad(evidence, WRITTEN)
    if event is not None and _is_layer_without_eps(event):
        return Change(kind="vary", operand=0)
    zeros = _rows_of_zeros(event) if event is not None else None
    if zeros is not None:
        return Change(kind="fill_rows", operand=zeros)
    return without_zeros(event) if event is not None else None


def _rows_of_zeros(event: OpEvent) -> int | None:
    """Return the place of the input that has as many zeros as there are NaN in a result of its
    shape, where nothing else says why: whether these are rows and their norms is for the experiment
    to say.
    """
    if event.divisor is not None or not all(stats.finite for stats in event.inputs):
        return None
    bad = next((one for one in event.outputs if one.nan and not one.posinf + one.neginf), None)
    alike = (
        place
        for place, read in enumerate(event.inputs)
        if bad is not None and len(read.shape) > 1 and read.shape == bad.shape
        if 1 < bad.nan <= read.zeros
    )
    return next(alike, None)


def _is_layer_without_eps(event: OpEvent) -> bool:
    """Return whether a layer norm, batch norm or the like has made the inverse of a deviation of 0,
    its last result.
    """
    finite = all(stats.finite for stats in event.inputs)
    is_layer = event.name in _LAYERS and bool(event.scalars)
    return finite and is_layer and len(event.outputs) > 1 and event.outputs[-1].posinf > 0


def _cause(event: OpEvent, divisor: Operand) -> str:
    """Return how many norms are 0, and what kind of norm they are."""
    zeros, total = divisor.stats.zeros, math.prod(divisor.stats.shape)
    kind, op = _kind(divisor), op_name(event.op)
    if not divisor.is_a("norm", "extreme"):
        if divisor.is_a("magnitude"):
            return f"{zeros} of the {total} magnitudes that `{op}` divides by are 0"
        return f"{zeros} of the {total} squares that `{op}` divides by are 0"
    of = _OF_HALF if divisor.stats.dtype == "float16" and kind == "norm" else _OF[kind]
    if total == 1:
        return f"the denominator of `{op}` is 0: {of}"
    return f"`{op}` divides by 0 in {zeros} of {total} places: {of}"


def _kind(divisor: Operand) -> str:
    if divisor.is_a("extreme"):
        return "range"
    if not divisor.is_a("norm"):  # of each number by itself
        return "magnitude"
    return "deviation" if divisor.is_a("deviation") else "norm"


def _eps_of_0(event: OpEvent) -> tuple[str, ...]:
    """Return which variable that its line adds is 0: it is there to keep the norm from 0."""
    names = [name for added in event.zeros for name, value in added.of if value == 0.0]
    if event.name == "div" or not names:
        return ()
    return (f"its line adds {listed(names)}, which is 0: 1e-6 is usual",)


def _wider(event: OpEvent, evidence: Evidence) -> Candidates:
    """Return islands for a half-precision denominator that may not be 0 in float32."""
    place = event.divisor
    half = place is not None and event.inputs[place].dtype in HALF
    return islands(event, standing(evidence)) if half else ()


def _zero_tables(evidence: Evidence) -> Candidates:
    return tuple(
        (initialised(rows, "mean"),) for rows in standing(evidence).token_rows if rows.zero_rows
    )


RULE = Rule(
    "NS206",
    "zero-norm-division",
    "division by a norm of 0",
    check,
    ("incident",),
    confirm=confirm,
)
