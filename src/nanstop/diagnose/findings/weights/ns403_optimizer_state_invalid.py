"""The optimizer's state holds what no update can have made.

## What happened
A moment of the optimizer is NaN, Inf, negative where it only sums squares, or of another shape than
its parameter. Weights and gradients may be fine; the next update is not.

## Why it happens
Adam's second moment is v = 0.999 v + 0.001 g^2 from v = 0 on: never negative. The update divides by
sqrt(v), and sqrt(-1) = NaN, so one negative element makes one NaN weight, and that weight the next
loss. A moment of NaN stays: 0.999 x NaN = NaN. Such values are restored: from a checkpoint that was
written after a failure, from the state of parameters in another order, from an 8-bit state read
with another table, or from a file cut short.

## Example
```python
import torch

weight = torch.nn.Parameter(torch.ones(2))
weight.grad = torch.ones(2)
optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.0)
optimizer.step()
optimizer.state[weight]["exp_avg_sq"][0] = -1.0
[i for i, s in optimizer.state_dict()["state"].items() if (s["exp_avg_sq"] < 0).any()]     # [0]
optimizer.step()
weight.data                         # tensor([nan, 0.9980])
```

## Fix
1. Load the state of an earlier checkpoint, or none: the moments build up again in some 1 / (1 -
   0.999) = 1000 steps. Cost: a short warm-up with a smaller learning rate.
2. Let nanstop go on with AdamW in float32, which takes over the moments that are possible and
   starts the others at zero (`optimizer_swap`). Cost: 8 bytes a trainable parameter.
3. Check that the parameters are in the order and the groups that the state was saved with.
   Cost: none.

## Fix safety
Starting moments anew changes training. Taking the absolute value of a second moment, or raising
eps, is finite and wrong, and is not offered.

## Not to be confused with
NS402: the state is possible and the update leaves the weights' format. NS115:
state was not restored at all.

## References
- https://github.com/bitsandbytes-foundation/bitsandbytes/issues/227
- https://github.com/bitsandbytes-foundation/bitsandbytes/issues/152
- https://github.com/EleutherAI/gpt-neox/issues/947
"""

from __future__ import annotations

from nanstop.diagnose.evidence.candidates import Candidates
from nanstop.diagnose.evidence.reading import standing
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Atom, Diagnosis, Evidence, OpEvent, StateFault, op_name
from nanstop.records.values import origin_of
from nanstop.wording import counted, listed

ROOTS = frozenset({"sqrt", "sqrt_", "_foreach_sqrt", "_foreach_sqrt_", "rsqrt", "_foreach_rsqrt"})
REMEDIES: Candidates = ((Atom(remedy="optimizer_swap", value="adamw"),),)
_SAID = {
    "nonfinite": "not finite",
    "negative": "negative",
    "vanished": "0 where the first moment is not",
    "shape": "of another shape",
}

_LOST = (
    "it was lost before the state was saved, as by a narrower format: load an earlier one, or "
    "none, with a short warm-up"
)


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the state that broke the update, else what was wrong as the run began."""
    optimizer = standing(evidence).optimizer
    return _in_the_update(evidence) or _at_the_start(
        evidence, optimizer.state_faults if optimizer is not None else ()
    )


def _in_the_update(evidence: Evidence) -> Diagnosis | None:
    found = evidence.localization
    if found is None or found.key.phase != "optimizer" or found.first_bad is None:
        return None
    culprit = found.culprit or ""
    if found.origin == "from_state" and not culprit.startswith("state gradient "):
        return _finding(culprit, "not finite before the update", ())
    root = _negative_root(found.first_bad) if found.origin == "born_here" else None
    if root is None:
        return None
    said = (
        f"`{op_name(found.first_bad.op)}` of it is NaN: it is negative, which a sum of squares "
        "cannot be"
    )
    return _finding(root, said, (f"not finite after the update: {listed(found.reaches)}",))


def _negative_root(event: OpEvent) -> str | None:
    """Return the finite state whose square root is NaN."""
    if op_name(event.op) not in ROOTS or not any(output.nan for output in event.outputs):
        return None
    states = (i.name for i in event.inputs if i.finite and origin_of(i.name) == "from_state")
    return next(states, None)


def _finding(state: str, said: str, lines: tuple[str, ...]) -> Diagnosis:
    key, _, owner = state.removeprefix("state ").partition(" of ")
    return Diagnosis(
        code="NS403",
        title=f"optimizer state `{key}` of `{owner}` cannot be",
        cause=said,
        confidence="certain",
        lines=("gradients and weights were finite before the update", *lines),
        remedies=REMEDIES,
        where=owner,
    )


def _at_the_start(evidence: Evidence, faults: tuple[StateFault, ...]) -> Diagnosis | None:
    """Return the standing finding; of an incident, that weights may have broken of it."""
    met, found = evidence.incident, evidence.localization
    if not faults or (met is not None and not met.bad_params):
        return None
    if found is not None and found.key.phase == "optimizer" and found.origin == "born_here":
        return None  # the update that made the bad number has left it in the state as well
    named = [fault.name for fault in faults]
    worst, optimizer = faults[0], standing(evidence).optimizer
    is_coarse = optimizer is not None and optimizer.state_bits is not None
    is_mended = is_coarse or worst.kind != "vanished"
    amount = f"{counted(worst.num_bad, 'element')} {_SAID[worst.kind]}" if worst.num_bad else ""
    return Diagnosis(
        code="NS403",
        title=f"optimizer state that no update can have made: {listed(named)}",
        cause=f"restored with `{worst.name}` {amount or worst.detail}",
        confidence="certain" if met is None else "likely",
        # What was lost before it was saved, another optimizer does not bring back.
        lines=() if is_mended else (_LOST,),
        remedies=REMEDIES if is_mended else (),
        where=worst.name.partition(":")[0],
    )


RULE = Rule(
    "NS403",
    "optimizer-state-invalid",
    "optimizer state that no update can have made",
    check,
    ("static", "incident"),
)
