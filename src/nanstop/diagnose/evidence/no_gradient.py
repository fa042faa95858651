"""What is said of tensors whose gradients are zeros because of one operation before them, and of a
loss that autograd refuses.
"""

from __future__ import annotations

from dataclasses import replace

from nanstop.diagnose.evidence.rule import Reason
from nanstop.records import Diagnosis, GradientPath, Incident, RunFacts
from nanstop.wording import counted, listed

_OFF = "gradients are switched off where `backward` is called"
_OFF_WITHIN = (
    "call it outside of `torch.no_grad()`; what `torch.set_grad_enabled(False)` switches off stays "
    "so until it is called with True"
)
_REFUSAL = "does not require grad and does not have a grad_fn"


def part_behind(path: GradientPath) -> Reason | None:
    """Return why gradients come with one operation passed by, None where none does."""
    if not path.behind:
        return None
    cause = (
        f"{counted(len(path.behind), 'tensor')} that the optimizer holds got gradients of zeros or "
        f"roundings alone in the first updates: {listed(path.behind)}; with one operation passed "
        "by, whose derivative is 0, they get others"
    )
    is_all = len(path.behind) == path.num_tensors
    if path.is_own:
        title = (
            "all that is trained is compared with itself"
            if is_all
            else "a part is compared with itself"
        )
        advice = "detach the side that is to stay: a - b.detach(); a number over itself is 1"
    else:
        title = "all that is trained lies behind a step" if is_all else "a part lies behind a step"
        advice = "pass the gradient by: x + (torch.round(x) - x).detach()"
    told = f"{path.flat_at}  {advice}".strip()
    return Reason("likely", title, cause, told, trains_nothing=is_all)


def units_copied(path: GradientPath) -> Reason | None:
    """Return that the units of a layer are copies of each other."""
    if not path.copied:
        return None
    cause = (
        f"all rows of {listed(path.copied)} hold the same numbers and get the same gradient, "
        "update after update: however many units there are, they compute one"
    )
    advice = "begin with random values (nn.init.xavier_uniform_), not with one number"
    return Reason("certain", "units of a layer are copies of each other", cause, advice)


def refused(incident: Incident, known: Reason | None, facts: RunFacts) -> Diagnosis | None:
    """Return why autograd refused the loss: by the set-up, else that nothing is trainable."""
    if not any(_REFUSAL in signal.message for signal in incident.signals):
        return None
    path = facts.gradient_path
    cause = "autograd finds nothing that is trained behind the loss"
    advice = "look for reentrant checkpointing, a detach, or no_grad before the loss"
    if path is not None and path.is_off:
        cause, advice = _OFF, _OFF_WITHIN
    found = known or Reason("certain", "no gradient arrives", cause, advice)
    found = replace(found, confidence="certain", trains_nothing=False)
    told = found.diagnosis("NS114", where=facts.host)
    if path is not None and path.reentrant:
        return told
    lines = tuple(line for line in told.lines if line != found.fix)
    return replace(told, lines=lines, usual_cure=found.fix)
