"""A variable or a constant of the script is not finite.

## What happened
A tensor that no operation of the step makes holds NaN or Inf: weights of classes, a `pos_weight`, a
mean or deviation to normalise with, a mask, a temperature, a buffer of the model. It was made
before the step, and each loss that is computed with it fails. The data of the batch is finite.

## Why it happens
A state of the script is one, too: a running mean of losses or rewards, a baseline, a hidden state.
It takes up something of each step; one step that is not finite stays in it, and every later one
fails with it, the update skipped or not. Such a variable has a new value by the time of the
failure; it is known by the line that reads it and by that which gives it the next one ("likely").

The formula that made it met a case that it has no value for. Balanced class weights are the number
of samples over the number of each class: a class that the training split does not hold has 5 / 0 =
inf, and a count of 0 over 0 is NaN. The deviation of one value, or of a column with a missing one,
is NaN. One NaN among the weights of 1000 classes makes the loss NaN as soon as one sample has that
class; an additive mask of -inf that no softmax follows makes it -inf at once.

## Example
```python
import torch

counts = torch.tensor([5.0, 3.0, 0.0])
weights = counts.sum() / counts
weights.tolist()                                  # [1.600000023841858, 2.6666667461395264, inf]
weights.nan_to_num(posinf=0.0).isfinite().all()   # tensor(True)
```

## Fix
1. Mend the line that makes the variable, or what that line reads: the report names it. Of a missing
   value (NaN), mend the data; count with `clamp(min=1)`, leave out what has no samples, mask with a
   large finite number. Cost: one line of code.
2. Keep what is not finite out of a running value:
   `if torch.isfinite(loss): mean = 0.9 * mean + 0.1 * loss.detach()`. Cost: one read a step.
3. Say `assert constant.isfinite().all()` where it is made, so that it fails there. Cost: one line,
   and one pass over the constant.

## Fix safety
Other weights are another objective. Where another number in place of what is not finite makes no
difference (a mask's -Inf that is multiplied by 0, the weight of a class that has no sample), the
constant can be read with one: it is proven with two numbers that come to the same, and applied only
with `--allow finite_constant`. Where it makes one, nanstop changes nothing.

## Not to be confused with
NS501: the bad value comes with the batch, and other batches are good. NS401: a parameter of the
model is not finite. NS204: the step itself computes the bad value.

## References
- https://pytorch.org/docs/stable/generated/torch.nn.BCEWithLogitsLoss.html
- https://pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html
"""

from __future__ import annotations

