"""A setting of the optimizer, the schedule or the objective is where no published recipe has it.

## What happened
The learning rate, the warm-up, the clipping, the accumulation, `num_generations` or `beta` has a
value with which training cannot do what it is meant to, or one so far from published recipes that
it is more likely a slip.

## Why it happens
Adam divides each gradient by its own size, so it moves every element by about the learning rate,
whatever the loss is: a weight of typical size 0.02 is moved by half of itself in one step at 0.01,
by five times itself at 0.1. Large models take less: GPT-3 was trained from scratch at 6e-4 (125M
parameters) down to 6e-5 (175B), and fine-tuning takes a tenth of that; ten times as much as the
published rate is out of range. A warm-up of at least as many steps as the training never reaches
the rate that was set; one that still rises after 100,000 updates reaches it in no training that is
published (RoBERTa's takes 30,000): where a script sets its rate by itself, its own expression is
computed for later steps. A schedule made for 24 updates that is stepped for each of 8 micro-batches
is at its end after 3: the other 21 updates have a rate of 0 and move nothing. A line that is
followed on below 0 raises the loss from there. One that is made for all updates and stepped once an
epoch never leaves its beginning, a warm-up as a rule. Clipped to a norm c, N elements have a size
of c / sqrt(N); far below the optimizer's eps the update is divided by eps in place of its size, and
vanishes. A window longer than an epoch is cut short at its end. A group of 1 generation has an
advantage of r - mean(r) = 0; TRL 1.16 refuses it with a ValueError. The gradient of the DPO loss is
a multiple of beta: 0 learns nothing, a negative one prefers what was rejected; a negative weight of
the KL term drives the policy away. Decoupled weight decay takes rate x decay of each weight: 0.01 x
50 takes half of it away in one update. That is measured: the part of an update that points along
the weights, beside what follows the gradients, in four looks in a row. So is an update that a
script without an optimizer makes by itself, and that adds 0 to every weight, or a rate of 0 that an
optimizer was made with, that no schedule has, and that no file of the script sets: said after three
updates. A rate of 1e-12 is none in effect: float32 rounds the update away, which is said where 95 %
of the sampled weights that have a gradient stay as they are in four looks in a row, at one and the
same rate of 1e-6 or less.

## Example
```python
import torch

def first_step(lr):
    weight = torch.nn.Parameter(torch.tensor([0.02]))
    weight.grad = torch.tensor([3e-4])                        # of any size: Adam divides by it
    torch.optim.AdamW([weight], lr=lr, weight_decay=0.0).step()
    return weight.item()

round(first_step(2e-4), 4)          # 0.0198
round(first_step(2e-1), 4)          # -0.18
```

## Fix
1. Take the published value: LoRA 1e-5 to 5e-4, full fine-tuning 1e-6 to 5e-5, DPO 5e-7 to 5e-6;
   clipping at 1.0; a warm-up of 3 to 10 % of the steps; beta 0.1 for DPO, 0 to 0.05 for GRPO; 4 to
   16 generations; a weight decay of 0 to 0.1. Cost: none.
2. Measure the rate: `nanstop lr-range train.py`. Cost: about a hundred steps, thrown away.
3. Step the schedule once an update, beside `optimizer.step()`, and make it for as many steps as
   there are updates; `max(0.0, 1 - step / steps)` does not go below 0. Cost: none.

## Fix safety
Changes training, as it is meant to.

## Not to be confused with
NS404, a run that has diverged. NS111: a rate so small that rounding takes the update away. NS802: a
loss of 0 by design. A rate that is unusual and works is no fault: confidence is "possible" where
only published practice speaks against it.

## References
- https://github.com/huggingface/transformers/issues/27121
- https://github.com/karpathy/nanoGPT/issues/418
- https://github.com/haotian-liu/LLaVA/issues/1301
- https://github.com/haotian-liu/LLaVA/issues/918
- https://github.com/ssbuild/chatglm_finetuning/issues/28
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from nanstop.diagnose.evidence.accounts import great_decay, own_rate_of_0, vanishing_rate
from nanstop.diagnose.evidence.candidates import updated_in_half
from nanstop.diagnose.evidence.reading import VERY_LONG, sighting, standing, step_moves
from nanstop.diagnose.evidence.rule import Rule
from nanstop.frozen import frozen
from nanstop.records import (
    Confidence,
    Diagnosis,
    Evidence,
    OptimizerFacts,
    RateFacts,
    RunFacts,
    Sighting,
    SourceLine,
    StepPerRate,
)
from nanstop.records.vocabulary import RANK
from nanstop.wording import counted

PRETRAINING_RATES = ((125e6, 6e-4), (350e6, 3e-4), (1.3e9, 2e-4), (6.7e9, 1.2e-4), (175e9, 6e-5))
"""Parameters and peak learning rate of GPT-3 (Brown et al., 2020, table 2.1)."""

LONG = 0.5
"""A step of a language model, in sizes of a typical weight."""

DEAD = 1e-9
"""Share of the highest rate from which downwards an update moves nothing."""
LONGEST_WARM_UP = 100_000
"""Updates. That of RoBERTa takes 30,000 (Liu et al., 2019, table 9), others 10,000 or less."""
TIMES_PUBLISHED = 10.0
LARGEST_BETA = {"dpo": 10.0, "kto": 10.0, "grpo": 1.0, "rloo": 1.0}
"""Far above published values: 0.01 to 0.5 for the former, 0 to 0.05 for the latter."""
_NOT_0 = "a rate that is not 0"


@frozen
class Oddity:
    """One setting that is out of range: which, its value, what it does, the line that is to be
    changed, whether no update has moved anything by it, and the code of what measures it.
    """

    confidence: Confidence
    setting: str
    effect: str
    source: SourceLine | None = None
    trains_nothing: bool = False
    measured_by: str = ""


def check(evidence: Evidence) -> Diagnosis | None:
    """Return every setting that is out of range, the most certain first."""
    if evidence.accounts:
        return _by_updates(evidence)
    facts = standing(evidence)
    found = [*_rate(facts), *_schedule(facts), *_window(facts), *_objective(facts)]
    if not found:
        return None
    first, *others = sorted(found, key=lambda oddity: RANK[oddity.confidence])
    return Diagnosis(
        code="NS113",
        title=f"out of range: {first.setting}",
        cause=first.effect,
        confidence=first.confidence,
        lines=tuple(f"also {other.setting}: {other.effect}" for other in others),
        where=facts.host,
        seen=_seen(evidence, facts),
        usual_cure=_NOT_0 if first.trains_nothing else "",
        measured_by="" if others else first.measured_by,
        trains_nothing=first.trains_nothing,
    ).at(first.source)


def _by_updates(evidence: Evidence) -> Diagnosis | None:
    """Return what updates themselves show of a setting: a rate of next to 0, or a decay that takes
    away what is learned.
    """
    accounts = evidence.accounts
    facts = standing(evidence)
    found = own_rate_of_0(accounts) or great_decay(accounts, facts.optimizer)
    if found is None and not updated_in_half(facts):
        found = vanishing_rate(accounts, facts.optimizer)
    if found is None:
        return None
    seen = found.seen
    source = found.made_at or next(iter(seen[-1].updated_at), None)
    is_still = all(one.is_own and one.share_moved == 0.0 for one in accounts)
    return Diagnosis(
        code="NS113",
        title=f"out of range: {found.setting}",
        cause=found.effect,
        confidence="likely",
        lines=tuple(line.quoted for line in seen[-1].given_at),
        where=facts.host,
        seen=sighting(evidence, "optimizer", since=seen[0].at.step),
        usual_cure=_NOT_0 if is_still else "",
        trains_nothing=is_still,
    ).at(source)


def _seen(evidence: Evidence, facts: RunFacts) -> Sighting | None:
    """Return the first of the updates that moved nothing."""
    if facts.rates is None or evidence.at is None or "rates" not in evidence.learned:
        return None
    since = evidence.at.step + 1 - max(1, facts.rates.num_dead)
    return sighting(evidence, "optimizer", since=max(0, since))


def _rate(facts: RunFacts) -> Iterator[Oddity]:
    optimizer = facts.optimizer
    if optimizer is None or optimizer.lr is None:
        return
    rate, setting = optimizer.lr, f"learning rate {optimizer.lr:g}"
    # A loop may set its rate before each step, and a schedule may begin at 0.
    by_now = facts.rates is None and not optimizer.scheduled and facts.schedule is not None
    if rate == 0.0 and by_now:
        nothing = "no update moves anything"
        yield Oddity("certain", setting, nothing, facts.optimizer_at, measured_by="NS113")
    if not math.isfinite(optimizer.rate or 0.0):
        setting = f"learning rate {optimizer.rate:g}"
        is_made = math.isfinite(optimizer.scheduled or math.nan)
        at = facts.schedule_at if is_made else facts.optimizer_at
        yield Oddity("certain", setting, "an update makes every weight NaN", at)
    if optimizer.per_rate is None or not math.isfinite(rate):
        return
    too_long = list(_step(facts, optimizer, optimizer.per_rate))
    yield from too_long
    most = _largest_rate(facts)
    if not too_long and most is not None and rate > most:
        effect = f"models of this kind were trained from scratch at {most / TIMES_PUBLISHED:.1g}"
        sure: Confidence = "likely" if rate > TIMES_PUBLISHED * most else "possible"
        yield Oddity(sure, setting, effect, facts.optimizer_at)


def _step(facts: RunFacts, optimizer: OptimizerFacts, per_rate: StepPerRate) -> Iterator[Oddity]:
    """Yield a step that is long beside the weights that there are."""
    step = optimizer.step
    if step is None:
        return
    # Networks of other kinds are trained with steps of half their weights' size;
    # so does Adafactor train, whose steps are shares of it.
    usual = facts.model_type is not None and not per_rate.relative
    if step.length >= (LONG if usual else VERY_LONG) * step.weight:
        sure = step.length >= VERY_LONG * step.weight
        moved, setting = step_moves(optimizer.name, step), f"learning rate {step.lr:g}"
        yield Oddity("likely" if sure else "possible", setting, moved, facts.optimizer_at)


def _largest_rate(facts: RunFacts) -> float | None:
    """Return ten times the published rate for as many trained parameters;
    None below the smallest that is published.

    Of a language model whose weights are not there yet, that of the smallest.
    """
    optimizer, groups = facts.optimizer, facts.param_groups
    if optimizer is None or optimizer.per_rate is None or optimizer.per_rate.relative:
        return None
    trained = sum(group.num_elements for group in groups if group.trainable)
    unseen = optimizer.step is None and not any(group.num_elements for group in groups)
    large = facts.adapter is None and trained >= PRETRAINING_RATES[0][0]
    if not large and not (unseen and facts.model_type is not None):
        return None
    rates = [rate for size, rate in PRETRAINING_RATES if size <= trained]
    return TIMES_PUBLISHED * (rates or [PRETRAINING_RATES[0][1]])[-1]


def _schedule(facts: RunFacts) -> Iterator[Oddity]:
    """Yield what the rates come to: those of the whole schedule, as far as they are known."""
    yield from _warm_up(facts)
    rates, made = facts.rates, facts.schedule_at
    if rates is None or not math.isfinite(rates.highest):  # beside that any other is next to 0
        return
    if rates.lowest < 0.0:
        effect = f"the rate comes to {rates.lowest:.2g}: updates go up the gradient from there on"
        yield Oddity("certain" if made else "likely", "a schedule that goes below 0", effect, made)
    elif rates.num_dead == rates.num_used:
        at = facts.optimizer_at if rates.is_given else made
        yield Oddity("certain", "a learning rate of 0", _never(rates), at, trains_nothing=True)
    elif rates.num_dead and rates.coming <= DEAD * rates.highest:
        often = _too_often(rates)
        effect = f"{_of_all(rates)} have a rate of 0, and so has every later one{often}"
        source = facts.stepped_at if often else made
        yield Oddity("certain", "a schedule that runs out", effect, source)
    elif rates.length:
        effect = (
            f"its schedule is {rates.length:,} steps long, as many as there were updates, and was "
            f"stepped {counted(rates.num_schedule_steps, 'time')}; step it after each update"
        )
        at = facts.stepped_at or made
        yield Oddity("likely", "a schedule that is stepped too rarely", effect, at)
    elif rates.rising >= LONGEST_WARM_UP:
        share = f"{100 * rates.highest / rates.coming:.2g} %"
        effect = (
            f"after {counted(rates.num_used, 'update')} its rate is {share} of what it is after "
            f"{rates.rising:,} more, and still rises then"
        )
        setting = f"a warm-up of more than {LONGEST_WARM_UP:,} updates"
        yield Oddity("likely", setting, effect, rates.set_at or made)
    elif rates.coming > 2 * rates.highest:
        share = f"{100 * rates.highest / rates.coming:.2g} %"
        effect = f"{counted(rates.num_used, 'update')} come to {share} of the rate that it rises to"
        yield Oddity("likely", "a warm-up longer than the training", effect, made)


def _warm_up(facts: RunFacts) -> Iterator[Oddity]:
    schedule = facts.schedule
    if schedule is None or not schedule.num_steps or not schedule.warmup_steps:
        return
    if schedule.warmup_steps >= schedule.num_steps:
        setting = f"warm-up of {counted(schedule.warmup_steps, 'step')}"
        ends = counted(schedule.num_steps, "step")
        effect = f"the training ends after {ends}: its rate is never reached"
        yield Oddity("certain", setting, effect)


def _never(rates: RateFacts) -> str:
    """Return why no update of a training moves anything."""
    if rates.is_given:
        return "the optimizer was made with it, and nothing sets another: no update moves anything"
    if rates.coming == 0.0:
        return "its schedule gives 0 for good: no update moves anything"
    if rates.num_schedule_steps == 0 and not rates.planned:
        return f"its schedule begins there and was not stepped in {rates.num_used} updates"
    return f"no one of {counted(rates.num_used, 'update')} moved anything"


def _of_all(rates: RateFacts) -> str:
    return f"{rates.num_dead} of {rates.num_used} updates"


def _too_often(rates: RateFacts) -> str:
    """Return that a schedule was stepped for each micro-batch, where it was."""
    per_update = round(rates.num_schedule_steps / rates.num_used)
    if per_update < 2:
        return ""
    whole = "as often as there are micro-batches" if per_update == rates.num_micro else "not once"
    return f"; it was stepped {per_update} times an update, {whole}"


def _window(facts: RunFacts) -> Iterator[Oddity]:
    """Yield what clipping, momentum and accumulation do to an update."""
    if facts.clip is not None and facts.clip < 0.0 and facts.schedule is None:
        at = facts.sink_at if facts.sinks[:1] == ("clip",) else None
        yield Oddity("certain", f"clipping at {facts.clip:g}", "gradients change their sign", at)
    path, eps = facts.gradient_path, facts.optimizer.eps if facts.optimizer is not None else None
    if facts.clip is not None and facts.clip > 0.0 and path is not None and path.num_trainable:
        size = facts.clip / math.sqrt(path.num_trainable)
        if eps is not None and size < eps / 100:
            is_clip = size * max(1.0, 1.0 / facts.clip) >= eps / 100  # clipped at 1 they would not
            setting = f"clipping at {facts.clip:g}" if is_clip else f"the optimizer's eps {eps:g}"
            effect = f"elements of about {size:.1g} vanish beside the optimizer's eps of {eps:g}"
            yield Oddity("likely", setting, effect, measured_by="NS307" if is_clip else "")
    momentum = facts.optimizer.momentum if facts.optimizer is not None else None
    if momentum is not None and momentum >= 1.0:
        effect = f"each update adds {momentum:g} times the one before: none fades"
        yield Oddity("certain", f"momentum {momentum:g}", effect, facts.optimizer_at)
    epoch = facts.schedule.micros_per_epoch if facts.schedule is not None else None
    if epoch is not None and epoch < facts.num_micro:
        effect = f"an epoch ends after {epoch} of them"
        yield Oddity("possible", f"accumulation over {facts.num_micro} micro-batches", effect)


def _objective(facts: RunFacts) -> Iterator[Oddity]:
    objective = facts.objective
    if objective is None:
        return
    group, beta, method = objective.num_generations, objective.beta, objective.method
    if group is not None and group < 2:
        yield Oddity(
            "certain", f"num_generations {group}", "every advantage is 0: nothing is learnt"
        )
    if beta is None or method not in LARGEST_BETA:
        return
    weighs_kl = group is not None
    if beta < 0.0:
        away = "the policy is driven from the reference"
        effect = away if weighs_kl else "what was rejected is preferred"
        yield Oddity("certain", f"beta {beta:g}", effect)
    elif beta == 0.0 and not weighs_kl:
        effect = "the loss is log 2 whatever the model says: nothing is learnt"
        yield Oddity("certain", "beta 0", effect)
    elif not beta <= LARGEST_BETA[method]:  # NaN is neither
        effect = (
            "published values are 0 to 0.05" if weighs_kl else "published values are 0.01 to 0.5"
        )
        yield Oddity("possible" if math.isfinite(beta) else "certain", f"beta {beta:g}", effect)


RULE = Rule(
    "NS113",
    "hyperparameter-out-of-range",
    "a setting that no recipe has",
    check,
    ("static", "account"),
)
