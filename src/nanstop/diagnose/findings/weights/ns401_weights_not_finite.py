"""Parameters were not finite before the step began.

## What happened
The step failed because a weight was NaN or Inf already when the forward pass started.
No operation of this step is to blame.

## Why it happens
One NaN in a weight matrix of 4096 x 4096 = 16777216 elements makes one output channel NaN, and the
next matrix product spreads it to all of them. The weight came so: from the checkpoint, from a
merge, from memory that was never filled (`torch.empty`), or from an earlier update that nothing
caught.

## Example
```python
import torch

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
model[0].weight.data[1, 2] = torch.nan
model(torch.ones(1, 4)).data        # tensor([[nan, nan]])
[n for n, weight in model.named_parameters() if not weight.isfinite().all()]      # ['0.weight']
```

## Fix
1. Go back to the last good state: nanstop rewinds to its snapshot and replays up to the update that
   broke the weights, where it kept one (then it is NS402). Cost: the steps since the snapshot.
2. Load another checkpoint, after `nanstop scan CHECKPOINT`. Cost: none.
3. Re-initialise the rows or tensors that are bad. Cost: what they had learned.

## Fix safety
Re-initialising changes training.
Replacing NaN by 0 in a checkpoint hides how it came about and is not offered.

## Not to be confused with
NS402: the update that broke them is known. NS201: anomaly mode and module hooks name the first
operation that touches the bad weight, which did nothing wrong.

## References
- https://github.com/IntMeGroup/FineVQ/issues/5
- https://github.com/huggingface/transformers/issues/28968
- https://github.com/pytorch/torchtitan/pull/2450
- https://github.com/mst272/LLM-Dojo/issues/11
"""

from __future__ import annotations

import math

from nanstop.diagnose.evidence.candidates import Candidates
from nanstop.diagnose.evidence.reading import breaking_update, came_broken, series_values, standing
from nanstop.diagnose.evidence.rule import Rule
from nanstop.diagnose.evidence.script_writes import (
    finite_numbers_only,
    named_writers,
)
from nanstop.records import Atom, Diagnosis, Evidence, Incident, Localization
from nanstop.wording import counted, listed

_ANOTHER_CHECKPOINT = (
    "They were so before the training: load a checkpoint that is finite (`nanstop scan CHECKPOINT` "
    "lists what is not), or mend the line that fills them."
)

