"""The batch holds NaN or Inf.

## What happened
A tensor of the failing micro-batch was not finite before the model saw it.

## Why it happens
Division by the standard deviation of a constant image (0 / 0), a float16 cache of features beyond
65504, a missing value in a CSV (read as NaN), a rollout engine that returned NaN as
log-probability. One bad element in a batch of 8 x 3 x 224 x 224 = 1204224 makes the mean loss NaN.

## Example
```python
import torch

image = torch.full((3, 224, 224), 0.5)
((image - image.mean()) / image.std()).isnan().all()      # tensor(True)
```

## Fix
1. Repair or remove the sample at its source, or where the batch is prepared. Cost: a look at the
   data; the report names the row where it is known.
2. Drop the sample from this batch (quarantine). Cost: that sample.
3. Drop the micro-batch. Cost: its other samples too.

## Fix safety
Dropping data changes training; it is applied only when allowed (`Policy(allow=("drop_sample",))`).

## Not to be confused with
NS204: finite data, undefined formula; NS304 and NS204 of a value that is missing on purpose and
marked by NaN, which the script leaves out after it has computed with it: another number there makes
no difference. No change of precision, learning rate or clipping helps.

## References
- https://github.com/huggingface/trl/issues/6166
- https://github.com/huggingface/trl/pull/6266
"""

from __future__ import annotations

from dataclasses import replace

from nanstop.diagnose.evidence.candidates import (
    finite_entry,
    left_out,
    mended_at_source,
    without_rows,
)
from nanstop.diagnose.evidence.reading import failing_batch
from nanstop.diagnose.evidence.rule import Rule
from nanstop.diagnose.evidence.script_writes import unmade_at, warned_before
from nanstop.records import BatchFact, BatchRows, Confidence, Diagnosis, Evidence
from nanstop.wording import counted, listed

ADDITIONS = ("add", "sub")
_MOST_SHOWN = 3


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if an entry of the failing micro-batch is not finite."""
    found = evidence.localization
    traced = found is not None and found.origin == "from_batch"
    # -Inf is how an additive mask hides a key: by itself it is no fault.
    bad = [fact for fact in failing_batch(evidence) if fact.num_bad and (traced or not fact.hides)]
    if (not bad and not traced) or left_out(evidence):
        return None
    names = [fact.name for fact in bad]
    if not names and found is not None and found.culprit:
        names = [found.culprit]
    return Diagnosis(
        code="NS501",
        title=f"batch not finite: {listed(names)}" if names else "batch not finite",
        cause=_cause(sum(fact.num_bad for fact in bad)),
        confidence=_confidence(evidence, bad),
        lines=(
            *(
                f"`{fact.name}` {fact.dtype} {list(fact.shape)}: "
                f"{counted(fact.num_bad, 'element')} not finite{_at(evidence, fact)}"
                for fact in bad
            ),
            *_made(evidence),
            *warned_before(evidence),
        ),
        remedies=(*finite_entry(evidence), *without_rows(evidence)),
        where=names[0] if names else "",
        at_source=mended_at_source(evidence),
    )


def _confidence(evidence: Evidence, bad: list[BatchFact]) -> Confidence:
    """Return how certain it is that the failure comes of the batch: an op that gave birth to it in
    no sample that is known speaks against that.
    """
    found = evidence.localization
    if found is not None and found.origin == "born_here" and found.positions is None:
        return "possible"
    traced = found is None or found.origin == "from_batch"
    is_data = traced and not _made_by_script(evidence, bad) and not _may_hide(evidence)
    return "certain" if is_data else "likely"


def _made(evidence: Evidence) -> tuple[str, ...]:
    """Return the line that made a bad entry of the data, or the statement of the script that gave
    it its value, where one is known.
    """
    found = evidence.localization
    if unmade := unmade_at(evidence):
        return unmade
    at = found.held_at if found is not None and found.origin == "from_batch" else None
    if found is None or at is None:
        return ()
    return (f"`{found.held_in}` was given its value at {at.short}: `{at.text}`",)


def _at(evidence: Evidence, fact: BatchFact) -> str:
    """Return in which of its rows an entry of several is not finite."""
    if not fact.bad_rows or len(fact.bad_rows) == fact.shape[0]:
        return ""
    shown = ", ".join(map(str, fact.bad_rows[:_MOST_SHOWN]))
    more = len(fact.bad_rows) - _MOST_SHOWN
    if more > 0:
        return f", at rows {shown} and {more} more"
    are_several, drawn = len(fact.bad_rows) > 1, _drawn(evidence, fact)
    if drawn is not None:
        rows, data = ", ".join(map(str, drawn.rows)), drawn.data
        if are_several:
            return f", at rows {shown} (rows {rows} of {data})"
        return f", at row {shown} (row {rows} of {data})"
    return f", at rows {shown}" if are_several else f", at row {shown}"


def _drawn(evidence: Evidence, fact: BatchFact) -> BatchRows | None:
    """Return which rows of the data set have a value of their own that is not finite, where the
    samples do not say it.
    """
    made_of = evidence.incident.rows if evidence.incident is not None else None
    if made_of is None or not made_of.by_row or fact.shape[:1] != (len(made_of.rows),):
        return None
    return replace(made_of, rows=tuple(made_of.rows[row] for row in fact.bad_rows))


def _may_hide(evidence: Evidence) -> bool:
    """Return whether what is bad is -inf alone and was added to something:
    it may be a mask, and another op at fault.
    """
    event = evidence.localization.first_bad if evidence.localization is not None else None
    if event is None or event.name not in ADDITIONS:
        return False
    bad = [read for read in event.inputs if not read.finite]
    return bool(bad) and not any(read.nan or read.posinf for read in bad)


def _made_by_script(evidence: Evidence, bad: list[BatchFact]) -> bool:
    """Return whether what is bad has other rows than the batch:
    weights of classes, say, which some formula made. A preference has two for each of the data.
    """
    rows = {fact.shape[:1] for fact in failing_batch(evidence)[:1]}
    of_data = any(_drawn(evidence, fact) is not None for fact in bad)
    return bool(bad) and not of_data and rows.isdisjoint(fact.shape[:1] for fact in bad)


def _cause(num_bad: int) -> str:
    amount = f"{counted(num_bad, 'element')} not finite" if num_bad else "the data was not finite"
    return f"{amount} before the model saw the batch"


RULE = Rule(
    "NS501",
    "non-finite-input",
    "NaN or Inf in the batch",
    check,
    ("incident",),
    yields_to=("NS506", "NS704"),
)