from nanstop.diagnose.evidence.candidates import (
    at_the_line,
    finite_constant,
    finite_entry,
    left_out,
    mended_at_source,
)
from nanstop.diagnose.evidence.reading import bad_counts
from nanstop.diagnose.evidence.rule import Rule
from nanstop.diagnose.evidence.script_writes import unmade_at, warned_before
from nanstop.records import (
    Diagnosis,
    Evidence,
    Localization,
    OpEvent,
    SourceLine,
    TensorStats,
)


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if what failed goes back to a tensor of the script that no op of the step
    has made.
    """
    found = evidence.localization
    if found is None or left_out(evidence):
        return None
    is_read = _is_read_here(found)
    if not is_read and found.origin not in ("from_constant", "carried_over", "from_buffer"):
        return None
    culprit, made = (found.held_in, found.held_at) if is_read else (found.culprit, found.made)
    name = f"`{culprit}`" if culprit else "a variable"
    operand = _operand(found)
    held = f"{name} holds {bad_counts(operand)}" if operand is not None else f"{name} is not finite"
    if found.origin == "carried_over":
        return _carried(found, name, held)
    if found.origin == "from_buffer":
        return _buffer(evidence, found, name, held)
    before = is_read or found.made_before
    since = "it was so before the step" if before else "nothing that was run again has made it so"
    title = f"state of the script not finite: {name}"
    if made is not None and before:
        is_constant = found.is_written and not is_read
        title = f"constant not finite: {name}" if is_constant else f"variable not finite: {name}"
    tried = at_the_line(evidence) if is_read else finite_constant(evidence)
    tried = (*finite_entry(evidence), *tried)
    return Diagnosis(
        code="NS506",
        title=title,
        cause=f"{held}; {since}",
        confidence="certain",
        lines=(
            *(_given(found, made, before=before) if made is not None else ()),
            *unmade_at(evidence),
            *(warned_before(evidence) if before else ()),
        ),
        where=culprit or "",
        remedies=tried if before else (),
        usual_cure=_usual_cure(evidence, found, name, made),
        at_source=mended_at_source(evidence),
    )


def _given(found: Localization, made: SourceLine, *, before: bool) -> tuple[str, ...]:
    if found.unmade_at == made:
        return ()  # which was seen, and is said
    if _is_elsewhere(found, made):
        said = f"made at {made.short}: `{made.text}`"
        return (said if before else f"given its values at {made.short}: `{made.text}`",)
    if before:
        return (f"made in line {made.line}: `{made.text}`",)
    return (f"given its values in line {made.line}: `{made.text}`",)


def _is_elsewhere(found: Localization, made: SourceLine) -> bool:
    """Return whether a line is of another file than the one that fails."""
    source = found.first_bad.source if found.first_bad is not None else None
    return source is not None and source.file != made.file


_BY_ROWS = ("index", "index_select", "embedding", "take", "slice", "select")
"""Operations that only take rows out of what they read."""


def _usual_cure(evidence: Evidence, found: Localization, name: str, made: SourceLine | None) -> str:
    """Return what to look at: at the rows of data, or at what makes the variable."""
    event, operand = found.first_bad, _operand(found)
    line, warned = "the line that makes it", _warned_at(evidence)
    if warned is not None and found.unmade_at is None:
        made = warned
    if made is not None:
        line = made.short if _is_elsewhere(found, made) else f"line {made.line}"
    is_buffer = operand is not None and (operand.name or "").startswith("buffer ")
    if event is not None and event.name in _BY_ROWS and _takes_rows(event) and not is_buffer:
        facts = evidence.incident.batch if evidence.incident is not None else ()
        rows = next((one.bad_rows for one in facts if one.name == found.culprit), ())
        where = f" (row {rows[0]} is one)" if rows else ""
        if made is not None and not found.is_written and operand is not None and not operand.nan:
            return (
                f"An infinity comes of a division by 0 or a logarithm of 0 in {line}{where}: leave "
                "these rows out, or give that line nothing that is 0."
            )
        return (
            f"The step reads {name} by rows, as data: repair the rows that are not finite at their "
            f"source, or leave them out{where}."
        )
    if found.unmade_at is not None and found.unmade_at != made:
        return (
            f"Line {found.unmade_at.line} is the first that makes what is not finite, by a "
            "division by 0 or a logarithm of 0 as a rule: count with `clamp(min=1)`, and leave out "
            "what has no samples."
        )
    if operand is not None and operand.nan:
        return (
            f"Look at what {line} reads: one missing value (NaN) in a column makes its mean and "
            f"its deviation NaN, and so do 0 / 0 and 0 times an infinity. Mend that, and {name} is "
            "finite."
        )
    if found.is_written:
        return f"Write a large finite number in {line} in place of the infinity: -1e4 for a mask."
    return (
        f"An infinity comes of a division by 0 or a logarithm of 0 in {line}: count with "
        "`clamp(min=1)`, and leave out what has no samples."
    )


def _warned_at(evidence: Evidence) -> SourceLine | None:
    """Return the only line at which NumPy warned before the step."""
    lines = evidence.incident.without_value if evidence.incident is not None else ()
    return lines[0] if len(lines) == 1 else None


def _takes_rows(event: OpEvent) -> bool:
    """Return whether what an op reads has several rows, as data has."""
    read = next((one for one in event.inputs if not one.finite), None)
    return read is not None and bool(read.shape) and read.shape[0] > 1


def _is_read_here(found: Localization) -> bool:
    """Return whether the first bad op itself makes NaN of an infinity from before the step."""
    event, reader = found.first_bad, found.held_read
    is_read = event is not None and reader is not None and event.index == reader.index
    return is_read and found.origin == "born_here"


def _buffer(evidence: Evidence, found: Localization, name: str, held: str) -> Diagnosis:
    """Return the finding of a buffer of the model: an earlier step has written to it, or none has
    written all that is read of it.
    """
    is_first = evidence.incident is not None and evidence.incident.at.step == 0
    since = "since before the first step" if is_first else "from before this step"
    writer = None if is_first else found.held_at
    return Diagnosis(
        code="NS506",
        title=f"buffer not finite: {name}",
        cause=f"{held}, {since}: no operation of this step has made it",
        confidence="certain",
        lines=(f"steps write to it at {writer.short}: `{writer.text}`",) if writer else (),
        where=found.culprit or "",
        remedies=finite_constant(evidence),
        usual_cure=f"Begin with a finite {name}, read of it only what was written, and write to it "
        "only what is finite (`torch.isfinite`).",
    )


def _carried(found: Localization, name: str, held: str) -> Diagnosis:
    """Return the finding of a variable that takes something of each step into the next."""
    made = found.made
    given = (f"line {made.line} gives it the next value: `{made.text}`",) if made else ()
    return Diagnosis(
        code="NS506",
        title=f"state of the script not finite: {name}",
        cause=f"{held}, from a step before: no operation of this step has made it",
        confidence="likely",
        lines=given,
        where=found.culprit or "",
        usual_cure=f"{name} keeps what a step left in it: let it take up only what is finite "
        "(`torch.isfinite`), and start it anew.",
    )


def _operand(found: Localization) -> TensorStats | None:
    """Return what the first bad op reads of the culprit, else of all that is bad the first."""
    bad = [one for one in found.first_bad.inputs if not one.finite] if found.first_bad else []
    own = (one for one in bad if (one.name or "").removeprefix("buffer ") == found.culprit)
    return next(own, next(iter(bad), None))


RULE = Rule(
    "NS506",
    "constant-not-finite",
    "a variable of the script is not finite",
    check,
    ("incident",),
)
