"""Ranks that train one model together have other weights each.

## What happened
`DistributedDataParallel` lets every rank have a copy of the model, and keeps them alike: all begin
with the weights of rank 0, and each update takes the same gradients. Checksums of the weights, bit
for bit, are compared after backwards 0, 1, 2, 4, 8 and 64, and after every 512th. They
were not the same on all ranks. Nothing fails by that: every loss stays finite, each rank logs its
own, and the checkpoint holds the copy of one of them.

## Why it happens
The ranks never compare weights, they only add up gradients. Whatever one of them does beside that
stays for good: an update that is skipped on one rank, a learning rate of its own, a weight that is
written on one rank, a parameter that was registered after the model was wrapped, whose gradient
nobody exchanges, a call of `model.module`, after which none is, a loss scale of each rank's own.
From then on each gradient is the mean of gradients at different weights. With plain SGD the
distance stays what it was; with Adam it grows, as each copy goes its own way: at a learning rate of
0.001 a parameter whose gradient is not exchanged moves by 0.001 an update on each rank, and after
1000 updates two ranks can be 2 apart.

## Example
```python
import torch

weights = [torch.tensor([1.0]), torch.tensor([1.0])]      # of rank 0 and of rank 1
for step in range(3):
    mean = sum(weight - 3.0 for weight in weights) / 2    # the gradient that both get
    for rank, weight in enumerate(weights):
        if rank == 0 or step != 1:                        # one update is skipped on rank 1
            weight -= 0.5 * mean

[round(float(weight), 4) for weight in weights]           # [2.875, 2.375]
```

## Fix
1. Do on every rank what the report names: the update that one has skipped, the same option, the
   write to the weights or to the gradients (from numbers that all ranks have). Cost: none.
2. Register every parameter before the model is wrapped, and replace none after it.
   Cost: none.
3. Keep `init_sync=True`, and load weights before wrapping or the same file on every rank.
   Cost: one broadcast when the run begins.
4. Leave `no_sync` before the last backward ahead of each update. Cost: the exchange of gradients.
5. Call the wrapped model in training, `model(x)`, and `model.module` for what it saves and
   evaluates. Cost: the exchange of gradients.
6. Go on from a checkpoint: all ranks then load the same copy. Cost: the updates since it was saved.

## Fix safety
A run whose copies have parted does not train the model that its checkpoint holds. Nothing is
changed by nanstop: it tells, and the run goes on.

## Not to be confused with
Buffers are not compared: those of rank 0 are sent to all where the next forward begins, running
statistics of BatchNorm among them, or with `broadcast_buffers=False` each rank has its own. Nor are
parameters that DistributedDataParallel was told to ignore, sharded weights, sharded optimizer
state, and any model with a communication hook: local SGD lets copies part on purpose. NS606: the
gradient of the exchange is not finite.

## References
- https://docs.pytorch.org/docs/stable/notes/ddp.html
- https://github.com/pytorch/pytorch/issues/12603
- https://github.com/pytorch/pytorch/issues/69031
- https://github.com/pytorch/pytorch/issues/136009
- https://github.com/huggingface/nanotron/issues/242
"""

from __future__ import annotations

from collections.abc import Sequence

