"""The failing step is clean when it is replayed, always or now and then.

## What happened
The step failed once. Run again from the same weights, batch and random state it is finite: in each
of three runs, or in some of those that were made of it as it is.

Or the step reads memory that nobody has written. What another tensor has left there is 0 in most
steps, a large number in others, NaN in the rest, and may come back in each replay or in none. That
is found by experiment: with NaN in all memory that is not written yet the step is NaN, and the
operation that hands it on is named. In half precision a healthy step is looked at in that way once.

## Why it happens
A failure that depends on nothing that was saved depends on something else: a race between streams,
memory that was never filled, a GPU that computes wrongly, or state that the run keeps outside the
model. Three clean replays do not exclude a rare race: one that strikes in 10 % of the runs passes
three replays with a probability of 0.9^3 = 0.73. Ten clean replays still happen in 0.9^10 = 35 % of
the cases.

Of a device that computes wrongly there is more to see where several ranks train one model: then the
micro-batch is run on the device of each of them. Operations that have read the same bits on all
devices and whose results differ are computed once more in float64; the device whose result is far
from that, where the others are near, is named. `nanstop run --audit-devices N` does so every N
steps without any failure.

## Example
```python
import torch

buffer = torch.empty(1024)          # whatever was in that memory: finite today, NaN tomorrow
torch.use_deterministic_algorithms(True)
torch.empty(3)                      # tensor([nan, nan, nan])
```

A product of groups of rows (`torch._grouped_mm`, of a mixture of experts) writes the rows up to the
last offset and no others; neither does its backward. Rows of experts that are on another rank, or
that fill a batch up, are then what was there before, and 0 times NaN is NaN:
`F.pad(F.grouped_mm(x[:n], w, offs=offs), (0, 0, 0, len(x) - n))` with `n = int(offs[-1])` is
defined. `torch.empty` in a model is `torch.zeros`, or is written before it is read.

## Fix
1. Run the same seed twice and lay the runs side by side: `nanstop compare A B` names the first step
   at which they part. Then once more on another device. Cost: a run up to that step each.
2. Fill memory deterministically: `torch.use_deterministic_algorithms(True)` fills `torch.empty`
   with NaN, so that a read of it always fails. Cost: some kernels become slower.
3. Switch off overlapping communication, custom streams and CUDA graphs one at a time. Cost: speed.
4. Look for GPU errors in the system log (XID). Cost: none.
5. Take a device that is named out of the job and have it tested (`dcgmi diag -r 3`).
   Cost: a restart.

## Fix safety
Nothing is changed in the training: the step is redone as it was.

## Not to be confused with
A private `torch.Generator`, NumPy state in a worker, or time-dependent data: those are run state
that was not saved. They are excluded before this is said. NS606: of several ranks only the gradient
that they share was not finite.

## References
- https://github.com/pytorch/pytorch/issues/193633
- https://github.com/pytorch/pytorch/issues/154557
- https://github.com/deepspeedai/DeepSpeed/issues/8061
- https://github.com/deepspeedai/DeepSpeed/pull/7965
- https://github.com/pytorch/torchtitan/issues/951
- https://github.com/pytorch/torchtitan/pull/2450
"""

from __future__ import annotations

from nanstop.diagnose.evidence.reading import after_reduction, is_rewritten, standing
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import (
    Atom,
    DeviceFacts,
    Diagnosis,
    Evidence,
    OpEvent,
    Replay,
    Sighting,
    Unwritten,
    op_kind,
)
from nanstop.wording import counted, number

