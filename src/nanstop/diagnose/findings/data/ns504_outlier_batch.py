"""One sample's values are far from the others', and it is the one that fails.

## What happened
A micro-batch failed because of one sample. The others in it, and the other micro-batches of the
step, are finite; the sample's values are many times larger than theirs. Or a batch before it was
such a one: its own step was finite, its update was not one that training comes back from. That is
measured: of all updates since the last snapshot, with the weights of then, its loss alone is 1000
times the others' or more, and made again without its update the others do not run away.

## Why it happens
Data that was not normalised: a sensor's raw count among values of 1, an amount in cents among
euros, a spectrogram in linear units, a parse error that read 1e25. A value of 1e20 squared is 1e40,
beyond float32, which ends at 3.4e38; one such value in a batch of 32 x 512 = 16384 makes the mean
loss Inf.

## Example
```python
import torch

x = torch.ones(4, 8)
x[1] *= 1e20
x.pow(2).mean(1)                    # tensor([1., inf, 1., 1.])
```

## Fix
1. Look at the sample that the report names, and repair or remove it at its source.
   Cost: a look at the data.
2. Normalise by what is robust (median, quantiles), or clip inputs to a few standard deviations.
   Cost: one line.
3. Leave the sample out of this batch. Cost: that sample.
4. Clip the gradient norm, where an earlier batch led there: it bounds what one batch does.
   Cost: none; the sample is still wrong.

## Fix safety
Leaving data out changes training; it is applied only when allowed
(`Policy(allow=("drop_sample",))`).

## Not to be confused with
NS501: the data is NaN or Inf itself. NS502 and NS503: ids and labels. NS201: a value that float32
holds and a narrow format does not; an outlier can be why, and then both are said.

## References
- https://github.com/meta-pytorch/torchtune/issues/2246
- https://github.com/huggingface/trl/issues/6166
"""

from __future__ import annotations

from statistics import median

from nanstop.diagnose.evidence.candidates import without_rows
from nanstop.diagnose.evidence.reading import failing_batch, standing
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Atom, BatchFact, Diagnosis, Evidence, WindowApart
from nanstop.wording import number

_AT_SOURCE = "Repair or remove that sample at its source."
FAR = 16.0
"""Samples of normalised data differ by a factor of a few in their largest value."""


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if the failing sample (of a micro-batch of few:
    the micro-batch) has by far the largest values.
    """
    found, incident = evidence.localization, evidence.incident
    if incident is not None and incident.apart is not None:
        return _of_window(incident.apart, evidence)
    if incident is None or incident.at.micro is None or found is None or found.first_bad is None:
        return None
    if found.origin != "born_here" or found.key.phase == "optimizer" or _all_fail(evidence):
        return None
    return _sample(evidence) or _micro(evidence)


def _of_window(apart: WindowApart, evidence: Evidence) -> Diagnosis:
    """Return the finding for a batch of some updates ago that sent the training off."""
    fact, which, lines = apart.fact, f"the batch of step {apart.step}", ()
    ratio = (fact.outlier_ratio or 0.0) if fact is not None else 0.0
    if fact is not None and fact.outlier_row is not None and ratio >= FAR:
        which = f"sample {fact.outlier_row} of step {apart.step}"
        row = apart.rows.row(fact.outlier_row) if apart.rows is not None else None
        place = f" (row {row} of {apart.rows.data})" if apart.rows and row is not None else ""
        lines = (f"{which}{place}: {_far(fact, ratio)}",)
    clip = () if standing(evidence).clip else ((Atom(remedy="clip", value="1"),),)
    return Diagnosis(
        code="NS504",
        title=f"{which} is far from the others, and training ran away after it",
        cause=(
            f"with the weights of before it the loss of that batch is {apart.loss:.3g}, "
            f"{apart.usual:.3g} that of the others; without its update {apart.num_updates} others "
            f"take the loss from {apart.begin:.3g} to {apart.end:.3g}"
        ),
        confidence="certain",
        lines=lines,
        remedies=clip,
        usual_cure=_AT_SOURCE,
        of_updates=True,
    )


def _all_fail(evidence: Evidence) -> bool:
    """Return whether every micro-batch of a window of several was seen to fail."""
    incident, num_micro = evidence.incident, standing(evidence).num_micro
    signals = incident.signals if incident is not None else ()
    failing = {s.at.micro for s in signals if s.source == "loss" and s.at is not None}
    return num_micro > 1 and len(failing) >= num_micro


def _sample(evidence: Evidence) -> Diagnosis | None:
    positions = (evidence.localization.positions if evidence.localization else None) or ()
    samples = {position.sample for position in positions}
    if len(samples) != 1:
        return None
    (sample,) = samples
    for fact in failing_batch(evidence):
        ratio = fact.outlier_ratio or 0.0
        if fact.outlier_row == sample and ratio >= FAR:
            return _finding(evidence, fact, f"sample {sample}", ratio)
    return None


def _micro(evidence: Evidence) -> Diagnosis | None:
    """Return the finding for micro-batches of one or two samples, compared by window."""
    incident = evidence.incident
    assert incident is not None
    for fact in failing_batch(evidence):
        if not fact.shape or fact.shape[0] > 2 or not fact.dtype.startswith(("float", "bfloat")):
            continue
        others = [_size(o) for o in incident.batch if o.name == fact.name and o.micro != fact.micro]
        usual = median(others) if len(others) > 1 else 0.0
        if usual > 0.0 and _size(fact) >= FAR * usual:
            return _finding(evidence, fact, f"micro-batch {fact.micro}", _size(fact) / usual)
    return None


def _size(fact: BatchFact) -> float:
    return max(abs(fact.minimum or 0.0), abs(fact.maximum or 0.0))


def _far(fact: BatchFact, ratio: float) -> str:
    return (
        f"`{fact.name}` comes to {number(_size(fact))} there, {ratio:.3g} times the median of the "
        "others' largest"
    )


def _finding(evidence: Evidence, fact: BatchFact, which: str, ratio: float) -> Diagnosis:
    alone = any(
        trial.outcome == "pass" and all(atom.remedy == "drop_sample" for atom in trial.atoms)
        for trial in evidence.trials
        if trial.atoms
    )
    tested = (f"without {which} the micro-batch is finite",) if alone else ()
    return Diagnosis(
        code="NS504",
        title=f"{which} is far from the others",
        cause=_far(fact, ratio),
        confidence="likely" if which.startswith("sample") else "possible",
        lines=tested,
        remedies=without_rows(evidence),
        where=fact.name,
    )


RULE = Rule(
    "NS504",
    "outlier-batch",
    "one sample far from the others fails",
    check,
    ("incident",),
    yields_to=("NS501", "NS502", "NS503"),
)
