"""A gradient was not finite after the ranks had added theirs, and what this rank computes is
finite.

## What happened
Several processes train together. The loss of this rank was finite, the gradient that came back from
the reduction was not, and this rank's own micro-batches, run again without the others, give finite
gradients.

## Why it happens
Two things look alike from one rank. Another rank's gradient was not finite: the sum over 8 ranks is
NaN if one of the 8 is. Or every rank's was finite and the reduction read a buffer too early or too
late: overlapped communication copies buckets of 25 MiB or more while the backward pass still fills
them, and memory that was not yet written holds whatever was there before. Such a race comes and
goes with timing: it is gone when a step synchronises the device, when communication is not
overlapped, or when a profiler is on.

## Example
```python
# Not run by the tests: a race needs several processes.
work = dist.all_reduce(bucket, async_op=True)
bucket.copy_(gradient)              # written while it is being sent
work.wait()
```

## Fix
1. Look whether the report says that none of the ranks fails by itself: then only the exchange is
   left. Where the ranks were not asked, look at the reports of the others for the same step: one
   that names an operation is the cause, and this one only its echo. Cost: none.
2. Run without overlapped communication (DeepSpeed `overlap_comm: false`, FSDP without prefetching)
   and see whether it comes back. Cost: speed.
3. Switch off one of two features that share buffers (`contiguous_gradients`, custom streams, CUDA
   graphs, compiled backward hooks) at a time. Cost: speed.
4. Update the library that reduces. Cost: none; the known defects have fixes of their own.

## Fix safety
Under DistributedDataParallel the step is run again as it is, on every rank. Where a script averages
gradients by itself, each rank leaves out an update that would ruin its weights.

## Not to be confused with
NS603: one process, or a loss of this rank's own that does not come back. One observation never
settles which of the two it is: this is always said as possible only.

## References
- https://github.com/deepspeedai/DeepSpeed/issues/8061
- https://github.com/deepspeedai/DeepSpeed/pull/7965
- https://github.com/deepspeedai/DeepSpeed/issues/7188
- https://github.com/deepspeedai/DeepSpeed/issues/5545
"""

from __future__ import annotations

from nanstop.diagnose.evidence.accounts import shown
from nanstop.diagnose.evidence.reading import after_reduction, machine_of, standing
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Diagnosis, Evidence, Incident
from nanstop.wording import counted, listed


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if only the reduced gradient is bad and this rank's own is not."""
    replay, incident = evidence.replay, evidence.incident
    if replay is None or incident is None or replay.fidelity != "not_reproduced":
        return None
    if replay.private_rng or evidence.localization is not None or not after_reduction(evidence):
        return None
    ranks = standing(evidence).world_size
    return Diagnosis(
        code="NS606",
        title=f"gradient not finite after the reduction over {ranks} ranks, finite on rank "
        f"{incident.at.rank}",
        cause=f"{counted(replay.runs, 'replay')} of this rank's own micro-batches: clean",
        confidence="possible",
        lines=(*_what_is_left(incident), *_written(incident), *_overlap(evidence)),
    )


def _what_is_left(incident: Incident) -> tuple[str, ...]:
    if incident.born_on == ():
        return ("the reduction read a buffer too early, or what is run again is not what was run",)
    return (
        f"another rank failed: see its report of step {incident.at.step}",
        "or the reduction read a buffer too early, if no rank's report names an operation",
    )


def _written(incident: Incident) -> tuple[str, ...]:
    lines = incident.rewritten_at or ()
    if not lines:
        return ()
    at = listed(tuple(map(shown, lines)))
    return (f"or the script's own line makes them so: gradients are written to at {at}",)


def _overlap(evidence: Evidence) -> tuple[str, ...]:
    machine = machine_of(evidence)
    named = (*machine.flags, *machine.env_vars) if machine is not None else ()
    found = [f"{name}={value}" for name, value in named if "overlap" in name.lower()]
    return (f"communication is overlapped: {', '.join(found)}",) if found else ()


RULE = Rule(
    "NS606",
    "race-or-collective",
    "gradient not finite after the reduction only",
    check,
    ("incident",),
)
