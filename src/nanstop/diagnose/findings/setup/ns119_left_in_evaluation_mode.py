"""A validation leaves the model in evaluation mode, and training goes on in it.

## What happened
The model was trained in training mode, a validation called `model.eval()`, and no `model.train()`
came after it. Every later update is made with Dropout switched off and with BatchNorm on running
statistics that no longer change. Nothing fails, and the training loss may even fall faster.

## Why it happens
`model.eval()` stays in force until `model.train()`: it is no context that ends with the function.
Dropout(0.4) then drops nothing, so that the network is trained whole and overfits as if there were
none. BatchNorm takes the mean and the variance that it has gathered so far, in place of those of
the batch. With a momentum of 0.1 they hold 1 - 0.9^20 = 88 % of what 20 updates have met, and stay
so while the weights below them move on: what was normalised to a variance of 1 drifts away from it,
and the gradient no longer goes through the statistics.

It is told where a model was trained in training mode, was put in evaluation mode, was called
without a graph then, and the same optimizer makes its updates in that mode from there on: 16 of
them, and twice as many as before or up to the end of the run. There were 4 updates in training mode
or more, or 4 such validations since: a lone step is a trial of the loop. A model that is put in
evaluation mode once more after the validation, or from the start, is trained so on purpose, as are
parts that are frozen in a model which is in training mode itself; so is one that holds neither
Dropout nor BatchNorm.

## Example
```python
import torch

model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.4))

def validate():
    model.eval()
    with torch.no_grad():
        return model(torch.ones(1, 2)).shape

model.training                      # True
validate()                          # torch.Size([1, 2])
model.training                      # False
```

## Fix
1. `model.train()` at the start of each epoch, or at the end of the validation. Cost: none.
2. `was = model.training` before the validation, and `model.train(was)` after it, in a validation
   that others call too. Cost: none.

## Fix safety
Changes training, as it is meant to: Dropout and batch statistics are there again.

## Not to be confused with
NS117, a BatchNorm that sees one micro-batch at a time. NS404, a run that has diverged. Fine-tuning
with frozen statistics: there the whole model is in training mode and its norms are not.

## References
- https://docs.pytorch.org/docs/stable/notes/autograd.html#evaluation-mode-nn-module-eval
- https://arxiv.org/abs/1502.03167
- https://jmlr.org/papers/v15/srivastava14a.html
"""

from __future__ import annotations

from nanstop.diagnose.evidence.reading import sighting, standing
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Diagnosis, Evidence
from nanstop.wording import counted, listed


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if most updates since a validation were made in evaluation mode."""
    facts = standing(evidence)
    mode = facts.mode
    if mode is None or not mode.modules or evidence.incident is not None:
        return None
    act = "acts" if len(mode.modules) == 1 else "act"
    cause = (
        f"after {counted(mode.num_train, 'update')} in training mode it was put in evaluation mode "
        f"for calls without gradients, and {counted(mode.num_eval, 'update')} since were made in "
        f"it: {listed(mode.modules)} no longer {act} as in training"
    )
    return Diagnosis(
        code="NS119",
        title="a validation has left the model in evaluation mode",
        cause=cause,
        confidence="likely",
        lines=("call model.train() after the validation, or at the start of each epoch",),
        where=facts.host,
        seen=sighting(evidence, "forward", since=mode.num_train),
    ).at(mode.at)


RULE = Rule(
    "NS119",
    "left-in-evaluation-mode",
    "a validation leaves the model in evaluation mode",
    check,
    ("static",),
)
