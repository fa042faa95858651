"""Nothing in the batch tells better from worse: the objective has no gradient.

## What happened
The rewards of every group are equal, or the gradient is exactly zero in update after update, or
each row is compared with a copy of itself and gradients cancel. Everything is finite, the loss is 0
or stands still, and no weight has a reason to move.

## Why it happens
GRPO and RLOO learn from differences inside a group: the advantage is the reward less the group's
mean. Four rewards of 1.0 have the mean 1.0 and the advantages 0, 0, 0, 0, and with them the
gradient of all their tokens is 0 x grad(log p) = 0. A task that is solved with probability p leaves
p^G + (1 - p)^G of the groups of G without a difference: at p = 0.02 and G = 4 that is 92 %, at G =
16 still 72 %. A reward function that looks for a format which the model never writes, that compares
with a wrong column or catches its own exceptions and returns 0.0, leaves 100 %. Negatives that are
the other rows of a micro-batch are none where it has 1 row: the softmax of one score is 1, its loss
0, and accumulation over 8 such micro-batches adds up 8 zeros. So is a reward less the mean of a
group of 1, or of a mean over the wrong dimension: 0, whatever the reward. Pairs whose better answer
is a copy of the worse one have a margin of 0 whatever the weights are: the loss of DPO stays at log
2 = 0.693, and what is left of the gradient, 1e-7, are roundings. A loss that its line multiplies by
0 has no gradient at any weights: said after four updates, where nothing else hangs on them. Where
completions that were cut are masked, and none comes to its end, the mask of the batch is 0
throughout: an entry of zeros is named if a gradient arrives with ones in its place. A hinge whose
margin is always kept and units that are never above 0 have no slope: the operation is named that is
sent a gradient and passes none on. A loop is told after 64 updates, or at its end, where it never
had any gradient.

## Example
```
{'loss': 0.0, 'grad_norm': 0.0, 'reward': 0.0, 'reward_std': 0.0, 'frac_reward_zero_std': 1.0}
```

## Fix
1. Call the reward function on a few completions by hand: right column, right format, no exception
   turned into a number. Cost: minutes.
2. Grade in parts (format, then answer, then length), so that attempts differ.
   Cost: a reward to design.
3. Larger groups (`num_generations`) or a higher temperature. Cost: generation time in proportion.
4. Print one pair: `chosen` and `rejected` have to differ. Cost: none.
5. Prompts that the model solves sometimes: leave out those it always or never solves.
   Cost: a filter.

## Fix safety
All of these change training: from nothing to something.

## Not to be confused with
NS802: a loss of 0 with rewards that differ and a gradient that is not 0. NS114: no path leads from
the loss to the weights. NS303: the gradient exists in float32 and is flushed to zero in float16.
NS113: `num_generations=1`. A loss that is at its least for now, as that of a value network of zeros
before its first reward: with other weights it has a gradient. That is tried first.

## References
- https://github.com/huggingface/trl/issues/3857
- https://github.com/modelscope/ms-swift/issues/4547
- https://github.com/modelscope/ms-swift/issues/5571
- https://github.com/huggingface/trl/issues/4023
"""

from __future__ import annotations

from nanstop.diagnose.evidence.objective import ANSWERS_APART, REWARDS_APART
from nanstop.diagnose.evidence.reading import series_values, sighting, standing
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Diagnosis, Evidence, GradientEnd, GradientPath
from nanstop.wording import counted, listed, number

