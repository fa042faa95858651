"""Candidates for a cure in the order to try. Rules propose, ``prove.search`` decides."""

from __future__ import annotations

from nanstop.diagnose.evidence.reading import has_masters, standing
from nanstop.own_code import is_library
from nanstop.records import (
    Atom,
    Evidence,
    LineOp,
    Localization,
    OpEvent,
    RunFacts,
    TokenRows,
    op_kind,
)
from nanstop.records.formats import HALF, NARROW
from nanstop.records.line_forms import (
    AND_BACK,
    BOUNDED,
    COUNTED,
    FINITE,
    GUARDED,
    HAVE_BOUNDS,
    KEPT,
    MASK_AFTERWARDS,
    OF_COUNTS,
    UNCAST,
    form_at,
)
from nanstop.records.remedies import spans_of
from nanstop.records.values import entry_of

Candidates = tuple[tuple[Atom, ...], ...]

BF16: Candidates = ((Atom(remedy="bf16"),),)
KERNELS = ("sdpa", "eager")
_FUSED = {
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_efficient_attention": "mem_efficient",
}
"""Operations of fused attention, and what torch calls the kernel that they are of."""


def kernels(facts: RunFacts) -> Candidates:
    """Return the other attention kernels; none where the model has no such switch."""
    if facts.attention is None:
        return ()
    return tuple(
        (Atom(remedy="attention", value=kernel),) for kernel in KERNELS if kernel != facts.attention
    )


def other_kernels(event: OpEvent, facts: RunFacts) -> Candidates:
    """Return what computes an operation by another kernel: for fused attention torch's others,
    without the one that it was computed by, before the model's own.
    """
    without: list[tuple[Atom, ...]] = [
        (Atom(remedy="sdpa_kernel", value=kernel),)
        for operation, kernel in _FUSED.items()
        if operation in event.op
    ]
    return (*without, *kernels(facts))


def islands(event: OpEvent, facts: RunFacts) -> Candidates:
    """Return float32 islands on the op's module:
    giving back the input's format, float32, float32 under autocast.

    An op outside the modules has none; what is left there is the loss, and the head that feeds it.
    In the forward of the whole model its lines come first.
    """
    lines, logits = own_lines(event), ((Atom(remedy="fp32_logits"),),)
    if event.phase == "loss":
        return (*lines, *logits)
    inside = Atom(remedy="island", target=event.module, value="float32")
    back = Atom(remedy="island", target=event.module, value="float32->input")
    outer = Atom(remedy="outer_autocast", value=facts.autocast or _half_format(facts))
    own: Candidates = ((back,), (inside,), (inside, outer))
    return own if event.module else (*lines, *own, *logits)


def wider_before(evidence: Evidence, event: OpEvent) -> Candidates:
    """Return islands for an op in half precision that has no value for what it reads, where it has
    one with all before it in more bits.
    """
    found, in_half = evidence.localization, any(one.dtype in HALF for one in event.inputs)
    is_wider = in_half and found is not None and found.in_float64 == "finite"
    return islands(event, standing(evidence)) if is_wider else ()


def own_lines(event: OpEvent) -> Candidates:
    """Return the line of the user's own that an operation is asked for by, in float32, and that
    with the lines before it: what they have rounded is lost; then without the casts of theirs, and
    last with its result in the format of what it reads, which weights in half precision want.
    """
    own = [one for one in event.lines_in_half if not is_library(one.source.file)]
    atoms = tuple(_in_float32(one, f"float32:{one.op}") for one in own)
    uncast = tuple(_in_float32(one, UNCAST) for one in own if one.casts)
    is_own = bool(own) and own[0].source == event.source
    may_go_back = is_own and event.phase != "loss"
    back = (_in_float32(own[0], f"{AND_BACK}:{own[0].op}"), *atoms[1:]) if may_go_back else ()
    sets = (atoms[:1] if is_own else (), atoms if len(atoms) > is_own else (), uncast, back)
    return tuple(one for one in sets if one)


def _in_float32(line: LineOp, how: str) -> Atom:
    return Atom(remedy="fp32_line", target=f"{line.source.file}:{line.source.line}", value=how)


