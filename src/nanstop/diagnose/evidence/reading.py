"""What several rules read off the evidence, so that each rule states only its own condition."""

from __future__ import annotations

import math
from collections.abc import Iterable

from nanstop.records import (
    FORMAT_MAX,
    BatchFact,
    Environment,
    Evidence,
    Localization,
    OpEvent,
    Phase,
    RunFacts,
    Sighting,
    StepLength,
    TensorStats,
    op_name,
)
from nanstop.records.facts import BY_HAND
from nanstop.records.formats import SMALLEST
from nanstop.records.vocabulary import LOOKUPS
from nanstop.wording import number

_OF_TORCH = (
    "_c10d_functional",
    "aten",
    "c10d",
    "mkldnn",
    "onednn",
    "prim",
    "prims",
    "quantized",
    "rngprims",
    "torchvision",
)
MODEST = 1e4
"""Largest input from which no op leaves the range of bfloat16 or float32: its cube fits."""

VERY_LONG = 5.0
"""A step, in sizes of a typical weight, that no model is trained with."""

FORWARD = ("forward", "recompute", "generate", "evaluate", "loss")
WRITTEN = (*FORWARD, "hook")
"""Where operations are those that the program wrote down: none is a derivative's."""


_ONCE_OVER = ("optimizer", "evaluate", "generate")
_NO_TENSORS = ("loss", "exception")
"""What a failure reaches beside gradients and weights."""
_ROUNDING = (
    *("exp", "exp2", "_softmax", "softmax", "sigmoid", "softplus", "erfc", "special_ndtr"),
    *("mul", "div", "pow", "square", "prod", "_to_copy"),
)
"""Operations that may have a result below the range of their format."""


def standing(evidence: Evidence) -> RunFacts:
    """Return the standing facts of the run, empty ones where none were recorded."""
    if evidence.facts is not None:
        return evidence.facts
    return evidence.incident.facts if evidence.incident is not None else RunFacts()


def sighting(
    evidence: Evidence, phase: Phase, *, op: str | None = None, since: int | None = None
) -> Sighting | None:
    """Return where in a healthy run this is seen, from step ``since`` on if that is earlier."""
    at = evidence.at
    if at is None:
        return None
    earlier = since is not None and since != at.step
    step, micro = (since, None) if earlier and since is not None else (at.step, at.micro)
    return Sighting(step=step, micro=micro, phase=phase, op=op or None)


def machine_of(evidence: Evidence) -> Environment | None:
    """Return the machine of the run, that of the incident where no other was recorded."""
    if evidence.environment is not None:
        return evidence.environment
    return evidence.incident.environment if evidence.incident is not None else None


def weights_of(evidence: Evidence) -> tuple[TensorStats, ...]:
    """Return the ranges of a scanned checkpoint's weights, or of odd ones as loaded."""
    if evidence.checkpoint is not None:
        return tuple(tensor.stats for tensor in evidence.checkpoint.tensors)
    return standing(evidence).odd_weights


def born(evidence: Evidence, phases: Iterable[str]) -> OpEvent | None:
    """Return the op that made the first bad value out of finite ones in a phase, else None.

    What a hook computes has two: its own, ``hook``, and that of the backward pass.
    """
    found = evidence.localization
    if found is None or found.origin != "born_here" or found.first_bad is None:
        return None
    event = found.first_bad
    its = {event.phase, "hook"} if event.is_of_hook else {event.phase}
    return event if its & set(phases) else None


def first_bad(
    evidence: Evidence, phases: Iterable[str]
) -> tuple[OpEvent | None, TensorStats | None]:
    """Return the op that was ``born`` bad, and its first output that is not finite."""
    event = born(evidence, phases)
    return event, bad_output(event) if event is not None else None


def reached(found: Localization | None) -> tuple[str, ...]:
    """Return the gradients, or the weights of an update, that the failure reaches by itself."""
    return (
        tuple(name for name in found.reaches if name not in _NO_TENSORS)
        if found is not None
        else ()
    )


def fails_in_loss(evidence: Evidence) -> bool:
    """Return whether the failure reaches the loss, and not only gradients."""
    return evidence.localization is not None and "loss" in evidence.localization.reaches


def raised_op(evidence: Evidence) -> OpEvent | None:
    """Return the op that raised the exception of a failure, where it was seen to."""
    found = evidence.localization
    if found is None or found.key.kind != "exception" or found.origin != "born_here":
        return None
    return found.first_bad


def refuses_some(evidence: Evidence) -> bool:
    """Return whether an exception is raised again because of some samples alone, though all that
    was computed of them, and they themselves, are finite: a check of the code refuses their values.
    """
    found, replay = evidence.localization, evidence.replay
    if found is None or found.key.kind != "exception" or found.first_bad is not None:
        return False
    is_known = found.origin != "unknown" or found.made is not None
    is_again = replay is not None and replay.fidelity in ("bitwise", "same_failure")
    is_finite = not any(fact.num_bad for fact in failing_batch(evidence))
    is_of_some = bool(found.positions) and not found.in_every_sample
    return is_again and is_finite and is_of_some and not is_known


