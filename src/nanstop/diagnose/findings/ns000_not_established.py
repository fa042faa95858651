"""The evidence does not single out a cause.

## What happened
A step failed, it was captured and examined, and no finding of the catalogue fits what was seen.
nanstop says what it could rule out and which experiment would settle the rest, instead of naming a
likely culprit.

## Why it happens
In 8 of the 130 public failures that this catalogue is drawn from, the thread never established a
cause, although most of them carried confident advice. Four facts split most failures: were the
parameters finite before the step, was the batch, was the forward pass, and does the step fail again
when it is replayed? With all four known, 2 x 2 x 2 x 2 = 16 cases remain apart; with one unknown,
each conclusion covers two of them, and a confident one is wrong about half of the time.

## Example
A custom autograd function writes NaN into a gradient buffer in C++. No torch operation produced it,
the parameters and the batch are finite, the forward pass is finite, the replay is bitwise
identical. That is all that can be said.

## Fix
1. Run the next experiment that the report names. Cost: one micro-batch or a few.
2. Take the candidates in the order given: another attention kernel, float32 trainables, float32
   logits and loss, bfloat16. Each is tried on the failing micro-batch only, and none is named where
   that cannot be run again. Cost: one forward and backward each.
3. Keep the incident folder: a later version may know the cause, and diagnoses old incidents anew.
   Cost: its size on disk.

## Fix safety
The candidates other than bfloat16 keep the mathematics of the training.
None is applied without proof.

## Not to be confused with
NS603, where the replay shows that the failure does not come back at all.

## References
- https://github.com/pytorch/pytorch/issues/146129
- https://github.com/huggingface/peft/issues/3073
- https://github.com/meta-pytorch/torchtune/issues/2246
"""

from __future__ import annotations

from nanstop.diagnose.evidence.candidates import BF16, Candidates, fp32_trainables, kernels
from nanstop.diagnose.evidence.reading import failing_batch, standing
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Atom, Diagnosis, Evidence, Localization, OpEvent, op_name
from nanstop.records.formats import HALF


def check(evidence: Evidence) -> Diagnosis | None:
    """Return what was ruled out; None without an incident."""
    incident = evidence.incident
    if incident is None:
        return None
    return Diagnosis(
        code="NS000",
        title="cause not established",
        cause="the evidence fits no finding of the catalogue",
        confidence="possible",
        lines=(*_ruled_out(evidence), f"next experiment: {_next_experiment(evidence)}"),
        remedies=_candidates(evidence),
        where=_where(evidence),
    )


def _ruled_out(evidence: Evidence) -> tuple[str, ...]:
    incident, found, replay = evidence.incident, evidence.localization, evidence.replay
    assert incident is not None
    lines = []
    if incident.bad_params:
        lines.append("parameters were not finite before the step")
    elif found is not None and found.origin not in ("from_param", "unknown"):
        lines.append("ruled out: the weights; all were finite before the step")
    batch = failing_batch(evidence)
    if batch and not any(fact.num_bad for fact in batch):
        lines.append("ruled out: the data; the batch is finite")
    if found is not None and found.key.phase in ("backward", "optimizer"):
        lines.append("ruled out: the forward pass; it is finite")
    if found is not None and found.first_bad is not None:
        event = found.first_bad
        lines.append(f"first seen in `{op_name(event.op)}`, {event.phase}; origin {found.origin}")
    if found is not None and found.made is not None:
        line = f"line {found.made.line} brings the bad value in: `{found.made.text}`"
        lines.append(f"{line}; no operation has made it")
    if replay is not None and replay.fidelity in ("bitwise", "same_failure"):
        lines.append("ruled out: chance; the replay fails in the same way")
    return tuple(lines)


def _next_experiment(evidence: Evidence) -> str:
    found, replay = evidence.localization, evidence.replay
    if replay is None:
        return "replay the step; it could not be run again here"
    if replay.fidelity == "not_reproduced":
        seen = "its own random generator" if replay.private_rng else "state outside the step"
        return f"seed or save {seen}, then replay; this replay was clean"
    if found is None:
        return "localize the failure: record the ops of the failing micro-batch"
    if found.origin == "from_state":
        return f"reset the optimizer state `{found.culprit}` and run the step again"
    if found.origin == "from_buffer":
        return f"restore the buffer `{found.culprit}` from before the run and run the step again"
    if found.made is not None:
        return f"look at what line {found.made.line} takes: no operation of torch computes it"
    if found.blind_spots:
        return _next_unseen(found)
    return _next_about(found.first_bad)


def _next_unseen(found: Localization) -> str:
    if found.unseen_write == "nonfinite":
        return "look at what this line writes: it is not finite whatever the line reads"
    return f"look at what the recorder could not see: {found.blind_spots[0]}"


def _next_about(event: OpEvent | None) -> str:
    if event is not None and any(stats.nan for stats in event.inputs):
        return (
            "look for what made its NaN: no op of torch did (NumPy, a custom kernel, a C++ "
            "extension)"
        )
    if event is not None and event.wider == "unknown":
        return f"repeat `{op_name(event.op)}` in a wider format on the recorded inputs"
    return "try the candidates on the failing micro-batch, then the same batch on another device"


def _candidates(evidence: Evidence) -> Candidates:
    """Return what is to be tried, without any evidence for it; nothing where nothing can be."""
    if evidence.replay is None:
        return ()
    facts = standing(evidence)
    formats = {facts.autocast, *(group.dtype for group in facts.param_groups)}
    logits: Candidates = ((Atom(remedy="fp32_logits"),),) if formats.intersection(HALF) else ()
    narrow = BF16 if "float16" in formats else ()
    return (*kernels(facts), *fp32_trainables(facts), *logits, *narrow)


def _where(evidence: Evidence) -> str:
    found = evidence.localization
    if found is None:
        return ""
    if found.first_bad is None and found.made is not None:
        file = found.made.file.replace("\\", "/").rsplit("/", 1)[-1]
        return f"{file}:{found.made.line}"
    return found.first_bad.module if found.first_bad is not None else ""


RULE = Rule(
    "NS000", "not-established", "cause not established", check, ("incident",), role="unexplained"
)