def _half_format(facts: RunFacts) -> str:
    used = [group.dtype for group in facts.param_groups if group.dtype in HALF]
    return used[0] if used else "float16"


def precision(event: OpEvent, facts: RunFacts, dtype: str) -> Candidates:
    """Return what cures an overflow at ``event``: an island, another kernel, bfloat16.

    Where ``dtype``, the format that overflowed, is none of the narrow ones, islands are no wider.
    """
    # Whether the op is a part of attention, the trial says: under another kernel it is another op.
    other = kernels(facts) if event.module else ()
    if dtype not in NARROW:
        return other
    wide = BF16 if dtype != "bfloat16" else ()
    return (*islands(event, facts), *other, *wide)


def half_trainables(facts: RunFacts) -> tuple[str, ...]:
    """Return the half formats that trainable parameters are stored in."""
    return tuple(
        dict.fromkeys(
            group.dtype for group in facts.param_groups if group.trainable and group.dtype in HALF
        )
    )


def updated_in_half(facts: RunFacts) -> tuple[str, ...]:
    """Return the half formats that updates write to; none where the optimizer has copies."""
    return () if has_masters(facts) else half_trainables(facts)


def fp32_trainables(facts: RunFacts) -> Candidates:
    """Return float32 trainables, alone and under the autocast that lets them meet half weights."""
    formats = updated_in_half(facts)
    if not formats:
        return ()
    atom = Atom(remedy="fp32_trainables")
    outer = Atom(remedy="outer_autocast", value=formats[0])
    return (atom,), (atom, outer)


def initialised(table: TokenRows, how: str) -> Atom:
    """Return the remedy that makes a table's untrained rows anew. ``how``: "mean" or "normal"."""
    rows = ",".join(spans_of({*table.zero_rows, *table.outlier_rows}))
    return Atom(remedy="init_rows", target=table.parameter, value=f"{how} {rows}")


def forms(evidence: Evidence) -> Candidates:
    """Return the line of the first bad operation in log space, then with a value for what has none.

    Which of them the line has is for the trial to say.
    """
    target, found = _line(evidence), evidence.localization
    if not target:
        return ()
    event = found.first_bad if found is not None else None
    op = op_kind(event.forward_op or event.op) if event is not None else ""
    has_bounds = op.removeprefix("special_") in HAVE_BOUNDS
    counted = (Atom(remedy="form", target=target, value=COUNTED),)
    is_counted = event is not None and op in OF_COUNTS and _is_more_than_a_count(event)
    bounded = (Atom(remedy="form", target=target, value=BOUNDED),)
    kept = (Atom(remedy="form", target=target, value=KEPT),)
    afterwards = (Atom(remedy="form", target=target, value=MASK_AFTERWARDS),)
    return (
        (Atom(remedy="stable_form", target=target, value="log_space"),),
        *((bounded,) if has_bounds else ()),
        *((counted,) if is_counted else ()),
        (Atom(remedy="form", target=target, value=GUARDED),),
        *((afterwards,) if op == "mul" and _reads_a_mask(found) else ()),
        *((kept,) if event is not None and _may_stay_infinite(event) else ()),
    )


def _reads_a_mask(found: Localization | None) -> bool:
    """Return whether an infinity that is read was written as one: the logarithm of a 0 in the data
    is no mask.
    """
    return found is not None and (found.filled is not None or bool(found.held_in))


def _is_more_than_a_count(event: OpEvent) -> bool:
    """Return whether something other than 0 was divided by a count of 0: that is no mean."""
    return event.divides_by_count and any(one.posinf or one.neginf for one in event.outputs)


def _may_stay_infinite(event: OpEvent) -> bool:
    """Return whether infinities may be no fault of an operation: its own derivative fails, or in an
    update it makes NaN beside them.
    """
    if event.phase == "optimizer":
        return any(one.nan and (one.posinf or one.neginf) for one in event.outputs)
    return any(not one.finite for one in event.forward_outputs[:1])


def held_fill(evidence: Evidence) -> Candidates:
    """Return the fill of the first bad operation with a number that its format holds."""
    target = _line(evidence)
    return ((Atom(remedy="held_fill", target=target, value="held"),),) if target else ()


