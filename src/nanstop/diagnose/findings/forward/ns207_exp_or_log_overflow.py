"""exp or log leaves the range although a stable form exists.

## What happened
An exponential, or what grows as one does (`i0`), exceeded the range of float32, or what was
multiplied with one that had nearly done so did; or a logarithm met an exact 0 that is a rounded
probability.

## Why it happens
float32 ends at 3.4e38 = exp(88.72): exp(89) is Inf. A log-ratio summed over 200 tokens of 0.5 each
is 100. The other way round, 1 - exp(logp) is 0 as soon as logp > -3e-8, because float32 keeps 24
bits, and log(0) = -Inf. In both cases the quantity that is wanted afterwards is an ordinary number;
only the way to it leaves the range.

## Example
```python
import torch

logp = torch.tensor(-1e-9, requires_grad=True)
torch.log1p(-torch.exp(logp)).item()          # -inf
y = torch.log(-torch.expm1(logp))
y.item()                            # -20.723...
torch.autograd.grad(y, logp)        # (tensor(-1.0000e+09),)
```

## Fix
1. Use the stable form: `F.log_softmax`, `F.logsigmoid`, `torch.logsumexp`, `torch.expm1`, or
   log(-expm1(x)) in place of log1p(-exp(x)) where x is above -0.69; below, log1p(-exp(x)) is the
   exact one, and at -20 the other is 0, without a gradient. Of a running sum it is
   `torch.logcumsumexp`, of a normal's tail `torch.special.log_ndtr`, of `i0(x).log()`
   `i0e(x).log() + x`; a softmax by `index_add` takes away the largest of each group first.
   Cost: one line.
2. Clamp the *argument* of exp where the objective allows it (a ratio clipped at 10 anyway).
   Cost: no gradient there.
3. Drop the sample or micro-batch that reaches it. Cost: that data.

## Fix safety
Dropping data changes training; it is applied only when allowed.
An eps inside the logarithm biases the loss.

## Not to be confused with
NS201: the format is narrow and float32 is enough. NS204:
the logarithm of a negative number has no stable form.

## References
- https://github.com/huggingface/trl/issues/2564
- https://github.com/huggingface/trl/pull/6549
- https://github.com/NVIDIA-NeMo/RL/issues/874
- https://github.com/MakazhanAlpamys/Soup/issues/342
"""

from __future__ import annotations

from nanstop.diagnose.evidence.candidates import at_the_line, wider_before
from nanstop.diagnose.evidence.descent import (
    CLAMPED_EXPONENT,
    MODEST_EXPONENT,
    kept_from_zero,
    operand,
)
from nanstop.diagnose.evidence.reading import (
    WRITTEN,
    first_bad,
    in_float64,
    limit,
    lost_eps,
    rounded_at,
)
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Change, Diagnosis, Evidence, OpEvent, TensorStats, op_name
from nanstop.records.formats import NARROW, SMALLEST
from nanstop.records.vocabulary import EXPONENTIALS
from nanstop.wording import number