FROM_THE_START = 4
"""Steps without any difference from which a run that never had one is told of it."""
LATER = 16
"""The same of a run that has had some: rewards that are rarely won may pause."""
OF_ANY = 64
"""Updates without a gradient before a loop of unknown objective is told: rewards come late."""
ROUNDED = 1e-2
"""A norm that roundings of a group's mean may leave of equal rewards."""
_ALONE = {
    "one_class": (
        "the softmax of one entry is 1 whatever the weights are: the loss is constant",
        "the same with other weights",
        "more rows in one micro-batch, or classes",
    ),
    "own_mean": (
        "a value less the mean of one value is 0 whatever it is: nothing is better than another",
        "with differences there the loss is another",
        "groups of more than one row, or the mean over the other dimension",
    ),
}
"""By what was given: the cause, what confirmed it, what to do."""
_SAY_WHY = frozenset({"NS114", "NS209", "NS303", "NS306", "NS307", "NS503", "NS505", "NS701"})
"""Findings by which a gradient of 0 is no news."""


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if in several logs no reward differs, or no gradient came."""
    return (
        _times_zero(evidence)
        or _nothing_to_compare(evidence)
        or _copies(evidence)
        or _equal_rewards(evidence)
        or _no_gradient(evidence)
    )


def _times_zero(evidence: Evidence) -> Diagnosis | None:
    """Return that the whole loss is multiplied by a 0 that its line spells."""
    path = standing(evidence).gradient_path
    if path is None or path.zeroed_at is None or "gradient_path" not in evidence.learned:
        return None
    return Diagnosis(
        code="NS701",
        title="the loss is multiplied by 0",
        cause="every gradient is exactly 0, and is with other weights, too: nothing else of the "
        "loss hangs on what is trained",
        confidence="certain",
        confirmed="without what that line makes there is nothing to train",
        usual_cure="another factor than 0",
        seen=sighting(evidence, "loss"),
        trains_nothing=True,
    ).at(path.zeroed_at)


def _nothing_to_compare(evidence: Evidence) -> Diagnosis | None:
    """Return that each row's softmax is over one entry, or its advantage over a group of one, and
    that every gradient is 0.
    """
    probe = evidence.probe
    rows = [row for row in probe.objective if row.given in _ALONE] if probe else []
    if probe is None or not rows or not probe.are_all_zero:
        return None
    first = rows[0]
    cause, confirmed, advice = _ALONE[first.given]
    return Diagnosis(
        code="NS701",
        title="each row is compared with itself alone",
        cause=f"{cause}, and every gradient exactly 0",
        confidence="certain",
        confirmed=confirmed,
        lines=(first.line,) if first.line else (),
        usual_cure=advice,
        where=first.module or "loss",
        seen=sighting(evidence, "loss", op=first.op),
        trains_nothing=True,
    )


def _copies(evidence: Evidence) -> Diagnosis | None:
    """Return that a batch of pairs holds each row twice, and that gradients cancel by it."""
    rows = evidence.probe.objective if evidence.probe is not None else ()
    row = next((row for row in rows if row.given == "own_copy"), None)
    if row is None:
        return None
    size, names = row.width, listed(row.made_at)
    return Diagnosis(
        code="NS701",
        title="each row is compared with a copy of itself",
        cause=f"of {2 * size} rows the second half is a copy of the first, in update after update: "
        "their gradients cancel",
        confidence="certain",
        confirmed="with other rows in one half there is a gradient, and with other weights none",
        lines=(f"the same in both halves: {names}",),
        usual_cure=(
            "look at what makes the pairs: the better and the worse answer come from one column, "
            "or are cut to what they share"
        ),
        where="batch",
        seen=sighting(evidence, "loss"),
        trains_nothing=True,
    )


def _equal_rewards(evidence: Evidence) -> Diagnosis | None:
    dead = series_values(evidence, "frac_reward_zero_std")
    num_steps, always = _last_run([(step, share == 1.0) for step, share in dead], logs=True)
    if num_steps < (FROM_THE_START if always else LATER) or _learns_of_others(evidence):
        return None
    apart = _last(evidence, REWARDS_APART)
    if apart:
        return _weigh_nothing(num_steps)
    spread = series_values(evidence, "reward_std")[-1:]
    same = bool(spread) and spread[0][1] == 0.0
    rewards = series_values(evidence, "reward")[-1:]
    value = f": every one is {number(rewards[0][1])}" if same and rewards else ""
    return Diagnosis(
        code="NS701",
        title="no group of completions has rewards that differ",
        cause=f"{counted(num_steps, 'step')} in which every group's rewards are equal{value}",
        confidence="certain" if same else "likely",
        lines=("advantages are 0, and so is their gradient", _why_equal(evidence)),
        where="reward",
    )


def _learns_of_others(evidence: Evidence) -> bool:
    """Return whether a gradient comes without differences between rewards and without a term of a
    reference: a trainer may have advantages of its own (distillation).
    """
    objective = standing(evidence).objective
    norm = _last(evidence, "grad_norm") or 0.0
    return objective is not None and not objective.beta and norm > ROUNDED


def _weigh_nothing(num_steps: int) -> Diagnosis:
    """Return that functions tell answers apart, and that nothing of it is left in what they come to
    together.
    """
    return Diagnosis(
        code="NS701",
        title="rewards differ, and weigh nothing",
        cause=f"{counted(num_steps, 'step')} in which functions give the answers of a group other "
        "rewards, and all of them come to the same",
        confidence="certain",
        lines=(
            "advantages are 0, and so is their gradient",
            "look at what each is multiplied with (`reward_weights`), and at what they are cut to",
        ),
        where="reward",
    )


def _why_equal(evidence: Evidence) -> str:
    """Return what makes rewards equal: equal answers have no others."""
    if _last(evidence, ANSWERS_APART) == 0.0:
        return (
            "the answers of each group are the same, too: sampling chooses one token alone (see "
            "`temperature`, `top_k`, `top_p`, `min_p`)"
        )
    return "call the reward function by hand"


def _last(evidence: Evidence, name: str) -> float | None:
    rows = series_values(evidence, name)
    return rows[-1][1] if rows else None


def _no_gradient(evidence: Evidence) -> Diagnosis | None:
    norms = series_values(evidence, "grad_norm")
    num_steps, always = _last_run([(step, norm == 0.0) for step, norm in norms], logs=False)
    facts = standing(evidence)
    path = facts.gradient_path
    reached = path is None or path.num_reached != 0
    asks = facts.objective is not None
    dropped, end = (path.dropped, path.end) if path is not None else ((), None)
    is_known = asks or bool(dropped) or (evidence.is_over and always)
    least = (FROM_THE_START if always else LATER) if is_known else OF_ANY
    # A scaler that is too low, and float16, flush gradients to zero: another finding.
    if num_steps < least or not reached or _may_flush(evidence):
        return None
    if not _SAY_WHY.isdisjoint(evidence.told):
        return None
    since = next((step for step, norm in reversed(norms) if norm != 0.0), -1)
    elsewhere = [value for step, value in series_values(evidence, "grad_elsewhere") if step > since]
    # What has a gradient with other weights is at its least now:
    # a fit, or a value network before its first reward.
    if not elsewhere or elsewhere[-1] != 0.0:
        return None
    found = Diagnosis(
        code="NS701",
        title="the objective has no gradient",
        cause=f"the gradient was exactly 0 in {counted(num_steps, 'update')} in a row, and is "
        "with other weights, too",
        confidence="likely" if is_known else "possible",
        lines=(_end_of(end), _zeros_of(path)),
        where="gradient",
    )
    return found.at(end.source if end is not None else None)


def _zeros_of(path: GradientPath | None) -> str:
    if path is not None and path.dropped:
        return f"{listed(path.dropped)} drops all it is given: with p = 0.5 a gradient arrives"
    if path is not None and path.zeros:
        return f"all of {listed(path.zeros)} in the batch is 0: with ones there a gradient arrives"
    if path is not None and path.end is not None and path.end.factors:
        spelled = listed([one.text for one in path.end.factors])
        return f"its line multiplies with {spelled}, which is 0"
    if path is None or path.end is None:
        return (
            "look for advantages, weights or masks of the loss that are all 0, or for a model "
            "that is compared with itself"
        )
    return (
        "look at what it is given: numbers where it has no slope, or a factor, weights or a mask "
        "that are 0"
    )


def _end_of(end: GradientEnd | None) -> str:
    return f"{end.op} is sent a gradient that is not 0, and passes on none" if end else ""


def _may_flush(evidence: Evidence) -> bool:
    facts = standing(evidence)
    return facts.autocast == "float16" or any(g.dtype == "float16" for g in facts.param_groups)


def _last_run(rows: list[tuple[int, bool]], *, logs: bool) -> tuple[int, bool]:
    """Return how many steps the last rows that are all True cover, and whether there is no other
    row.

    A log at step k covers those since the log before it, or since step 0.
    """
    start = len(rows)
    while start and rows[start - 1][1]:
        start -= 1
    if start == len(rows):
        return 0, False
    if logs:
        return rows[-1][0] - (rows[start - 1][0] if start else 0), start == 0
    return len({step for step, _ in rows[start:]}), start == 0


RULE = Rule(
    "NS701",
    "no-learning-signal",
    "nothing in the batch tells better from worse",
    check,
    ("gauge", "static"),
    yields_to=("NS704",),
)
