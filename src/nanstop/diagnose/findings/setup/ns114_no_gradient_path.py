"""No update can reach a parameter that is to be trained.

## What happened
Nothing is trainable, no backward is made, the optimizer holds other tensors than the model's, or
gradients cannot come through to what is trainable. The loss is computed, steps are counted,
checkpoints are written, and the model stays what it was.

## Why it happens
Reentrant checkpointing runs each block without a graph and rebuilds it in backward, which autograd
does only for a block with an input that requires a gradient. Token ids have none, and the output of
a frozen embedding neither: of 32 layers of LoRA not one gets a gradient. torch says so once, in a
warning, and where nothing outside the blocks is trained `backward` raises `element 0 of tensors
does not require grad`. transformers 5.23 avoids both by itself: it checkpoints with
`use_reentrant=False` and lets the embedding's output require a gradient. What is left are older
versions, `torch.utils.checkpoint` in a model of one's own, and `use_reentrant=True`, which TRL 1.16
forces under DeepSpeed ZeRO-3 with PEFT. An optimizer that was made before `get_peft_model` or for
an earlier `model` keeps the old tensors: it updates 0 of the parameters that are trained.
(`model.half()` is harmless there: the Parameter objects stay the same.) So does `model.head =
nn.Linear(...)` after it: the new head gets gradients, is in no optimizer and stays as it is, and
the old one, which it holds, is no part of the model any more. An optimizer of the body alone trains
all that lies below a last layer that stays as it was drawn. A `.detach()`, `.item()` or
`torch.no_grad()` on the way to the loss ends the graph, and adapters that are merged are left out
of it: told after 16 updates, where gradients had come before. LoRA adds B A x alpha / r, and B
starts at zero: with alpha 0 both gradients are exactly 0 for ever. So they are where A is 0 as well
as B (a model initialised after its adapters): 0 times something, each. Two layers that both begin
with zeros stay so, too, beside a bias that does not.

A part that is cut off alone is told after 8 updates without a gradient of it, where the loss is
another one with other values of it, or its module is only run under `no_grad`; what nothing hangs
on (a pooler) or somebody else moves (an average) is not. So is an optimizer that never had a
gradient (a generator of detached samples): the only one after three updates. Behind `torch.round`
or a sign gradients are zeros, and so behind `a - a` and `a / a` (a ratio to an old policy that is
not detached, the one weight of a router over its own sum): told where gradients come with that
operation passed by. Rows of a weight that begin with one number and get one gradient stay one unit.

## Example
```python
import torch
from peft import LoraConfig, get_peft_model

model = torch.nn.Sequential(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
model = get_peft_model(model, LoraConfig(target_modules=["0"]))
held = {id(p) for group in optimizer.param_groups for p in group["params"]}
sum(id(p) in held for p in model.parameters() if p.requires_grad)     # 0
```

## Fix
1. `activation_checkpointing_kwargs={"use_reentrant": False}` (once `gradient_checkpointing_kwargs`,
   a name of which transformers 5.23 warns). Cost: none; it is the default of 5.23.
2. `model.enable_input_require_grads()` before training, where reentrant checkpointing has to stay.
   Cost: one more gradient, of the embedding's output.
3. Make the optimizer after the model is complete, or `optimizer.add_param_group` for what came
   later. Cost: none.
4. See that what is to be trained has `requires_grad`, and that the loss comes from it without a
   detour. Cost: none.
5. Begin one of two factors with random values. Cost: none.

## Fix safety
All of these change training from nothing to something.

## Not to be confused with
NS111: updates that are rounded away. NS303: gradients that are flushed to zero. NS701: a reward
that never differs. NS802: a logged loss of 0. NS107: a quantised base without adapters.

## References
- https://github.com/huggingface/transformers/issues/26221
- https://github.com/huggingface/trl/issues/3089
- https://github.com/huggingface/trl/issues/2486
- https://github.com/huggingface/peft/issues/1142
- https://github.com/locuslab/open-unlearning/issues/178
"""