BOUND = (
    "a log-variance, a log-scale or a log-rate is usually bounded before: `.clamp(max=20)`, or "
    "whichever bound the model allows"
)
_FAR = 1e5
"""Of no larger number a power that is usual leaves float32: what does grows as an exponential."""
_FOLLOWED = frozenset({"sum", "mean", "div", "reciprocal", "log", "log1p", "cumsum", "logsumexp"})
_OF_SCALES = "softplus"
"""What scales and variances are made by: it is above 0, and rounded to 0 of numbers far below."""
LOGARITHMS = ("log", "log1p", "log2", "log10", "xlogy")


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if an exp or log gave Inf first, in a format that is not narrow."""
    event, output = first_bad(evidence, (*WRITTEN, "backward"))
    if event is None or output is None or output.nan:
        return None
    if event.phase == "backward" and event.name not in EXPONENTIALS:
        return None  # what is exponentiated there is a derivative that somebody wrote
    if output.dtype in NARROW and event.wider != "nonfinite":
        return None
    found = evidence.localization
    if found is not None and found.exploded is not None:
        return _multiplied(evidence, event, found.exploded, output)
    rounded = found.vanished if found is not None and rounded_at(evidence) else None
    cause = _cause(event, output, rounded)
    if cause is None:
        return None
    return Diagnosis(
        code="NS207",
        title=f"`{op_name(event.op)}` leaves the range of {output.dtype}",
        cause=cause,
        confidence="certain",
        lines=(*lost_eps(evidence), *_beyond(evidence, event, output), *_bound(event)),
        remedies=(*wider_before(evidence, event), *at_the_line(evidence)),
        usual_cure=_usual(event, rounded),
        where=event.module,
    )


def _usual(event: OpEvent, rounded: OpEvent | None) -> str:
    """Return what is usual where there is no stable form: the number itself is 0, or too large."""
    if _bound(event):
        return CLAMPED_EXPONENT
    read = operand(event, _place(event))
    if event.name not in LOGARITHMS or event.name == "log1p":
        return ""
    if rounded is not None and rounded.name != _OF_SCALES:  # its logarithm has a stable form
        return ""
    if read is None or read.is_a("probability") or not read.stats.zeros:
        return ""
    return kept_from_zero(read)


def _multiplied(
    evidence: Evidence, event: OpEvent, made: OpEvent, output: TensorStats
) -> Diagnosis:
    """Return the finding where an exponential ends within its format, and a product with it does
    not.
    """
    read, large = operand(made, 0), max(stats.absmax for stats in made.outputs)
    of = f" of {_argument(made, read.stats)}" if read is not None else ""
    return Diagnosis(
        code="NS207",
        title=f"what `{op_name(made.op)}` makes leaves the range of {output.dtype}",
        cause=(
            f"`{op_name(made.op)}` makes {number(large)}{of}; what is multiplied with it ends "
            f"beyond {limit(output.dtype)}"
        ),
        confidence="likely",
        lines=(*_beyond(evidence, event, output),),
        remedies=at_the_line(evidence),
        where=event.module,
    ).at(made.source if made.source != event.source else None)


def confirm(evidence: Evidence) -> Change | None:
    """Return the argument within range that the op must be finite with."""
    event, _ = first_bad(evidence, (*WRITTEN, "backward"))
    found = evidence.localization
    if event is None or not event.inputs or (found is not None and found.exploded is not None):
        return None
    if event.name in EXPONENTIALS or event.name not in LOGARITHMS:
        return Change(kind="bound", operand=0, value=MODEST_EXPONENT)
    if event.name == "log1p":
        return Change(kind="bound", operand=0, value=0.5)
    place = _place(event)
    return Change(kind="raise_zeros", operand=place, value=_least(event.inputs[place].dtype))


def _place(event: OpEvent) -> int:
    """Return the place of what an exponential or a logarithm is of."""
    return 1 if event.name == "xlogy" and len(event.inputs) > 1 else 0


def _least(dtype: str) -> float:
    return SMALLEST.get(dtype, SMALLEST["float32"])


def _cause(event: OpEvent, output: TensorStats, rounded: OpEvent | None) -> str | None:
    read = operand(event, _place(event))
    if read is None:
        return None
    if event.name in EXPONENTIALS or _grows(event, output, read.stats):
        return f"{_argument(event, read.stats)}; {output.dtype} ends at {limit(output.dtype)}"
    if event.name not in LOGARITHMS:
        return None
    if event.name == "log1p":
        return "the logarithm of -1 + 1, an exact 0"
    if event.name == "xlogy" and not read.stats.zeros:
        return None
    what = "probability" if read.is_a("probability") else "number"
    if rounded is not None:
        return f"the logarithm of a {what} that was rounded to exactly 0"
    return "the logarithm of an exact 0" if what == "number" else f"the logarithm of a {what} of 0"


def _grows(event: OpEvent, output: TensorStats, read: TensorStats) -> bool:
    """Return whether a function of one number may grow as an exponential does, beyond its format.
    One that has no value there has none for a smaller number either: an experiment tells.
    """
    is_alone = len(event.inputs) == 1 and not event.scalars and event.op.endswith(".default")
    is_alone = is_alone and read.shape == output.shape
    is_far = read.finite and MODEST_EXPONENT < read.absmax < _FAR
    return event.name not in LOGARITHMS and is_alone and is_far


def _argument(event: OpEvent, read: TensorStats) -> str:
    """Return the largest argument. Of more than its size is known only where that is its own: the
    exponential of a large negative number is 0.
    """
    lowest = -(read.minimum or 0.0)
    if event.name not in ("sinh", "cosh") and lowest >= read.absmax:
        return "an argument too large"
    return f"an argument of up to {number(read.absmax)}"


def _beyond(evidence: Evidence, event: OpEvent, output: TensorStats) -> tuple[str, ...]:
    """Return what more bits do, as the repetition of the op in them showed, and of all before."""
    found = evidence.localization
    exact = found.in_float64 if found is not None else "unknown"
    if event.wider == "nonfinite" and exact == "nonfinite":
        return ("no wider format has a value for these numbers either",)
    if event.wider == "nonfinite":
        return in_float64(evidence)
    is_exponential = event.name in EXPONENTIALS
    if is_exponential and event.wider == "finite" and output.dtype == "float32":
        return ("finite in float64, whose exponential ends at an argument of 709",)
    return ()


def _bound(event: OpEvent) -> tuple[str, ...]:
    """Return what is typed for an exponential that is wanted as it is, of what a model makes: no
    logarithm, sum or quotient follows that a stable form could take it into.

    Where sums are exponentiated a bound bends what float64 has a value for.
    """
    read = operand(event, 0)
    if event.name != "exp" or read is None or not event.read_by:
        return ()
    if not read.is_a("parameter") or read.is_a("total", "log_probability", "log_ratio"):
        return ()
    return () if _FOLLOWED.intersection(event.read_by) else (BOUND,)


RULE = Rule(
    "NS207",
    "exp-or-log-overflow",
    "exp or log leaves the range",
    check,
    ("incident",),
    yields_to=("NS702",),
    beside=("NS404", "NS504"),
    confirm=confirm,
)
