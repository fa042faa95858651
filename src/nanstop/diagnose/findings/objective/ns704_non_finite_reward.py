"""A reward is NaN, infinite, missing, or so large that nothing can be compared with it.

## What happened
A reward function returned something that is no number. Either the loss fails with it, or the
trainer replaces it and goes on: then whole groups teach nothing, or something else than was meant,
and no log says so.

## Why it happens
One Inf among the rewards of a group makes its mean Inf: the advantages are 1 - Inf = -Inf and Inf -
Inf = NaN, for all of them. TRL divides by a deviation that is NaN as well and turns NaN into 0: a
group of 8 with one Inf has eight advantages of 0. Without that division -Inf becomes -3.4e38, and
the loss overflows. A NaN or None leaves its completion out; if no function scores it, it is
generated and not learned from. A finite reward beyond 1.8e19 has no square in float32, and the
deviation of its group is Inf: all its advantages are 0. Usual origins are 0 / 0 for an empty
completion, log(0), a division by the length, `float("inf")` as a penalty, a judge that did not
answer.

## Example
```python
import torch

rewards = torch.tensor([1.0, 0.0, torch.inf, 1.0])
advantages = rewards - rewards.mean()
advantages                          # tensor([-inf, -inf, nan, -inf])
torch.nan_to_num(advantages / rewards.std())    # tensor([0., 0., 0., 0.])
rewards = rewards.nan_to_num(posinf=0.0, neginf=0.0)      # the worst that the others can get
(rewards - rewards.mean()) / rewards.std()      # tensor([0.8660, -0.8660, -0.8660, 0.8660])
```

## Fix
1. Give an empty, unparsable or failed completion a finite worst reward, such as the least that
   others can get. Cost: none.
2. Check rewards before they are returned:
   `assert math.isfinite(r)` tells which completion it was. Cost: none.
3. Bound the reward (a clamp, tanh) where it is a ratio or a logarithm. Cost: extremes look alike.
4. None where a function does not apply, and another function that scores those completions.
   Cost: none.

## Fix safety
Another reward is another training. Lower learning rates, clipping and formats do not help.

## Not to be confused with
NS501: another entry of the batch is not finite. NS701: rewards are finite and equal. A None where
other functions score the completion is how TRL routes tasks, and no fault.

## References
- https://github.com/modelscope/ms-swift/issues/8123
- https://github.com/huggingface/trl/pull/5775
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from nanstop.diagnose.evidence.candidates import mended_at_source, without_rows
from nanstop.diagnose.evidence.objective import HUGE, INF, NAN, UNSCORED, named
from nanstop.diagnose.evidence.reading import standing
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Confidence, Diagnosis, Evidence, Signal
from nanstop.wording import number


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if rewards, of a failing batch or of the logs, are not numbers."""
    return _failed(evidence) if evidence.incident is not None else _absorbed(evidence)


def _failed(evidence: Evidence) -> Diagnosis | None:
    incident, found = evidence.incident, evidence.localization
    told = [s for s in incident.signals if s.source == "reward"] if incident is not None else []
    weight = found.culprit if found is not None and found.weighs_choices else None
    if not told and weight is None:
        return None
    functions = [one.name for one in told if one.name]
    amounts = [f"{one.message} of `{one.name}` are {_word(one.value)}" for one in told if one.name]
    missing = f"{told[0].message} are missing: no function scored the completion" if told else ""
    diagnosis = Diagnosis(
        code="NS704",
        title=_title(told) if told else f"a reward or weight is not finite: `{weight}`",
        cause=(amounts or [missing])[0] or _WEIGHS,
        confidence="certain" if functions else "likely",
        lines=(_advice(told), *amounts[1:]) if told else _derived(evidence),
        remedies=without_rows(evidence),
        usual_cure="" if told else _WEIGHT,
        at_source=None if told else mended_at_source(evidence),
        where=(functions or [weight or "reward"])[0],
    )
    return _with_line(diagnosis, evidence)


def _derived(evidence: Evidence) -> tuple[str, ...]:
    """Return where a weight of the batch was made, as far as that is known."""
    incident = evidence.incident
    unmade = incident.rows.unmade_at if incident is not None and incident.rows else None
    if unmade is not None:
        return (f"made so at {unmade.short}: `{unmade.text}`",)
    objective, found = standing(evidence).objective, evidence.localization
    lines = objective.entries_at if objective is not None else ()
    names = {f"batch[{one.function}]": one for one in lines}
    put = names.get(found.culprit or "") if found is not None else None
    given = (f"given its values at {put.short}: `{put.text}`",) if put is not None else ()
    return (*given, _DERIVED)