_LEFT = (
    "left are what the script itself counts, iterates or draws, its hooks on saved tensors, a "
    "race, unfilled memory, or hardware"
)


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if the step as it is passes in some replay, and no random generator of
    the run's own explains it.
    """
    devices, found = standing(evidence).devices, evidence.localization
    if devices is not None and devices.op:
        return _odd_device(devices)
    event = found.first_bad if found is not None else None
    if event is not None and event.unwritten is not None:
        return _unwritten(event, event.unwritten)
    replay = evidence.replay
    if (
        replay is None
        or replay.fidelity not in ("not_reproduced", "different")
        or replay.private_rng
    ):
        return None
    if replay.fidelity == "different":
        return _comes_and_goes(replay)
    if evidence.localization is not None:  # the recorded run did show something
        return None
    if after_reduction(evidence):  # it may be another rank's
        return None
    if is_rewritten(evidence):  # no replay has what the script does after its backward
        return None
    return Diagnosis(
        code="NS603",
        title="the failure does not come back",
        cause=f"{counted(replay.runs, 'replay')} from the same weights, batch and random state: "
        "clean",
        confidence="likely" if replay.runs > 1 else "possible",
        lines=(*_alike(devices), _LEFT),
    )


def _unwritten(event: OpEvent, left: Unwritten) -> Diagnosis:
    """Return the finding of an operation that hands on memory which nobody has written."""
    target = f"{event.source.file}:{event.source.line}" if event.source is not None else ""
    fill = Atom(remedy="memory_fill", target=target, value="0")
    return Diagnosis(
        code="NS603",
        title=f"what `{op_kind(event.op)}` does not write is read",
        cause="what another tensor has left in that memory comes into the loss or its gradients",
        confidence="certain",
        confirmed="with NaN in all memory that is not written yet the step is NaN by it",
        lines=_which(left),
        remedies=((fill,),) if target else (),
        usual_cure="write all that is read of it, or read only what is written",
        where=event.module,
    )


def _which(left: Unwritten) -> tuple[str, ...]:
    if left.count is None:
        return ()
    if left.rows is None:
        return (f"not written: {counted(left.count, 'element')}",)
    first, last = left.rows
    return (
        f"not written: rows {first} to {last}" if first < last else f"not written: row {first}",
    )


def _alike(devices: DeviceFacts | None) -> tuple[str, ...]:
    if devices is None or not devices.num_compared:
        return ()
    count = counted(devices.num_compared, "operation")
    return (f"run on the devices of all {len(devices.devices)} ranks: {count}, the same bits",)


def _odd_device(found: DeviceFacts) -> Diagnosis:
    """Return the finding where one device gave a result that the others did not."""
    names = ", ".join(f"{found.devices[rank]} of rank {rank}" for rank in found.ranks)
    place = f" in `{found.module}`" if found.module else ""
    seen = Sighting(step=found.step, phase=found.phase, op=found.op)
    lines = (f"{counted(found.num_compared, 'operation')} read the same on all ranks",)
    if found.unsteady:
        return Diagnosis(
            code="NS603",
            title=f"{names} gave two results for the same `{found.op}`",
            cause=f"`{found.op}`{place} ran twice on each rank with the same bits: one result on "
            "all others, two there",
            confidence="possible",
            lines=(
                *lines,
                "a device that errs now and then, or a kernel that draws on chance",
            ),
            where=f"rank {found.ranks[0]}",
            seen=seen,
        )
    far = ", ".join(
        f"{number(error)} on rank {rank}"
        for rank, error in enumerate(found.errors)
        if error is not None
    )
    return Diagnosis(
        code="NS603",
        title=f"{names} computes wrongly",
        cause=f"`{found.op}`{place} read the same bits on all ranks and gave other results there",
        confidence="certain",
        confirmed="the same operation in float64: its result is "
        f"{far} spacings of its format away from that",
        lines=lines,
        where=f"rank {found.ranks[0]}",
        seen=seen,
    )


def _comes_and_goes(replay: Replay) -> Diagnosis:
    passed = replay.runs - (replay.num_failed or 0)
    return Diagnosis(
        code="NS603",
        title="the failure comes and goes",
        cause=(
            f"{passed} of {counted(replay.runs, 'replay')} from the same weights, batch and random "
            "state passed"
        ),
        confidence="certain",
        lines=(_LEFT, "what passes once under a remedy proves nothing here"),
    )


RULE = Rule(
    "NS603",
    "not-reproducible",
    "the failure does not come back",
    check,
    ("incident", "static", "gauge"),
    role="chance",
)
