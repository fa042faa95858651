"""The optimizer's eps, or its second moment, is zero in the format of its state.

## What happened
Adam divides each step by sqrt(v) + eps. In the format that the optimizer keeps v in, eps rounds to
zero, or v does although the gradient is not zero. What then divides is too small, or is 0.

## Why it happens
torch keeps the state of a parameter in the parameter's format. The smallest number of float16 is
5.96e-08, so that the default eps of 1e-08 rounds to 0 in kernels that compute in it, as torch's
default ones do. After the first step v is 0.001 x g^2, which is 0 in float16 for every |g| below
0.0055. With both at 0 the update is m / 0: Inf, or NaN where the gradient is 0 as well. With an eps
of 1e-5 and v = 0 a gradient of 0.001 moves its weight by a hundred times the learning rate: finite,
and wrong. A fused kernel computes in float32: its eps does not vanish, but the v that it stores
does, and from the second update on it divides by the present gradient's share of v alone. A
gradient of 0 then moves a weight by m / eps, thousands of learning rates. An 8-bit state has a few
hundred values a block: a second moment far below the largest of its block is stored as 0, or as far
more than it is: at gradients of 1e-4 in a block that holds one of 1, AdamW8bit of bitsandbytes (on
a CPU) moves weights 35 times too little.

Updates of half-precision weights are rehearsed on a sample, in their own format and in float32.
Where one is far too long, and second moments are 0 that are not 0 in float32, that made it. Of an
update that a script makes by itself the squares of gradients are followed to what it divides by:
those that are 0 in float16, of gradients that are not, are told with their line.

## Example
```python
import torch

def first_step(dtype, eps):
    weight = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
    weight.grad = torch.tensor([1e-3, 1.0], dtype=dtype)
    torch.optim.AdamW([weight], lr=1e-3, eps=eps).step()
    return weight.data.float()

first_step(torch.float16, 1e-8)     # tensor([-inf, -0.0010])
first_step(torch.float16, 1e-5)     # tensor([-0.0999, -0.0010])
first_step(torch.float32, 1e-8)     # tensor([-0.0010, -0.0010])
```

## Fix
1. Store the trainable parameters in float32: eps and v fit.
   Cost: 8 bytes more a trainable parameter.
2. Keep 8-bit state in 32 bits for embeddings, heads and small tensors.
   Cost: 6 bytes more for each of their elements.

## Fix safety
float32 trainables and 32-bit state are safe. A larger eps is not offered: none is right in float16.
Below 0.0055 the update is lr x m / eps, too long for every gradient above eps and too short for
every one below it; after 20 steps a weight at gradients of 1e-3 has moved 100 times too far with
1e-5, and a tenth of its way with 1e-2.

## Not to be confused with
NS102, the half-precision trainables that are the usual reason. NS402, the broken weights that
follow. NS303: the gradient itself is flushed to zero.

## References
- https://github.com/google-deepmind/optax/issues/1754
- https://github.com/chainer/chainer/issues/6299
- https://github.com/afiaka87/glide-finetune/issues/5
- https://github.com/NVIDIA/apex/issues/240
- https://github.com/huggingface/trl/issues/2367
"""

from __future__ import annotations

from collections.abc import Iterable

from nanstop.diagnose.evidence.accounts import quoted, repeated, update_line
from nanstop.diagnose.evidence.candidates import Candidates, fp32_trainables
from nanstop.diagnose.evidence.reading import has_masters, sighting, standing
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Atom, Confidence, Diagnosis, Evidence, RunFacts, StateRow
from nanstop.records.formats import vanishes
from nanstop.wording import listed, percent

LEAST_SHARE = 0.01
LEAST_SHARE_OF_8_BIT = 0.5
"""An 8-bit state is rounded after it was used; a few zeros in it are how it works."""


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if eps, or probed second moments, are zero in their format."""
    if evidence.accounts and evidence.probe is None:
        return _by_hand(evidence)
    facts = standing(evidence)
    dtypes = _formats_without_eps(facts)
    vanished = _vanished(evidence)
    if not dtypes and not vanished:
        return None
    names = tuple(row.parameter for row in vanished)
    return Diagnosis(
        code="NS110",
        title=f"the optimizer's {'eps' if dtypes else 'second moment'} vanishes in its own format",
        cause=_cause(facts, dtypes, vanished),
        confidence=_confidence(facts, dtypes, vanished),
        lines=(
            *((f"second moments at 0: {listed(names)}",) if names else ()),
            *filter(None, (quoted(update_line(evidence)),)),
        ),
        remedies=_remedies(facts, vanished),
        where=names[0] if names else "",
        source=update_line(evidence),
        seen=sighting(evidence, "optimizer") if vanished else None,
    )


def _by_hand(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if updates that a script makes by itself divide by squares of gradients
    that are 0 in their format.
    """
    twice = repeated(evidence.accounts, 2)
    if not twice or not all(one.share_squares_lost > LEAST_SHARE for one in twice):
        return None
    share = percent(round(1000 * twice[-1].share_squares_lost), 1000)
    return Diagnosis(
        code="NS110",
        title="the squares that an update divides by vanish in their format",
        cause=(
            f"of a tensor's gradients that are not 0, {share} have a square that is 0 in float16, "
            "and the script's own update divides by what it keeps of these squares"
        ),
        confidence="likely",
        lines=("keep second moments in float32",),
        seen=sighting(evidence, "optimizer", since=twice[0].at.step),
    ).at(next(iter(twice[-1].squares_lost_at), None))