from __future__ import annotations

from collections.abc import Sequence

from nanstop.diagnose.evidence.accounts import has_signal, repeated
from nanstop.diagnose.evidence.candidates import half_trainables
from nanstop.diagnose.evidence.no_gradient import none_arrives, part_behind, refused, units_copied
from nanstop.diagnose.evidence.reading import has_masters, sighting, standing
from nanstop.diagnose.evidence.rule import Reason, Rule
from nanstop.records import (
    Confidence,
    Diagnosis,
    Evidence,
    GradientAccount,
    GradientPath,
    RunFacts,
    Sighting,
)
from nanstop.wording import counted, listed

_FIVE, _LATE = 5, 8
"""Looks of one of several optimizers that never has a gradient, and the update of the last."""
_THREE = 3
"""Looks in a row, up to update 2: of the only optimizer, and of a layer that is trained around."""
_SIX = 6
"""Looks, up to update 16: scripts take turns with what they train."""
_REPLACED = "the optimizer holds what the model has replaced"


def check(evidence: Evidence) -> Diagnosis | None:
    """Return why no gradient or no update comes to what is to be trained."""
    facts = standing(evidence)
    if evidence.accounts:
        return (
            _no_backward(evidence)
            or _replaced(evidence)
            or _left_at_the_end(evidence)
            or _never_moved(evidence)
            or _never_reached(evidence)
        )
    reason = (
        _nothing_trainable(facts) or _held_elsewhere(facts) or _cut_off(facts) or _scaled(facts)
    )
    if evidence.incident is not None:
        return refused(evidence.incident, reason, facts)
    seen = _seen(evidence, facts)
    return reason and reason.diagnosis("NS114", where=facts.host, seen=seen)


