"""The run stood still.

## What happened
Steps were completed regularly and then none was, for many times as long as one takes. The stack of
every thread was written down, then the run was ended: by `nanstop run --hang`, or by whoever waited
for it and pressed Ctrl-C. Or an exception ended it, in a collective that another rank never came
to: that rank had no more batches, or waited at another line.

## Why it happens
One rank waits in a collective that another never enters (it skipped a batch, or died); a data
loader's worker forked while a thread held a lock; a file system does not answer; a download waits
for a network that is not there. torch gives up on an NCCL collective after 10 minutes, the Trainer
of transformers after 30 (`ddp_timeout=1800`), a lock never. With 8 ranks and 1 that leaves the loop
a batch early, the 7 others wait until then.

## Example
```
no step for 300 s, the median step took 2 s
innermost Python frame torch/distributed/distributed_c10d.py:2924 in all_reduce
```

## Fix
1. Read `stacks.txt` of the incident:
   the innermost line of the main thread says what is waited for. Cost: none.
2. In a collective: give every rank the same number of batches (`drop_last`, or `Join`), and have
   all of them come to the same collectives. Cost: a few samples.
3. In a data loader: `num_workers=0`, or the start method `spawn`.
   Cost: loading is not overlapped; slower start.
4. If it was only slow (an evaluation, a checkpoint), wait for longer: `nanstop run --hang`.
   Cost: none.

## Fix safety
`drop_last` changes which samples are seen; the others change nothing in the training.

## Not to be confused with
A slow step: first compilations, evaluation and saving take longer than a step. NS601:
the process is gone.

## References
- https://github.com/pytorch/pytorch/issues/1355
- https://github.com/pytorch/pytorch/issues/140563
"""

from __future__ import annotations

from nanstop.diagnose.evidence.process_end import (
    last_op_lines,
    script_line,
    signals_named,
    unnatural_end,
)
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Diagnosis, Evidence, Signal, op_name
from nanstop.records.vocabulary import RANK_ELSEWHERE, RANK_ENDED

_AS_MANY = (
    "Give every rank the same number of batches: `DistributedSampler`, or `drop_last=True`, or the "
    "loop within `with Join([model]):`."
)


def check(evidence: Evidence) -> Diagnosis | None:
    """Return what a run that stood still was doing."""
    end = unnatural_end(evidence, "timeout")
    if end is None:
        return None
    if end.name in (RANK_ENDED, RANK_ELSEWHERE):
        return _left_waiting(evidence, end)
    frames = signals_named(evidence, "frame")
    place = frames[0].rpartition(" in ")[2] if frames else ""
    found = evidence.localization
    op = found.key.op if found is not None else ""
    inside, line = place or op_name(op), script_line(evidence)
    return Diagnosis(
        code="NS605",
        title="run stood still" + (f" in `{inside}`" if inside else ""),
        cause=end.message or "no step was completed for many times as long as one takes",
        confidence="certain",
        lines=(
            *signals_named(evidence, "rank"),
            *last_op_lines(evidence),
            *(f"called from {frame}" for frame in frames[1:3]),
        ),
        where=line.short if line is not None else "",
        source=line,
    )


def _left_waiting(evidence: Evidence, end: Signal) -> Diagnosis:
    """Return the finding where one rank waits in a step that another does not make."""
    has_ended = end.name == RANK_ENDED
    line = script_line(evidence)
    ended = "a rank waits in a step for one that has no more batches"
    return Diagnosis(
        code="NS605",
        title=ended if has_ended else "a rank waits in a step for one that waits elsewhere",
        cause=end.message,
        confidence="certain" if has_ended else "likely",
        where=line.short if line is not None else "",
        source=line,
        usual_cure=_AS_MANY,
    )


RULE = Rule("NS605", "hang", "no step for many step times", check, ("incident",))
