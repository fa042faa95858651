"""What is said of a run without any gradient, of tensors whose gradients are zeros because of one
operation before them, and of a loss that autograd refuses.
"""

from __future__ import annotations

from dataclasses import replace

from nanstop.diagnose.evidence.rule import Reason
from nanstop.records import AdapterFacts, Diagnosis, GradientPath, Incident, RunFacts
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


def none_arrives(path: GradientPath, adapter: AdapterFacts | None) -> Reason | None:
    """Return that one backward gave no gradient to anything, None where it gave some."""
    if path.num_reached != 0:
        return None
    cause = f"after one backward none of {counted(path.num_tensors, 'trainable tensor')} has one"
    if path.unreached:
        cause += f": {listed(path.unreached, of=path.num_tensors)}"
    title, advice = "no gradient arrives", "look for detach, item or no_grad before the loss"
    if path.reached_until is not None:
        title = "gradients do not arrive any more"
        cause += f"; the last update that had some was {path.reached_until}"
        advice += ", or for adapters that were merged or switched off"
    idle = _idle(path.unreached, adapter)
    if idle:
        cause += f"; they are of the adapter `{idle}`, which is not active"
        advice = f'make it active before the loss is computed: model.set_adapter("{idle}")'
    return Reason("certain", title, cause, advice, trains_nothing=True)


def _idle(unreached: tuple[str, ...], adapter: AdapterFacts | None) -> str:
    """Return the adapter that all of these tensors are of and that takes no part, else ""."""
    parts = [set(name.split(".")) for name in unreached]
    idle = adapter.idle if adapter is not None and parts else ()
    return next((name for name in idle if all(name in one for one in parts)), "")


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