def at_failure(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if an update is far too long, and the same update rehearsed on a sample
    has lost second moments that float32 keeps.
    """
    incident, found = evidence.incident, evidence.localization
    if incident is None or found is None or found.key.kind != "length":
        return None
    lost = _lost(row for row in incident.lost_moments if row.parameter in found.reaches)
    if not lost:
        return None
    share = percent(sum(r.num_vanished for r in lost), sum(r.num_total for r in lost))
    names, facts = tuple(row.parameter for row in lost), standing(evidence)
    asked = facts.updated_at or facts.optimizer_at
    return Diagnosis(
        code="NS110",
        title="the optimizer's second moment vanishes in its own format",
        cause=(
            f"{share} of the second moments, which the update divides by, are 0 in "
            f"{lost[0].dtype} and not in float32: seen when the update was tried on a sample first"
        ),
        confidence="certain",
        lines=(
            f"the update of these is far too long: {listed(found.reaches)}",
            *filter(None, (quoted(asked),)),
        ),
        remedies=_remedies(facts, lost),
        where=names[0],
    )


def _formats_without_eps(facts: RunFacts) -> tuple[str, ...]:
    """Return trainable formats in which eps is 0; fused and 8-bit optimizers use float32."""
    optimizer = facts.optimizer
    if optimizer is None or optimizer.eps is None:
        return ()
    if optimizer.state_bits == 8 or optimizer.fused:
        return ()
    if has_masters(facts):
        return ()
    eps = optimizer.eps
    formats = dict.fromkeys(group.dtype for group in facts.param_groups if group.trainable)
    return tuple(dtype for dtype in formats if vanishes(eps, dtype))


def _vanished(evidence: Evidence) -> tuple[StateRow, ...]:
    """Return probed second moments of narrow formats, too many zero, the worst first."""
    return _lost(evidence.probe.states if evidence.probe is not None else ())


def _lost(rows: Iterable[StateRow]) -> tuple[StateRow, ...]:
    least = {"float16": LEAST_SHARE, "8-bit": LEAST_SHARE_OF_8_BIT}
    bad = [row for row in rows if row.num_vanished > least.get(row.dtype, 1.0) * row.num_total]
    return tuple(sorted(bad, key=lambda row: -row.num_vanished))


def _confidence(
    facts: RunFacts, dtypes: tuple[str, ...], vanished: tuple[StateRow, ...]
) -> Confidence:
    eps = facts.optimizer.eps if facts.optimizer is not None else None
    if vanished and (dtypes or (eps is not None and vanishes(eps, vanished[0].dtype))):
        return "certain"
    return "likely" if dtypes or any(row.dtype == "float16" for row in vanished) else "possible"


def _cause(facts: RunFacts, dtypes: tuple[str, ...], vanished: tuple[StateRow, ...]) -> str:
    said = []
    if dtypes and facts.optimizer is not None:
        said.append(f"eps {facts.optimizer.eps:g} rounds to 0 in {dtypes[0]}")
    if vanished:
        share = percent(sum(r.num_vanished for r in vanished), sum(r.num_total for r in vanished))
        said.append(
            f"{share} of the second moments in {vanished[0].dtype} are 0, gradients are not"
        )
    return " and ".join(said)


def _remedies(facts: RunFacts, vanished: tuple[StateRow, ...]) -> Candidates:
    state: Candidates = ((Atom(remedy="fp32_optimizer_state"),),)
    eight_bit = any(row.dtype == "8-bit" for row in vanished)
    return (*fp32_trainables(facts), *(state if eight_bit else ()))


RULE = Rule(
    "NS110",
    "optimizer-eps-vanishes",
    "the optimizer's eps or second moment is zero in its own format",
    check,
    ("static", "gauge", "incident", "account"),
    beside=("NS102",),
    at_failure=at_failure,
)
