"""The failing step is clean when it is replayed, always or now and then.

## What happened
The step failed once. Run again from the same weights, batch and random state it is finite: in each
of three runs, or in some of those that were made of it as it is.

## Why it happens
A failure that depends on nothing that was saved depends on something else: a race between streams,
memory that was never filled, a GPU that computes wrongly, or state that the run keeps outside the
model. Three clean replays do not exclude a rare race: one that strikes in 10 % of the runs passes
three replays with a probability of 0.9^3 = 0.73. Ten clean replays still happen in 0.9^10 = 35 % of
the cases.

## Example
```python
import torch

buffer = torch.empty(1024)          # whatever was in that memory: finite today, NaN tomorrow
torch.use_deterministic_algorithms(True)
torch.empty(3)                      # tensor([nan, nan, nan])
```

## Fix
1. Run the same seed twice and lay the runs side by side: `nanstop compare A B` names the first step
   at which they part. Then once more on another device. Cost: a run up to that step each.
2. Fill memory deterministically: `torch.use_deterministic_algorithms(True)` fills `torch.empty`
   with NaN, so that a read of it always fails. Cost: some kernels become slower.
3. Switch off overlapping communication, custom streams and CUDA graphs one at a time. Cost: speed.
4. Look for GPU errors in the system log (XID). Cost: none.

## Fix safety
Nothing is changed in the training: the step is redone as it was.

## Not to be confused with
A private `torch.Generator`, NumPy state in a worker, or time-dependent data: those are run state
that was not saved. They are excluded before this is said. NS606: of several ranks only the gradient
that they share was not finite.

## References
- https://github.com/deepspeedai/DeepSpeed/issues/8061
- https://github.com/deepspeedai/DeepSpeed/pull/7965
- https://github.com/pytorch/torchtitan/issues/951
- https://github.com/pytorch/torchtitan/pull/2450
"""

from __future__ import annotations

from nanstop.diagnose.evidence.reading import after_reduction, is_rewritten
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Diagnosis, Evidence, Replay
from nanstop.wording import counted

_LEFT = (
    "left are what the script itself counts, iterates or draws, its hooks on saved tensors, a "
    "race, unfilled memory, or hardware"
)


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if the step as it is passes in some replay, and no random generator of
    the run's own explains it.
    """
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
        lines=(_LEFT,),
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
    ("incident",),
    role="chance",
)