def finite_fill(evidence: Evidence) -> Candidates:
    """Return the fill by which the program wrote the infinity that was read with a finite number.

    Which number is the experiment's to say: the cure is one under which it makes no difference.
    """
    found = evidence.localization
    if found is None:
        return ()
    target = _place(found.first_bad if found.is_written else found.filled)
    numbers = FINITE if target else ()
    return tuple((Atom(remedy="finite_fill", target=target, value=one),) for one in numbers)


def finite_constant(evidence: Evidence) -> Candidates:
    """Return the read of a constant, or of a buffer, that is not finite with finite numbers: with
    the opposite of a large one only where it masks by -Inf. Which, is the experiment's to say.
    """
    found = evidence.localization
    if found is None:
        return ()
    is_constant = found.origin in ("from_constant", "from_buffer")
    event = found.first_bad if is_constant else found.held_read
    read = [one for one in event.inputs if not one.finite] if event is not None else []
    target = _place(event)
    if not target or len(read) != 1:
        return ()
    masks = not read[0].nan and not read[0].posinf
    numbers = tuple(FINITE) if masks else tuple(FINITE)[1:]
    name = found.culprit if is_constant else found.held_in
    atoms = (Atom(remedy="finite_constant", target=target, value=f"{n}:{name}") for n in numbers)
    return tuple((atom,) for atom in atoms)


def mended_at_source(evidence: Evidence) -> Atom | None:
    """Return the form of the line that made the batch so, or the variable that the failure goes
    back to, with which its numbers are finite.
    """
    rows = evidence.incident.rows if evidence.incident is not None else None
    for one in (rows, evidence.localization):
        if one is not None and one.unmade_at is not None and one.mended_as:
            return form_at(f"{one.unmade_at.file}:{one.unmade_at.line}", one.mended_as)
    return None


def finite_entry(evidence: Evidence) -> Candidates:
    """Return the reads, the latest first, of what was not finite before the step with 0 in its
    place: the cure where the script leaves it out only after that.
    """
    found = evidence.localization
    if found is None or found.origin not in ("from_batch", "from_constant") or not found.culprit:
        return ()
    if "exception" in found.reaches:  # a guard that raises no more says nothing of a loss
        return ()
    name = entry_of(found.culprit)
    lines = [f"{one.file}:{one.line}" for one in reversed(found.readers)]
    return tuple(
        (Atom(remedy="finite_constant", target=line, value=f"0:{name}"),) for line in lines
    )


def left_out(evidence: Evidence) -> str:
    """Return the entry of the batch, or the variable, that is not finite and that the script leaves
    out by itself, once another number in its place was seen to make no difference; "" without one.
    """
    found, tried = evidence.localization, set(finite_entry(evidence))
    passed = {one.atoms for one in evidence.trials if one.outcome == "pass"}
    if found is None or not found.culprit or tried.isdisjoint(passed):
        return ""
    return entry_of(found.culprit)


def _line(evidence: Evidence) -> str:
    return _place(evidence.localization.first_bad) if evidence.localization is not None else ""


def _place(event: OpEvent | None) -> str:
    source = event.source if event is not None else None
    return f"{source.file}:{source.line}" if source is not None else ""


def at_the_line(evidence: Evidence) -> Candidates:
    """Return other forms of the failing line, then the window without what it fails on."""
    written = (*finite_fill(evidence), *finite_constant(evidence))
    return (*forms(evidence), *written, *without_rows(evidence))


def without_rows(evidence: Evidence) -> Candidates:
    """Return the failing micro-batch without its bad samples, then without the micro-batch.

    What more than half of the samples meet is not theirs.
    """
    incident, found = evidence.incident, evidence.localization
    if incident is None or incident.at.micro is None:
        return ()
    micro = incident.at.micro
    positions = (found.positions if found is not None else None) or ()
    samples = dict.fromkeys(position.sample for position in positions)
    rows = tuple(Atom(remedy="drop_sample", target=f"{micro}:{row}") for row in samples)
    whole = (Atom(remedy="drop_micro", target=str(micro)),)
    shapes = (fact.shape for fact in incident.batch if fact.micro == micro)
    num = max((shape[0] for shape in shapes if shape), default=0)
    are_few = bool(rows) and (not num or 2 * len(rows) <= num)
    return (rows, whole) if are_few else (whole,)
