"""A run goes on from a checkpoint without the state of its optimizer, schedule, loss scale or
random numbers.

## What happened
The weights were restored and something else was not: the checkpoint has no `optimizer.pt` or
`scheduler.pt` (`save_only_model`), no `scaler.pt`, no `rng_state.pth`, or the optimizer counts
thousands of steps and its second moments are zero. Or the state is whole and in the wrong places:
the optimizer was made with its parameters in another order than the saved one, and parameters of
one shape have each other's moments. A script that keeps its moments itself can give them to other
parameters: tensors that took up the gradients of one take up those of another. Training goes on
without a word; the loss jumps, and sometimes it does not come back.

## Why it happens
transformers loads `optimizer.pt` and `scheduler.pt` only where both are there, and says nothing
where they are not. A fresh AdamW then moves every weight by the full learning rate in its first
step, whatever its gradient: the ratio m / sqrt(v) is 1. Moments that are zero at step 10000 are
worse: the bias correction is over (1 - 0.999^10000 = 1), so that m / sqrt(v) = 0.1 g / sqrt(0.001
g^2) = 3.2: each weight moves 3.2 times the learning rate. Without the schedule the warm-up begins
anew, or the peak rate does. Without its scale a scaler starts at 65536 and skips updates until
it has fallen. `load_state_dict` goes by the place of a parameter, not by its name, and only a shape
that does not fit would raise. Which elements of a gradient are large is much the same from step to
step, so the squares of the first gradients go with the moments of their own parameter: where at
least a quarter of the parameters go far better with those of another one, they are mixed up. So
they are where four or more of one shape have moments that are 8 times as large or small as their
gradients, beside the others, and in another order of the same moments all agree within 2 times.

## Example
```python
import torch

def step(moment):
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.tensor([1e-3])
    optimizer = torch.optim.AdamW([weight], lr=1e-3)
    moments = {"exp_avg": torch.tensor([moment]), "exp_avg_sq": torch.tensor([moment**2])}
    optimizer.state[weight] = {"step": torch.tensor(10000.0), **moments}
    optimizer.step()
    return weight.data

step(1e-3)                          # tensor([-0.0010])
step(0.0)                           # tensor([-0.0032])
```

## Fix
1. Resume from a checkpoint that is whole: `save_only_model=False`.
   Cost: disk, twice the weights for Adam.
2. Where there is none, start a new run from the weights, with a warm-up.
   Cost: the moments are built up again.
3. In a loop, save and load `optimizer`, `scheduler` and `scaler` with `state_dict()`. Cost: disk.

## Fix safety
Changes training: the next updates are other ones.

## Not to be confused with
NS403, moments that are negative or not finite. NS106, a checkpoint whose weights are not finite.
NS302, a scale that falls because of overflow.

## References
- https://github.com/huggingface/accelerate/issues/4289
- https://github.com/EvolvingLMMs-Lab/OneVision-Encoder/pull/65
- https://github.com/PolymathicAI/the_well/issues/77
- https://github.com/NVlabs/stylegan2-ada-pytorch/issues/108
"""

from __future__ import annotations

from nanstop.diagnose.evidence.reading import sighting, standing
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Diagnosis, Evidence, ResumeFacts
from nanstop.wording import counted, listed

REPLACED = 0.5
"""A step moves a weight by a small part of its size; a new initialisation by 1.4 times it."""

_MIXED = 0.25
"""Share of the compared parameters from which their moments are mixed up, not changed."""
_SEVERAL = 2
"""Kept tensors that change places: one alone may be used for something else by now."""
_OPTIMIZER = ("optimizer.pt", "scheduler.pt")


def check(evidence: Evidence) -> Diagnosis | None:
    """Return what of an earlier run's state is missing."""
    if evidence.accounts:
        return _moved(evidence)
    resume = standing(evidence).resume
    if resume is None:
        return None
    if resume.replaced > REPLACED:
        return _overwritten(resume)
    if len(resume.others) >= _MIXED * max(resume.num_compared, 1):
        return _mixed_up(resume)
    emptied = resume.step > 0 and resume.num_zero == resume.num_moments > 0
    if not (emptied or resume.missing):
        return None
    lost = emptied or any(name in resume.missing for name in _OPTIMIZER)
    return Diagnosis(
        code="NS115",
        title="the optimizer starts anew in the middle of a training"
        if lost
        else "a checkpoint that is not whole"
        if resume.folder
        else "the loss scale was not restored with the optimizer",
        cause=_cause(resume, emptied=emptied),
        confidence="certain" if lost else "likely",
        lines=tuple(_lines(resume)),
        where=resume.folder or "optimizer",
    )


def _moved(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if what a script keeps of gradients went over to other parameters."""
    account = evidence.accounts[-1]
    if account.num_states_moved < _SEVERAL:
        return None
    source, *given = account.states_at or (None,)
    return Diagnosis(
        code="NS115",
        title="parameters have each other's moments",
        cause=(
            f"{account.num_states_moved} tensors that took up the gradients of one parameter take "
            "up those of another one now: what they hold is of the first"
        ),
        confidence="likely",
        lines=tuple(line.quoted for line in given if line is not None),
        seen=sighting(evidence, "optimizer"),
    ).at(source)


def _mixed_up(resume: ResumeFacts) -> Diagnosis:
    (first, other), *_ = resume.others
    num = f"{len(resume.others)} of {counted(resume.num_compared, 'parameter')}"
    return Diagnosis(
        code="NS115",
        title="parameters have each other's moments",
        cause=(
            f"the second moments of {num} go with the gradients of another of the same shape: "
            f"those of `{first}` are kept for `{other}`"
        ),
        confidence="likely",
        lines=("make the optimizer with its parameters in the saved order",),
        where="optimizer",
    ).at(resume.at)


def _overwritten(resume: ResumeFacts) -> Diagnosis:
    moved = f"{100 * resume.replaced:.0f} % of their size"
    return Diagnosis(
        code="NS115",
        title="the first update put other weights in place of the model's",
        cause=f"it moved them by {moved}: the optimizer's copies were made of other weights",
        confidence="likely",
        lines=("make the optimizer's copies after the weights are loaded",),
        where="optimizer",
    )


def _cause(resume: ResumeFacts, *, emptied: bool) -> str:
    if emptied:
        kept = counted(resume.num_moments, "parameter")
        return f"at step {resume.step} all that the optimizer keeps of {kept} is zero"
    if not resume.folder:
        return "the optimizer goes on from a saved state, the loss scaler begins anew"
    missing = listed(resume.missing, most=4)
    if all(name in resume.missing for name in _OPTIMIZER):
        return f"`{resume.folder}` has no {missing}: it was saved with save_only_model"
    return f"`{resume.folder}` has no {missing}"


def _lines(resume: ResumeFacts) -> list[str]:
    lines: list[str] = []
    if any(name in resume.missing for name in _OPTIMIZER):
        lines.append(
            "optimizer and schedule are restored together or not at all: both are fresh now"
        )
    if "scaler.pt" in resume.missing or "scaler" in resume.missing:
        lines.append("the loss scale starts at its first value and skips updates until it fits")
    if "rng_state.pth" in resume.missing:
        lines.append("dropout and sampling go on with other random numbers")
    return lines


RULE = Rule(
    "NS115",
    "resume-state-lost",
    "state of an earlier run was not restored",
    check,
    ("static", "account"),
)