def _no_backward(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if a run that is over has asked for updates and made no backward."""
    account = evidence.accounts[-1]
    if not account.lacks_backwards:
        return None
    reason = Reason(
        "likely",
        "no backward was made",
        f"{account.optimizer} was asked for {account.num_asked} updates, and had no gradient once",
        "call `loss.backward()` before `optimizer.step()`",
        next(iter(account.updated_at), None),
        trains_nothing=True,
    )
    return _told(reason, evidence, evidence.accounts[-1:])


def _replaced(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if what gets gradients has taken the place of what the optimizer holds."""
    twice = repeated(evidence.accounts, 2)
    if not twice or not all(account.num_replaced for account in twice):
        return None
    made = twice[-1].made_at
    num = counted(twice[-1].num_replaced, "parameter")
    reason = Reason(
        "likely",
        _REPLACED,
        (
            f"{num} with gradients are in no optimizer, and it holds as many of the same shapes "
            "that get none"
        ),
        "make the optimizer after the model is complete",
        made,
        trains_nothing=twice[-1].is_only and twice[-1].num_with_gradient == 0,
    )
    return _told(reason, evidence, twice)


def _left_at_the_end(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if the layers of a model are trained through a last one that no optimizer
    has.
    """
    looks = repeated(evidence.accounts, _THREE)
    if not looks or not all(one.num_at_the_end and has_signal(one) for one in looks):
        return None
    num = counted(looks[-1].num_at_the_end, "tensor")
    reason = Reason(
        "likely",
        "the last layer is in no optimizer",
        (
            f"{num} of the model's last layer get gradients and hold the values of the start at "
            f"update {looks[-1].at.step}; the optimizer has what comes before"
        ),
        "give the optimizer the whole model's parameters, or freeze by requires_grad",
        looks[-1].made_at or standing(evidence).optimizer_at,
    )
    return _told(reason, evidence, looks)


def _never_moved(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if a script's own updates leave tensors with gradients as they are, and
    change others.
    """
    looks = repeated(evidence.accounts, _SIX)
    if not looks or not all(one.is_own and one.num_still for one in looks[1:]):
        return None
    source = looks[-1].updated_at[-1] if looks[-1].updated_at else None
    num = counted(looks[-1].num_still, "sampled tensor")
    reason = Reason(
        "likely",
        "the script's own update leaves out what has gradients",
        f"{num} with gradients hold the values of the start at update {looks[-1].at.step}",
        "update all that is to be trained",
        source,
        looks[-1].given_at,
    )
    return _told(reason, evidence, looks)


def _never_reached(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if nothing that an optimizer holds ever had a gradient when it made an
    update.
    """
    is_only = evidence.accounts[-1].is_only
    looks = repeated(evidence.accounts, _THREE if is_only else _FIVE)
    if not looks or not all(one.num_with_gradient == 0 for one in looks) or looks[-1].was_reached:
        return None
    if has_signal(looks[-1]) or looks[-1].at.step < (0 if is_only else _LATE):
        return None
    are_unheld = all(one.num_unheld for one in looks)
    # Hooks on gradients may train what it holds, each with an optimizer of its own.
    if not are_unheld and not all(one.were_weights_still for one in looks):
        return None
    made = looks[-1].made_at
    cause = (
        f"{looks[-1].optimizer} has made updates up to {looks[-1].at.step}, and in no look did "
        "any of its parameters have a gradient: it changes nothing"
    )
    advice = "look for detach or no_grad before its loss"
    if are_unheld:
        advice = "give it the parameters of what its loss trains"
        cause += (
            f"; {counted(looks[-1].num_unheld, 'parameter')} with gradients are in no optimizer"
        )
    reason = Reason(
        "likely",
        "an optimizer never has a gradient",
        cause,
        advice,
        made,
        trains_nothing=looks[-1].is_only,
    )
    return _told(reason, evidence, looks)


def _told(reason: Reason, evidence: Evidence, looks: Sequence[GradientAccount]) -> Diagnosis:
    seen = sighting(evidence, "optimizer", since=looks[0].at.step)
    return reason.diagnosis("NS114", where=standing(evidence).host, seen=seen)


def is_mostly_unreached(path: GradientPath) -> bool:
    """Return whether one backward reached few of the trainables; experts take turns."""
    return path.num_reached is not None and path.num_reached < path.num_tensors / 3


def _seen(evidence: Evidence, facts: RunFacts) -> Sighting | None:
    """Return where it was met: gradients counted after backward, or unused by an update."""
    path = facts.gradient_path
    if path is None or path.num_reached is None or "gradient_path" not in evidence.learned:
        return None
    if _nothing_trainable(facts) is not None:
        return None
    if _held_elsewhere(facts) is not None or path.replaced:
        return sighting(evidence, "optimizer")
    told = path.stuck or path.cut or path.behind or path.copied
    met = is_mostly_unreached(path) or bool(told)
    return sighting(evidence, "backward") if met else None


def _nothing_trainable(facts: RunFacts) -> Reason | None:
    path = facts.gradient_path
    if path is None or path.num_trainable or not facts.param_groups:
        return None
    frozen = sum(group.num_tensors for group in facts.param_groups)
    cause = f"all {counted(frozen, 'parameter')} of the model are frozen"
    advice = "attach adapters, or set requires_grad"
    if facts.adapter is not None:
        advice = (
            "its adapter is frozen, too: load it with `is_trainable=True`, or set requires_grad"
        )
    return Reason("certain", "nothing is trainable", cause, advice)


def _held_elsewhere(facts: RunFacts) -> Reason | None:
    path = facts.gradient_path
    if path is None or not has_masters(facts):
        return None
    # An engine, and an optimizer for half weights, may hold float32 copies that it writes back
    # itself.
    if facts.world_size > 1 or facts.veto != "yes" or half_trainables(facts):
        return None
    # A loop may hand the gradients to copies of its own:
    # its first update tells, and what arrived is noted after it.
    if facts.host == "loop" and path.num_reached is None:
        return None
    return Reason(
        "certain",
        "the optimizer holds nothing that is trained",
        f"{counted(path.num_tensors, 'tensor')} are trainable, and it was made with others",
        "make the optimizer after the model is complete",
        facts.optimizer_at,
        trains_nothing=True,
    )


def _cut_off(facts: RunFacts) -> Reason | None:
    """Return why gradients come to none, or few, of what is trained, by what a backward showed."""
    path = facts.gradient_path
    if path is None or not (path.num_trainable or path.cut):
        return None
    return (
        none_arrives(path, facts.adapter)
        or _part_cut_off(path)
        or part_behind(path)
        or _part_replaced(facts, path)
        or _stuck(facts, path)
        or units_copied(path)
        or _few_arrive(path)
        or _none_enters(path)
    )


def _part_cut_off(path: GradientPath) -> Reason | None:
    if not path.cut:
        return None
    held = "that the optimizer holds" if path.num_trainable else "that the loss hangs on"
    cause = (
        f"{counted(len(path.cut), 'tensor')} {held} got no gradient in the first updates: "
        f"{listed(path.cut)}"
    )
    why = "it is run without a graph" if path.cut_at else "the loss is another with other ones"
    advice = "look for detach, .data, item or no_grad, or leave them out of the optimizer"
    # A tower that is run under no_grad on purpose is often in the optimizer all the same.
    sure: Confidence = "possible" if path.cut_at else "likely"
    shown_at = path.cut_at or path.lost_at
    return Reason(sure, "a part is cut off", f"{cause}; {why}", f"{shown_at}  {advice}".strip())


def _part_replaced(facts: RunFacts, path: GradientPath) -> Reason | None:
    if not path.replaced:
        return None
    cause = (
        f"{counted(len(path.replaced), 'parameter')} with gradients are in no optimizer: "
        f"{listed(path.replaced)}; those that it holds under these names have been no part of the "
        f"model since an update after {path.replaced_after}"
    )
    advice = "make the optimizer after the model is complete, or give it optimizer.add_param_group"
    return Reason("likely", _REPLACED, cause, advice, facts.optimizer_at)


def _stuck(facts: RunFacts, path: GradientPath) -> Reason | None:
    if not path.stuck:
        return None
    cause = (
        f"{counted(len(path.stuck), 'tensor')} hold only zeros: {listed(path.stuck)}; the gradient "
        "of each is a multiple of another"
    )
    advice = "begin one factor of each product with random values"
    if facts.adapter is not None:
        advice = (
            "begin one factor of each product with random values: lora_A, zeros for lora_B only"
        )
    return Reason("certain", "gradients are exactly 0, and will be", cause, advice)


def _few_arrive(path: GradientPath) -> Reason | None:
    if path.num_reached is None or not is_mostly_unreached(path):
        return None
    missing = path.num_tensors - path.num_reached
    tensors = counted(path.num_tensors, "trainable tensor")
    cause = f"after one backward {missing} of {tensors} have none"
    advice = (
        "look for reentrant checkpointing of blocks whose inputs require no gradient, or a detach"
    )
    title = "no gradient arrives at most of what is to be trained"
    return Reason(
        "likely",
        title,
        f"{cause}: {listed(path.unreached, of=missing)}" if path.unreached else cause,
        advice,
    )


def _none_enters(path: GradientPath) -> Reason | None:
    if not path.reentrant or path.inputs_require_grad is not False:
        return None
    cause = "reentrant checkpointing, and the embedding's output requires no gradient"
    fix = 'checkpointing with {"use_reentrant": False}, or model.enable_input_require_grads()'
    return Reason("likely", "no gradient enters the checkpointed blocks", cause, fix)


def _scaled(facts: RunFacts) -> Reason | None:
    adapter = facts.adapter
    if adapter is None or adapter.kind != "LORA" or adapter.alpha != 0.0:
        return None
    cause = "lora_alpha is 0: what the adapters compute is multiplied by 0"
    return Reason(
        "certain", "adapters that are scaled by 0", cause, "set lora_alpha, usually to r or 2 r"
    )


RULE = Rule(
    "NS114",
    "no-gradient-path",
    "no update reaches what is to be trained",
    check,
    ("static", "incident", "account"),
    yields_to=("NS107",),
)
