"""From a failing step to the operation that broke it.

A recorded run finds where bad values were born on the way to the failing loss, gradient or weight;
a second run looks closely at those few ops; and short runs in which one birth is put right confirm
that it is the cause. All are undone; all may synchronise the device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from nanstop.errors import ShortOfMemoryError
from nanstop.localize import meant, slicing
from nanstop.localize.absorbed import those_that_matter
from nanstop.localize.constants import readers, with_writer
from nanstop.localize.exact import with_exact
from nanstop.localize.memory.unseen import written_unseen
from nanstop.localize.origin import FailureOrigin
from nanstop.localize.scene import Scene
from nanstop.numerics.room import give_back
from nanstop.records import Confidence, FailureKey, Localization, Phase
from nanstop.replay.step import Step
from nanstop.tracing.op_details import MOST_ON_DEVICE, Observer, OpDetails, storage_names
from nanstop.tracing.op_patches import Patch, Spot
from nanstop.tracing.record_step import (
    Recording,
    known_tensors,
)
from nanstop.tracing.recorder import Op, Trace, Value

_MAX_DETAILS = 24
_MAX_DECOYS = 2
"""How many births that explain nothing are passed over before the earliest is taken."""

_MAX_UNSEEN = 4
"""How many writes that no operation makes are gone behind."""


def localize(
    step: Step,
    micro: int,
    *,
    update: bool = False,
    phase: Phase = "forward",
) -> Localization | None:
    """Return where the failure of a micro-batch was born, or None if it ran clean.

    ``update``: localize the optimizer update of the window instead. ``phase``: what the run is
    called when it is no training step ("evaluate", "generate"). An overflow that turned finite
    again is reported even where nothing failed, if loss or gradients come of it.
    """
    began = time.perf_counter()
    scene = Scene(step, micro, update, phase)
    first = scene.recorded()
    origin = _explained(scene, first, {})
    if origin is not None and not origin.stable:
        # Caches that fill at first use (of a nested tensor's sizes, say) make the first run of a
        # process another path.
        first = scene.recorded()
        origin = _explained(scene, first, {})
    if origin is None:
        return None
    origin, tested = _confirmed(scene, origin)
    found = origin.localization()
    if found is not None and found.origin == "absorbed":
        matter = those_that_matter(step, micro, first.trace, origin.absorbed)
        found = origin.but(absorbed=matter).localization()
    if found is None:
        return None
    with suppress(ShortOfMemoryError):
        if not tested or found.origin == "unknown":
            origin, found, tested = _behind_unseen(scene, first, origin, found)
        found = with_exact(found, origin, scene.seen_again)
    return replace(
        _described(found, scene),
        readers=readers(origin.trace, found),
        confidence=_confidence(found, tested=tested),
        num_ops=len(first.trace.ops),
        seconds=time.perf_counter() - began,
    )


def fails_at(
    step: Step,
    micro: int,
    key: FailureKey,
    *,
    update: bool = False,
    phase: Phase = "forward",
) -> bool:
    """Return whether a run fails by what is born where ``key`` says: one recorded run, undone.

    False says little: it may fail there by what is there before any operation, or elsewhere.
    """
    recording = Scene(step, micro, update, phase).recorded()
    births = slicing.trace_back(recording.trace, sinks(recording))
    ops = (recording.trace.ops[index] for index in (*births.inf, *births.nan))
    return any((op.name, op.phase, op.module) == (key.op, key.phase, key.module) for op in ops)


def _confidence(found: Localization, *, tested: bool) -> Confidence:
    """Return how certain the place is: the op that raised or was put right, the tensor that was bad
    before any op ran; likely where the run did not take the same path twice, or where a line was
    seen to write what is bad.
    """
    if found.origin == "unknown":
        return "possible" if found.unseen_write is None else "likely"
    named = found.origin.startswith("from_") or found.made is not None
    named = named or found.key.kind in ("exception", "absorbed")
    return "certain" if (tested or named) and not found.blind_spots else "likely"


def _explained(
    scene: Scene, recording: Recording, mended: Mapping[int, Spot]
) -> FailureOrigin | None:
    """Return what a recording and the details of its births say;
    None if nothing failed and nothing was absorbed.
    """
    births = slicing.trace_back(recording.trace, sinks(recording))
    births = slicing.with_dropped(recording.trace, births)
    live = slicing.reaching(recording.trace, _ends(recording))
    absorbed = slicing.absorbed_births(recording.trace, live)
    if not recording.reaches and not absorbed:
        return None
    wanted = _wanted(recording, births, absorbed)
    try:
        details = _looked(scene, wanted, mended)
    except ShortOfMemoryError:
        give_back(scene.step.view.device_type)
        details = _looked(scene, _needed(recording, births, absorbed), mended, sparing=True)
    return FailureOrigin(
        recording.trace,
        births,
        details,
        recording.reaches,
        absorbed,
        error=type(recording.error).__name__ if recording.error is not None else "",
        samples=scene.layout,
    )


def sinks(recording: Recording) -> list[Value]:
    """Return the bad values to trace:
    operands of an op that raised, else a failing loss, else failing gradients.
    """
    if recording.error is not None:
        return [
            value
            for value in _raised_operands(recording.trace)
            if slicing.range_of(recording.trace, value).is_bad
        ]
    if "loss" in recording.failed:
        return list(recording.failed["loss"])
    return [value for values in recording.failed.values() for value in values]


def _ends(recording: Recording) -> list[Value]:
    values = [value for values in recording.failed.values() for value in values]
    if recording.error is not None:
        values += _raised_operands(recording.trace)
    return [*values, *recording.loss_values]


def _raised_operands(trace: Trace) -> list[Value]:
    """Return what the op that raised had read;
    where the program itself raised, the last bad values it looked at.
    """
    backwards = list(reversed(trace.ops))
    raised = next((op for op in backwards if op.raised), None)
    if raised is not None:
        return list(raised.inputs)
    bad = ([v for v in op.inputs if slicing.range_of(trace, v).is_bad] for op in backwards)
    return next(filter(None, bad), [])


def _wanted(recording: Recording, births: slicing.Births, absorbed: Iterable[int]) -> set[int]:
    num_ops = len(recording.trace.ops)
    chosen = {*births.inf[:_MAX_DETAILS], *births.nan[:_MAX_DETAILS]}
    chosen |= {index for index, _ in births.external[:2] if index < num_ops}
    chosen |= {op.index for op in recording.trace.ops if op.raised}
    hidden = meant.behind(recording.trace, births, min(births.nan, default=None))
    chosen |= {hidden} if hidden is not None else set()
    for birth in absorbed:
        if len(chosen) < 3 * _MAX_DETAILS:
            chosen.add(birth)
    return chosen


def _needed(recording: Recording, births: slicing.Births, absorbed: Sequence[int]) -> set[int]:
    """Return of what is wanted the first of each kind, which a place is named by: Inf, -Inf, NaN,
    what was bad before, what raised, what was absorbed.
    """
    ops = recording.trace.ops
    high = (i for i in births.inf if _reaches_inf(recording.trace, ops[i]))
    outside = (index for index, _ in births.external if index < len(ops))
    firsts = (next(iter(kind), None) for kind in (births.inf, high, births.nan, outside, absorbed))
    return {i for i in firsts if i is not None} | {op.index for op in ops if op.raised}


def _reaches_inf(trace: Trace, op: Op) -> bool:
    return any(slicing.range_of(trace, value).high == math.inf for value in op.outputs)


def _looked(
    scene: Scene,
    wanted: Collection[int],
    mended: Mapping[int, Spot],
    *,
    sparing: bool = False,
) -> dict[int, OpDetails]:
    """Return the details of some ops of one more run. ``sparing``: with nothing held on the device,
    and no further than the last of them, which leaves the script in the midst of its step as an
    allocation that fails does.
    """
    if not wanted:
        return {}
    names = storage_names(known_tensors(scene.step, scene.micro))
    observer = Observer(wanted, names, 0 if sparing else MOST_ON_DEVICE)
    looks = (Patch(mended), observer) if mended else (observer,)
    scene.seen_again(*looks, until=max(wanted) if sparing else None)
    return observer.seen


def _described(found: Localization, scene: Scene) -> Localization:
    """Return ``found`` with the class of its module, whether every sample has a part in it, and
    what writes to the buffer that it comes of.
    """
    grid, event = scene.grid, found.first_bad
    if event is not None:
        modules = dict(scene.step.view.root.named_modules())
        kind = type(modules[event.module]).__name__ if event.module in modules else ""
        event = replace(event, module_class=kind if event.module else "")
    bad = {place.sample for place in found.positions or ()}
    is_whole = grid is not None and len(bad) == grid.rows > 1
    found = with_writer(found, scene.step.view.root)
    return replace(found, first_bad=event, in_every_sample=is_whole)


def _confirmed(scene: Scene, origin: FailureOrigin) -> tuple[FailureOrigin, bool]:
    """Return the origin whose cause stands the test, with its place put right the failure is gone,
    or without it remains; and whether a run in which it was put right passed.

    A padded row may be NaN while the failure is born in another row of the same tensor: the
    earliest birth is then a decoy. It is put right for good, and the run recorded again. A line
    that is called twice is one place; the first call is the cause if the second alone is not.
    """
    first = origin
    mended, origin = _past_overwritten(scene, origin)
    for _ in range(_MAX_DECOYS):
        suspects = origin.suspects()
        if not suspects or not first.reaches:
            return origin, False
        try:
            passed, other = _tried(scene, first.reaches, mended, suspects)
        except ShortOfMemoryError:
            return origin, False
        if passed or other is None:
            return origin, passed
        earliest = next(iter(suspects))
        mended, origin = mended | {earliest: suspects[earliest]}, other.but(reaches=first.reaches)
    return origin, True


def _past_overwritten(scene: Scene, origin: FailureOrigin) -> tuple[dict[int, Spot], FailureOrigin]:
    """Return what is put right, and the origin that is left then, where a tensor that was bad
    before any op explains nothing: with finite numbers read in its place the same ops give birth.
    It is memory that the step writes over, of which a part was seen.
    """
    outside = origin.outside()
    if not outside:
        return {}, origin
    try:
        rest = _explained(scene, scene.recorded(Patch(outside)), outside)
    except ShortOfMemoryError:
        return {}, origin
    if rest is None or not rest.is_born_as(origin):
        return {}, origin
    return outside, rest.but(reaches=origin.reaches)


def _tried(
    scene: Scene,
    reaches: tuple[str, ...],
    mended: Mapping[int, Spot],
    suspects: Mapping[int, Spot],
) -> tuple[bool, FailureOrigin | None]:
    """Return whether the failure is gone with ``suspects`` put right and remains without their
    first; where not, the origin that is left once the first is put right, if that one takes the
    failure away.
    """
    earliest = next(iter(suspects))
    others = {index: spot for index, spot in suspects.items() if index != earliest}
    if _passes(scene, reaches, {**mended, **suspects}) and not (
        others and _passes(scene, reaches, {**mended, **others})
    ):
        return True, None
    tried = {**mended, earliest: suspects[earliest]}
    rest = _explained(scene, scene.recorded(Patch(tried)), tried)
    other = rest.suspects() if rest is not None else {}
    if rest is None or not other or not _passes(scene, reaches, {**mended, **other}):
        return False, None
    return False, rest


def _behind_unseen(
    scene: Scene, recording: Recording, origin: FailureOrigin, found: Localization
) -> tuple[FailureOrigin, Localization, bool]:
    """Return what explains a failure whose place could not be tested, and whether it could now:
    what was bad before a write that no operation makes is where the search goes on.
    """
    for _ in range(_MAX_UNSEEN):
        found, behind = written_unseen(found, origin, scene.seen_again)
        if not behind or recording.error is not None:
            break
        failed = {found.reaches[0]: behind}
        earlier = _explained(scene, replace(recording, trace=origin.trace, failed=failed), {})
        if earlier is None:
            break
        earlier = earlier.but(reaches=origin.reaches)
        before, tested = _confirmed(scene, earlier)
        deeper = before.localization()
        last = max(value.storage.writers[value.generation - 1] for value in behind)
        if not _is_until(deeper, last):
            # Memory that is only taken may hold NaN that explains nothing: the test goes on to
            # what reads the write itself.
            before, tested, deeper = earlier, False, earlier.localization()
        if deeper is None or not _is_until(deeper, last):
            break
        origin, found = before, deeper
        if tested:
            return origin, found, True
    return origin, found, False


def _is_until(found: Localization | None, last: int) -> bool:
    """Return whether a failure was born at an operation up to that of an index, or before all."""
    if found is None or found.first_bad is None:
        return False
    return found.origin.startswith("from_") or found.first_bad.index <= last


def _passes(scene: Scene, reaches: tuple[str, ...], mended: Mapping[int, Spot]) -> bool:
    """Return whether what failed first is finite with some births put right."""
    patch = Patch(mended)
    failed, error = scene.seen_again(patch)
    return not patch.missed and error is None and reaches[0] not in failed