def raised_message(evidence: Evidence) -> str:
    """Return the first line of the exception that a failure raised, "" where it raised none."""
    signals = evidence.incident.signals if evidence.incident is not None else ()
    texts = (one.message for one in signals if one.source == "exception" and one.message)
    return next((text.splitlines()[0] for text in texts), "")


def bad_output(event: OpEvent) -> TensorStats | None:
    """Return the first output that is not finite."""
    return next((output for output in event.outputs if not output.finite), None)


def bad_kinds(stats: TensorStats) -> dict[str, int]:
    """Return how many values of each kind that is not finite a tensor holds, of those it has."""
    counts = {"NaN": stats.nan, "+Inf": stats.posinf, "-Inf": stats.neginf}
    return {kind: amount for kind, amount in counts.items() if amount}


def bad_counts(stats: TensorStats) -> str:
    """Return what of a tensor is not finite: ``NaN x 4, -Inf x 1``."""
    return ", ".join(f"{kind} x {amount}" for kind, amount in bad_kinds(stats).items())


def foreign_kernel(event: OpEvent) -> bool:
    """Return whether the op is a kernel from outside torch that is not finite on values far inside
    its wide format.

    Nothing inside such a kernel was seen. In float16 it may overflow as any op does; elsewhere
    small finite inputs speak against the kernel, also where it is finite in a wider format.
    """
    output = bad_output(event)
    if event.op.partition(".")[0] in _OF_TORCH or "." not in event.op:
        return False
    if output is None or output.dtype not in ("bfloat16", "float32", "float64"):
        return False
    return all(stats.finite and (stats.absmax <= MODEST or _masks(stats)) for stats in event.inputs)


def _masks(stats: TensorStats) -> bool:
    """Return whether the largest values are the lowest of the format: what hides a key."""
    return stats.absmax >= 0.99 * FORMAT_MAX.get(stats.dtype, math.inf)


def limit(dtype: str) -> str:
    """Return the largest finite value of a format, as text: ``65504`` of float16."""
    return number(FORMAT_MAX[dtype]) if dtype in FORMAT_MAX else "its limit"


def rounded_at(evidence: Evidence) -> tuple[str, ...]:
    """Return the line that rounds to 0 what is not 0, where that is why the first bad op fails."""
    found = evidence.localization
    rounded = found.vanished if found is not None else None
    source = rounded.source if rounded is not None else None
    if rounded is None or source is None or rounded.name not in _ROUNDING:
        return ()
    place = f"{source.file.rpartition('/')[-1]}:{source.line}"
    return (f"`{op_name(rounded.op)}` at {place} rounds to 0 what is not 0",)


def lost_eps(evidence: Evidence) -> tuple[str, ...]:
    """Return which number should have kept from 0 what the first bad op reads, and is rounded to 0
    itself, or else which line has rounded to 0 what is not 0.
    """
    added = evidence.localization.vanished if evidence.localization is not None else None
    if added is None or not added.outputs:
        return ()
    if rounded := rounded_at(evidence):
        return rounded
    eps = min((value for value in added.scalars if value > 0.0), default=0.0)
    source = added.source
    at = f", {source.file.rpartition('/')[-1]}:{source.line} {source.text}" if source else ""
    return (f"its eps {number(eps)} is 0 in {added.outputs[0].dtype}{at}",)


def emptied_at(evidence: Evidence) -> tuple[str, ...]:
    """Return the earlier line that left nothing of what the first bad op reads."""
    found = evidence.localization
    left = found.emptied if found is not None else None
    if left is None or left.source is None:
        return ()
    at = left.source
    return (f"nothing is left since `{op_name(left.op)}` at {at.short}: `{at.text}`",)


def written_at(evidence: Evidence) -> tuple[str, ...]:
    """Return where the infinity that the first bad op reads comes from, where the program wrote it
    by a fill, or a variable or a buffer has held it.
    """
    found = evidence.localization
    if found is not None and found.held_in:
        made = f": `{found.held_at.text}` at {found.held_at.short}" if found.held_at else ""
        return (f"the Inf is one that `{found.held_in}` has held since before the step{made}",)
    source = found.filled.source if found is not None and found.filled is not None else None
    if source is None:
        return ()
    return (f"the Inf is one that the program writes at {source.short}: `{source.text}`",)


def in_float64(evidence: Evidence) -> tuple[str, ...]:
    """Return that float64 has a value, where it is known what is rounded to 0 without it."""
    found = evidence.localization
    if found is None or found.in_float64 != "finite" or not lost_eps(evidence):
        return ()
    return ("computed in float64, with all before it, it is finite",)


def growth_lines(found: Localization | None) -> tuple[str, ...]:
    """Return where the range of values grew most on the way to the failure, in at most one line."""
    if found is None:
        return ()
    steps = [(ratio, event) for event in found.growth if (ratio := _growth(event)) >= 2.0]
    if not steps:
        return ()
    ratio, event = max(steps, key=lambda step: step[0])
    return (f"range grew x{ratio:.3g} at {event.module or op_name(event.op)}",)