def _with_line(found: Diagnosis, evidence: Evidence) -> Diagnosis:
    """Return a finding with the line that defines the function which it names, or with what the
    model is that it names, if that is known.
    """
    objective = standing(evidence).objective
    lines = objective.rewards_at if objective is not None else ()
    line = next((one for one in lines if one.function == found.where), None)
    models = objective.reward_models if objective is not None else ()
    bad = objective.bad_weights if objective is not None else ()
    kind = next((kind for name, kind in models if (name or "reward") == found.where), "")
    weight = next((one for name, one in bad if (name or "reward") == found.where), "")
    if weight and line is None:
        advice = f"`{found.where}` is a model, and its `{weight}` is not finite: {_RELOAD}"
        return replace(found, lines=(advice, *(x for x in found.lines if x not in _ADVICES)))
    if kind and line is None:
        advice = f"`{found.where}` is a model whose weights are {kind}: {_of_model(kind)}"
        return replace(found, lines=(advice, *(one for one in found.lines if one not in _ADVICES)))
    if line is None:
        return found
    defined = f"`{line.function}` is defined at {line.short}: `{line.text}`"
    return replace(found, source=line, lines=(defined, *found.lines))


def _of_model(kind: str) -> str:
    if kind == "float16":
        return "load it in the format that it was trained in, or in float32"
    return "look for weights of it that are not finite (`nanstop scan CHECKPOINT`)"


def _title(told: Sequence[Signal]) -> str:
    return "a reward is too large" if _is_finite(told) else "a reward is not finite"


def _advice(told: Sequence[Signal]) -> str:
    return _BOUND if _is_finite(told) else _ADVICE


def _is_finite(told: Sequence[Signal]) -> bool:
    return all(one.value is not None and math.isfinite(one.value) for one in told)


def _word(value: float | None) -> str:
    if value is not None and math.isfinite(value):
        return f"as large as {number(value)}"
    return "NaN" if value is None or math.isnan(value) else "infinite"


_RELOAD = "load it from a checkpoint that is (`nanstop scan CHECKPOINT`), or mend what fills it"
_WEIGHS = "it weighs the log-probabilities of what was chosen, as a reward or an advantage does"
_ADVICE = "give a completion that cannot be scored a finite worst reward"
_BOUND = "bound the reward by a clamp or `tanh`, or give its logarithm"
_ADVICES = (_ADVICE, _BOUND)
_WEIGHT = (
    "Keep it finite where it is made: divide by a count of 1 or more (`clamp(min=1)`), and by a "
    "deviation and a small number; give what cannot be scored a finite worst reward."
)
_TOO_LARGE = (
    "so large that float32 has no square of them: their groups' advantages are 0, or overflow"
)
_DERIVED = (
    "where it was made of rewards before the model was called: look for a reward that is none, for "
    "a deviation of one reward, or one of 0"
)


def _absorbed(evidence: Evidence) -> Diagnosis | None:
    kinds: tuple[tuple[str, str, Confidence], ...] = (
        (INF, "infinite: their groups' advantages are 0, or overflow", "certain"),
        (NAN, "NaN: such a completion teaches nothing, or counts as if it were worth 0", "certain"),
        (HUGE, _TOO_LARGE, "certain"),
        (UNSCORED, "missing: no function scored the completion", "likely"),
    )
    for series, what, confidence in kinds:
        for name, rows in named(evidence, series).items():
            step, share = rows[0]
            found = Diagnosis(
                code="NS704",
                title="a reward is too large" if series == HUGE else "a reward is not finite",
                cause=f"{_percent(share)} of the rewards at step {step} are {what}",
                confidence=confidence,
                lines=(_BOUND if series == HUGE else _ADVICE,),
                where=name or "reward",
            )
            return _with_line(found, evidence)
    return None


def _percent(share: float) -> str:
    return f"{100.0 * share:.3g} %"


RULE = Rule(
    "NS704",
    "non-finite-reward",
    "a reward is NaN, infinite or missing",
    check,
    ("incident", "gauge"),
)
