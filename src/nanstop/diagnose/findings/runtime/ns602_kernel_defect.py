"""A kernel is wrong: reference mathematics is finite on the same inputs.

## What happened
A fused, compiled or vendor kernel returned NaN or Inf. The same operation on the same inputs in the
same format, written out in plain operations, is finite. What a kernel from outside torch does
inside is not seen: one that is not finite on small, finite values in a wide format is likely to be
wrong.

A kernel that is launched by hand (Triton in an autograd function, a C++ extension, NumPy) is no
operation of torch at all. It is found by its line: memory that is finite before it, or filled with
ones, is not finite behind it, what it reads is finite, and with other numbers in their place it is
finite as well.

## Why it happens
Fused attention keeps logsumexp and recomputes exp(score - logsumexp) tile by tile. A padded tile
scored 0 with a logsumexp below -88.7 gives exp(88.8) = Inf, because float32 ends at exp(88.72);
times a masked 0 it is NaN. Other kernels fail for a sequence of length 1, an empty sequence, or a
head dimension of 256. None of that is in the model.

A fused loss makes its gradient in its forward, as if its result were the loss itself. What stands
behind it, a mask or a weight for each token, is then lost: the loss is right to the last digit, and
its gradient that of another one.

## Example
cuDNN attention backward with an explicit mask and a sequence length of 64 modulo 128 (torch 2.11 to
2.13 on H100): the loss is finite, the gradient of the queries is NaN, and with it that of all that
comes before them; `sdpa_kernel(SDPBackend.MATH)` is finite.

## Fix
1. Use another attention kernel: `attn_implementation="sdpa"` or `"eager"`, or switch the one off
   that is at fault: `torch.backends.cuda.enable_cudnn_sdp(False)`. Cost: none to 20 % of step time.
2. Run the module in float32, which selects another kernel. Cost: that module's time doubles.
3. Switch compilation off for the module, or update the library. Cost: speed; an update.
4. A backward that does not use what it is given: multiply by it, for each value of the result, or
   let torch differentiate the plain operations. Cost: memory for the gradient of each value.

## Fix safety
Another kernel and float32 are safe: the same mathematics.

## Not to be confused with
NS201: the same format fails with plain operations too. Instrumentation can hide a defect of fusion,
so the un-instrumented replay counts.

## References
- https://github.com/huggingface/trl/issues/7181
- https://github.com/pytorch/pytorch/issues/196678
- https://github.com/Dao-AILab/flash-attention/issues/334
- https://github.com/huggingface/lerobot/issues/4178
"""

from __future__ import annotations

from nanstop.diagnose.evidence.candidates import Candidates, islands, kernels, other_kernels
from nanstop.diagnose.evidence.reading import (
    MODEST,
    foreign_kernel,
    sighting,
    standing,
    too_long_step,
)
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Atom, Diagnosis, Evidence, Localization, OpEvent, op_name
from nanstop.wording import counted, number


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the defect if reference mathematics is finite, or is to be expected so."""
    if evidence.probe is not None:
        return _deaf(evidence)
    found, replay, facts = evidence.localization, evidence.replay, standing(evidence)
    event = found.first_bad if found is not None and found.origin == "born_here" else None
    if event is not None and event.reference == "finite":
        return Diagnosis(
            code="NS602",
            title=f"kernel defect in `{op_name(event.op)}`",
            cause="plain operations are finite on the same inputs in the same format; the kernel "
            "is not",
            confidence="likely" if _has_left_its_weights(evidence) else "certain",
            remedies=_remedies(evidence, event),
            where=event.module,
        )
    if found is not None and found.unseen_write == "finite":
        return _unseen(evidence, found)
    if event is not None and foreign_kernel(event):
        largest = max((s.absmax for s in event.inputs if s.absmax <= MODEST), default=0.0)
        return Diagnosis(
            code="NS602",
            title=f"custom operation `{op_name(event.op)}` is not finite",
            cause=(
                f"`{event.op}` is no operation of torch; its inputs are finite and, but for "
                f"masks, end at {number(largest)}. Nothing inside it was seen: its kernel is "
                "wrong, or what it computes has no value for them (a division by 0, say)"
            ),
            confidence="likely",
            remedies=_remedies(evidence, event),
            where=event.module,
        )
    if replay is not None and replay.eager == "finite" and facts.compiled:
        return Diagnosis(
            code="NS602",
            title="compiled code is not finite where eager code is",
            cause="the same step is finite without compilation",
            confidence="likely",
            lines=("fusion may also round an overflow that is near: compare with float32",),
            remedies=((Atom(remedy="eager"),), *kernels(facts)),
        )
    return None


def _has_left_its_weights(evidence: Evidence) -> bool:
    """Return whether updates longer than weights are large were made: what such a model computes
    no kernel was written for.
    """
    incident = evidence.incident
    has_moved = incident is not None and incident.at.step > 0
    return has_moved and bool(too_long_step(standing(evidence)))


def _unseen(evidence: Evidence, found: Localization) -> Diagnosis | None:
    """Return the finding of a write that no operation makes, where what it reads is finite."""
    event = found.first_bad
    if event is None or not event.inputs or not all(stats.finite for stats in event.inputs):
        return None
    largest = max(stats.absmax for stats in event.inputs)
    written = next((stats.dtype for stats in event.outputs if not stats.finite), "")
    far = written == "float16" or largest > MODEST
    return Diagnosis(
        code="NS602",
        title="a kernel that torch does not see is not finite",
        cause=(
            "this line writes where torch dispatches nothing (Triton, CUDA, C++, NumPy); what it "
            f"reads is finite and ends at {number(largest)}. Its kernel is wrong, or what it "
            "computes has no value for these numbers (a division by 0, say)"
        ),
        confidence="likely",
        lines=(
            *((f"or what it computes leaves {written}",) if far else ()),
            "memory that was finite before this line, or filled with ones, is not finite behind it",
            "with numbers between 0.25 and 0.75 in place of what it reads it is finite",
        ),
        remedies=_remedies(evidence, event),
        where=event.module,
    )


def _deaf(evidence: Evidence) -> Diagnosis | None:
    """Return the finding of a backward that gives the same whatever it is given."""
    row = next(iter(evidence.probe.backwards if evidence.probe is not None else ()), None)
    if row is None:
        return None
    return Diagnosis(
        code="NS602",
        title=f"the backward of `{row.name}` ignores what it is given",
        cause=f"whatever weighs its {counted(row.num, 'value')}, the gradients are the same",
        confidence="certain",
        confirmed=f"differences of its forward are another gradient, {100 * row.apart:.0f} % away",
        lines=(
            *((row.line,) if row.line else ()),
            "multiply by the gradient that backward is given, value by value",
        ),
        where="loss",
        seen=sighting(evidence, "backward", op=row.name),
    )


def _remedies(evidence: Evidence, event: OpEvent) -> Candidates:
    facts = standing(evidence)
    return (*other_kernels(event, facts), *islands(event, facts))


RULE = Rule(
    "NS602",
    "kernel-defect",
    "kernel wrong where plain operations are right",
    check,
    ("incident", "gauge"),
    beside=("NS108",),
)