_IN_A_WIDER_FORMAT = (
    "Load that model in bfloat16 or float32: what is beyond 65504 is infinite in float16; if it is "
    "so there too, load a checkpoint that is finite (`nanstop scan CHECKPOINT` lists what is not)."
)
_BESIDE = (
    "a reference, a teacher, a scorer, or one that something else trains; it was not finite before "
    "this micro-batch read it"
)
_EVALUATES = ("evaluate", "generate")
_AT_EVALUATION = " in the model that was evaluated; the loss that trains may be of another one"
_WHO_WRITES = (
    "Look at what has written to the model that was evaluated, and let it write finite numbers "
    "only: an average of weights or a copy, else the updates before."
)
_EVALUATE_WIDER = (
    "Evaluate that model in bfloat16 or float32 (`fp16_full_eval` is float16): what is beyond "
    "65504 is infinite in float16; if it is so there too, look at what has written to it: an "
    "average of weights or a copy, else the updates before."
)
_LOAD_IT_AGAIN = (
    "Load that model again from a checkpoint that is finite (`nanstop scan CHECKPOINT` lists what "
    "is not), or mend what fills or trains it."
)


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if parameters were bad before the forward pass."""
    found, incident = evidence.localization, evidence.incident
    if found is not None and found.key.phase == "optimizer":
        return None
    if found is not None and found.of_another_model and found.culprit:
        return _of_another_model(found)
    remade = incident.remade_finite if incident is not None else None
    if remade is None and breaking_update(evidence) is not None:  # then it is NS402
        return None
    named = incident.bad_params if incident is not None else ()
    if found is not None and found.origin == "from_param" and found.culprit:
        named = (found.culprit, *(name for name in named if name != found.culprit))
    if not named:
        return None
    if incident is not None and remade is not None:
        return _written(incident, remade, named)
    came = came_broken(evidence, named)
    # Losses tell of the model that is trained; what is evaluated may be an average of its weights.
    is_evaluated = not came and incident is not None and incident.phase in _EVALUATES
    is_cut_off = _is_cut_off(found)
    at_load = _IN_A_WIDER_FORMAT if is_cut_off else _ANOTHER_CHECKPOINT
    at_evaluation = _EVALUATE_WIDER if is_cut_off else _WHO_WRITES
    return Diagnosis(
        code="NS401",
        title=f"weights not finite: {listed(named)}",
        cause=f"{counted(len(named), 'parameter')} not finite"
        f"{_AT_EVALUATION if is_evaluated else _since(evidence, named)}",
        confidence="certain",
        lines=("the forward pass began with what was not finite; it was written before",),
        remedies=_row_initialisations(evidence, named),
        where=named[0],
        usual_cure=at_load if came else at_evaluation if is_evaluated else "",
    )


def _is_cut_off(found: Localization | None) -> bool:
    """Return whether a weight is infinite, not NaN, in float16: the format may be all there is."""
    read = found.first_bad.inputs if found is not None and found.first_bad is not None else ()
    bad = [stats for stats in read if not stats.finite]
    return bool(bad) and all(one.dtype == "float16" and not one.nan for one in bad)


def _of_another_model(found: Localization) -> Diagnosis:
    """Return the finding of a weight that this training does not hold: its updates did not do it,
    and nothing that they could do cures it.
    """
    name = found.culprit or ""
    return Diagnosis(
        code="NS401",
        title=f"weights not finite: {listed((name,))}",
        cause="the parameter is of a model that the step calls beside the one it trains",
        confidence="certain",
        lines=(_BESIDE,),
        where=name,
        usual_cure=_IN_A_WIDER_FORMAT if _is_cut_off(found) else _LOAD_IT_AGAIN,
    )


def _written(incident: Incident, remade: int, named: tuple[str, ...]) -> Diagnosis:
    """Return the finding of weights that the updates, made again, leave finite: what else the run
    writes to weights is not made again.
    """
    by = named_writers(incident.written_by)
    if by:
        said, cure = f"written to by {by}", finite_numbers_only(by)
    else:
        said = "something else has written to them: a callback, a hook, an average of weights"
        cure = (
            "Look at what else writes to weights before the forward of step "
            f"{incident.at.step}, and let it write finite numbers only."
        )
    finding = Diagnosis(
        code="NS401",
        title=f"weights not finite: {listed(named)}",
        cause=(
            f"{counted(len(named), 'parameter')} not finite when step {incident.at.step} began; "
            f"made again, the updates up to step {remade} leave them finite"
        ),
        confidence="likely",
        lines=(said,),
        where=named[0],
        usual_cure=cure,
    )
    return finding.at(incident.written_by[0]) if by else finding


def _since(evidence: Evidence, named: tuple[str, ...]) -> str:
    """Return how long the weights have been so, as far as losses of this run tell.

    An optimizer that evaluates its loss again and again (LBFGS), or a script that moves weights
    within a step (SAM), breaks them in the step in which they are found.
    """
    incident = evidence.incident
    if came_broken(evidence, named):
        return " before the first step"
    healthy = [step for step, loss in series_values(evidence, "loss_raw") if math.isfinite(loss)]
    if healthy and incident is not None and healthy[-1] == incident.at.step:
        return "; an earlier forward pass of this step had a finite loss"
    if healthy:
        return f"; step {healthy[-1]} had a finite loss; the update is not known"
    if incident is None or incident.at.step > 0:
        return " before this step; the update is not known"
    left = {stats.name for stats in standing(evidence).left_weights} & set(named)
    so = ": an earlier training in this process left them so" if left else ""
    return f" before the first step{so}"


def _row_initialisations(evidence: Evidence, named: tuple[str, ...]) -> Candidates:
    # New rows are made from those that are left.
    tables = {rows.parameter for rows in standing(evidence).token_rows if rows.median_norm > 0.0}
    return tuple(
        (Atom(remedy="init_rows", target=name, value=value),)
        for name in named
        if name in tables
        for value in ("mean", "normal")
    )


RULE = Rule(
    "NS401",
    "weights-not-finite",
    "weights not finite before the step",
    check,
    ("incident",),
    beside=("NS105", "NS106"),
)