def _growth(event: OpEvent) -> float:
    before = max((stats.absmax for stats in event.inputs), default=0.0)
    after = max((stats.absmax for stats in event.outputs), default=0.0)
    return after / before if before > 0.0 else 0.0


def failing_batch(evidence: Evidence) -> tuple[BatchFact, ...]:
    """Return the facts of the failing micro-batch, or of a window of which none is known."""
    incident = evidence.incident
    if incident is None:
        return ()
    micro = incident.at.micro
    return tuple(fact for fact in incident.batch if micro is None or fact.micro == micro)


def loss_is_bad(evidence: Evidence) -> bool:
    """Return whether the loss itself was seen to be non-finite."""
    incident = evidence.incident
    signals = incident.signals if incident is not None else ()
    return any(
        signal.source == "loss" and signal.value is not None and not math.isfinite(signal.value)
        for signal in signals
    )


def is_rewritten(evidence: Evidence) -> bool:
    """Return whether a step's gradients are finite as its backward leaves them, each time that it
    is run again, and were not at the update, after the script itself had written to them.
    """
    incident, replay = evidence.incident, evidence.replay
    if incident is None or replay is None or incident.rewritten_at is None:
        return False
    is_clean = replay.fidelity == "not_reproduced" and not replay.private_rng
    return is_clean and incident.phase == "backward" and evidence.localization is None


def after_reduction(evidence: Evidence) -> bool:
    """Return whether ranks trained together, this one's losses were finite, and a gradient that
    they share was not.
    """
    incident = evidence.incident
    if incident is None or standing(evidence).world_size < 2 or loss_is_bad(evidence):
        return False
    return any(signal.source in ("grad", "scaler") for signal in incident.signals)


def averaged_by_script(evidence: Evidence) -> bool:
    """Return whether ranks that no wrapper joins may have spoilt what the script writes to this
    one's gradients, which it may well have exchanged with theirs.
    """
    return after_reduction(evidence) and not standing(evidence).ranks_agree


def series_values(evidence: Evidence, name: str) -> tuple[tuple[int, float], ...]:
    """Return (step, value) pairs of a named history, of the evidence or of the incident."""
    histories = evidence.series or (evidence.incident.history if evidence.incident else ())
    for history in histories:
        if history.name == name:
            return tuple(zip(history.steps, history.values, strict=False))
    return ()


def came_broken(evidence: Evidence, names: Iterable[str]) -> bool:
    """Return whether weights were not finite when they were loaded: what nothing reads leaves
    losses finite.
    """
    loaded = {stats.name for stats in standing(evidence).odd_weights if not stats.finite}
    return loaded.issuperset(names)


def breaking_update(evidence: Evidence) -> int | None:
    """Return the step after whose update weights are found not finite: its loss and its gradients
    were finite. None where the numbers of the run do not say so: a forward that looks rows up may
    not have read before what is bad, nor has what reads weights once training is over.
    """
    incident, found = evidence.incident, evidence.localization
    if incident is None or not incident.bad_params or came_broken(evidence, incident.bad_params):
        return None
    event = found.first_bad if found is not None else None
    is_in_part = event is not None and event.name in LOOKUPS and not incident.put_right
    if is_in_part or (found is None and incident.phase in _ONCE_OVER):
        return None
    step = incident.at.step - 1
    seen = (dict(series_values(evidence, name)).get(step) for name in ("loss_raw", "grad_norm"))
    return step if all(value is not None and math.isfinite(value) for value in seen) else None


def lost_squares(facts: RunFacts, dtype: str) -> str:
    """Return which second moments a state in ``dtype`` loses, as text; "" for none."""
    optimizer = facts.optimizer
    if optimizer is None or optimizer.betas is None or optimizer.state_bits == 8:
        return ""
    least = math.sqrt(SMALLEST[dtype] / 2 / max(1.0 - optimizer.betas[1], 1e-9))
    return f"second moments are kept in {dtype}: those of gradients below {least:.2g} are 0"


def squares_gradients(facts: RunFacts) -> bool:
    """Return whether the optimizer may divide by roots of squared gradients: what does has an eps
    beside them, and of an unknown one nothing is known. An update that a script makes itself is
    no optimizer's.
    """
    if facts.optimizer is None:
        return facts.veto != BY_HAND
    return facts.optimizer.eps is not None


def has_masters(facts: RunFacts) -> bool:
    """Return whether the optimizer updates copies of the parameters, none of themselves."""
    path = facts.gradient_path
    return path is not None and path.num_trainable > 0 and path.num_updated == 0


def step_moves(name: str, step: StepLength) -> str:
    """Return as text how long a step is beside the weights that there are."""
    return (
        f"a step of {name} moves each weight by about {step.length:.2g}, typical weights here are "
        f"{step.weight:.1g}"
    )


def too_long_step(facts: RunFacts) -> str:
    """Return as text how long the steps of the optimizer are, where no model is trained with such;
    "" where that is not known of them.
    """
    optimizer = facts.optimizer
    if optimizer is None or optimizer.step is None:
        return ""
    step = optimizer.step
    return step_moves(optimizer.name, step) if step.length >= VERY_LONG * step.weight else ""