from nanstop.diagnose.evidence.accounts import quoted
from nanstop.diagnose.evidence.reading import standing
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Confidence, Diagnosis, Evidence, ReplicaFacts, Sighting
from nanstop.wording import counted, number


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if copies of a model differ between ranks."""
    found = standing(evidence).replicas
    if found is None:
        return None
    confidence, cause = _cause(found)
    return Diagnosis(
        code="NS607",
        title=f"`{found.weight}` is not the same on {_ranks(found.ranks)}",
        cause=cause,
        confidence=confidence,
        confirmed=_measured(found) if confidence == "certain" else "",
        lines=tuple(_lines(found)),
        where=found.weight,
        seen=Sighting(step=found.step),
        source=next(iter(found.written_at), None),
    )


def _cause(found: ReplicaFacts) -> tuple[Confidence, str]:
    """Return what parted the copies, certain where no other update can have."""
    if found.is_past_wrapper:
        return "likely", (
            "no update has taken gradients that the ranks had exchanged: the script calls the "
            "model inside of DistributedDataParallel (`model.module`), which nothing calls"
        )
    if found.last_equal is None:
        return "certain", (
            "the copies differed before the first update that was seen: the ranks have begun with "
            "other weights, which DistributedDataParallel has not made those of rank 0"
        )
    if len(set(found.num_updates)) > 1:
        return "certain", f"the ranks do not make the same updates: {_updates(found)}"
    if found.num_late:
        return "certain" if found.is_that_update else "likely", (
            f"{counted(found.num_late, 'update')} since step {found.last_equal} took gradients to "
            "which the last backward had added each rank's own after the exchange: in `no_sync`, "
            "or by a call of `model.module`"
        )
    if found.num_local:
        return "possible", (
            f"{counted(found.num_local, 'update')} since step {found.last_equal} took gradients "
            "that the ranks had not exchanged (`no_sync`), unless weights are averaged later on"
        )
    if found.option:
        return "likely", f"the optimizer's {_options(found)}"
    if found.state:
        return "likely", (
            f"the optimizer's `{found.state}` differed in step {found.last_equal} already, when "
            "all weights were equal"
        )
    return _by_gradient(found)


def _by_gradient(found: ReplicaFacts) -> tuple[Confidence, str]:
    seen: Confidence = "certain" if found.is_that_update else "likely"
    if found.consumed_equal is False and found.arrived_equal:
        return seen, (
            "its gradient was the same on all ranks after the exchange, and another on each when "
            "the update took it: what is done to it in between differs (unscaling, clipping, a "
            "line of the script)"
        )
    if found.arrived_equal is False and not found.is_exchanged:
        return seen, (
            "its gradient is each rank's own: the parameter was registered after the model was "
            "wrapped, so that DistributedDataParallel does not exchange it"
        )
    if found.arrived_equal is False:
        return "likely", "its gradient was not the same on all ranks when the backward was over"
    if found.consumed_equal:
        return "likely", (
            f"in step {_step(found)} the update took the same gradient on all ranks: weights are "
            "written beside it on one of them, or it computes otherwise there"
        )
    return "likely", "no update took a gradient of it: something has written to it on one rank"


def _step(found: ReplicaFacts) -> int | None:
    if found.looked_at is not None:
        return found.looked_at
    return found.last_equal if found.is_that_update else found.step


def _measured(found: ReplicaFacts) -> str:
    if found.last_equal is None:
        return "compared before any update"
    return f"all weights were the same in step {found.last_equal}, bit for bit"


def _lines(found: ReplicaFacts) -> list[str]:
    lines = [f"{found.num_differ} of {counted(found.num_compared, 'parameter')} differ"]
    if found.last_equal is not None:
        lines[0] += f"; all were equal in step {found.last_equal}"
    if found.largest is not None:
        place = f" at {list(found.index)}" if found.index else ""
        one, other = map(number, found.values)
        lines.append(
            f"the largest difference in step {found.measured} is {number(found.largest)}{place}: "
            f"{one} on rank {found.ranks[0]}, {other} on another"
        )
    lines += [quoted(line) for line in found.written_at[:3]]
    return lines


def _updates(found: ReplicaFacts) -> str:
    each = (f"rank {rank} {num}" for rank, num in list(enumerate(found.num_updates))[:4])
    return f"since step {found.last_equal} it was {', '.join(each)}"


def _options(found: ReplicaFacts) -> str:
    each = [f"{number(value)} on rank {rank}" for rank, value in enumerate(found.options)]
    return f"`{found.option}` is {', '.join(each[:4])}"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4]))
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"


RULE = Rule(
    "NS607",
    "copies-drifted-apart",
    "copies of a model that ranks keep alike have drifted apart",
    check,
    ("static",),
)
