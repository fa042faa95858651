"""From a failing step to the operation that broke it.

Two recorded runs of the same micro-batch: a light one that finds where bad values were born on the way to the failing
loss, gradient or weight, and a close-up of those few ops. Both are undone; both may synchronise the device.
"""

from __future__ import annotations

import linecache
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nanstop.core import slicing
from nanstop.core.closeup import CloseUp, Observer
from nanstop.core.numerics import bad_mask, format_name, is_measurable
from nanstop.core.step import Batch, Step
from nanstop.core.trace import Op, Recorder, Trace, Value
from nanstop.records import (
    FailureKey,
    FailureKind,
    Localization,
    OpEvent,
    Origin,
    Phase,
    SourceLine,
    TensorStats,
)

_MAX_CLOSEUPS = 24
_OUTSIDE = "the bad value was written outside any operation that torch dispatches"


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded run: its trace, the values that failed (name -> value) and what it raised."""

    trace: Trace
    failed: Mapping[str, Value]
    loss: Value | None
    error: BaseException | None


def known_tensors(step: Step, batch: Batch) -> dict[str, Tensor]:
    """Return every tensor that has a name before the step runs: parameters, buffers, batch, optimizer state."""
    root = step.view.root
    named: dict[str, Tensor] = {f"batch[{k}]": v for k, v in batch.items() if isinstance(v, Tensor)}
    named |= {f"buffer {name}": buffer for name, buffer in root.named_buffers()}
    named |= dict(root.named_parameters(remove_duplicate=True))
    return named | dict(_optimizer_state(step))


def _optimizer_state(step: Step) -> Iterator[tuple[str, Tensor]]:
    optimizer = step.view.optimizer
    if optimizer is None:
        return
    names = {id(p): name for name, p in step.view.root.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                yield f"state {key} of {names.get(id(parameter), '?')}", value


def eager() -> AbstractContextManager[Any]:
    """Run compiled modules eagerly inside: a dispatch mode would disable their compiled code for the rest of the run."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def record(
    step: Step,
    micro: int,
    *,
    observer: Observer | None = None,
    update: bool = False,
    phase: Phase = "forward",
) -> Recording:
    """Run a micro-batch (or, with ``update``, the whole window and then its update) under the recorder, and undo it."""
    batch = step.batches[micro]
    root = step.view.root
    error: BaseException | None = None
    loss: Tensor | None = None
    with step.isolated(with_update=update), eager():
        if update:
            for earlier in range(len(step.batches)):
                step.run(earlier)
        recorder = Recorder(
            root,
            known_tensors(step, batch),
            phase="optimizer" if update else phase,
            observer=observer,
        )
        with recorder:
            try:
                if update:
                    step.update()
                else:
                    loss = step.run(micro)
            except Exception as raised:
                error = raised
        failed = {
            name: recorder.value(tensor) for name, tensor in _failed(step, loss, update=update)
        }
        reached = recorder.value(loss) if loss is not None and is_measurable(loss) else None
        return Recording(recorder.finish(), failed, reached, error)


def _failed(step: Step, loss: Tensor | None, *, update: bool) -> Iterator[tuple[str, Tensor]]:
    if loss is not None and bool(bad_mask(loss).any()):
        yield "loss", loss
    for name, parameter in step.view.root.named_parameters():
        tensor = parameter.detach() if update else parameter.grad
        if tensor is not None and is_measurable(tensor) and bool(bad_mask(tensor).any()):
            yield name, tensor


def localize(
    step: Step,
    micro: int,
    *,
    update: bool = False,
    phase: Phase = "forward",
    clock: Callable[[], float] = time.perf_counter,
) -> Localization | None:
    """Return where the failure of a micro-batch was born, or None if it ran clean.

    ``update``: localize the optimizer update of the window instead. ``phase``: what the run is called when it is no
    training step ("evaluate", "generate"). An overflow that turned finite again is reported even where nothing failed.
    """
    began = clock()
    first = record(step, micro, update=update, phase=phase)
    births, sinks = _births(first)
    live = slicing.reaching(first.trace, _sink_values(first))
    absorbed = slicing.absorptions(first.trace, live)
    if not sinks and not absorbed:
        return None
    wanted = _wanted(first, births, absorbed)
    second, closeups = _close_up(step, micro, wanted, update=update, phase=phase)
    stable = _same_ops(first.trace, second.trace, wanted)
    story = _Story(first, births, closeups if stable else {}, sinks)
    found = story.tell(absorbed)
    return replace(
        found,
        num_ops=len(first.trace.ops),
        blind_spots=found.blind_spots
        + (() if stable else ("the second recorded run took another path",)),
        seconds=clock() - began,
    )


def _sink_values(recording: Recording) -> list[Value]:
    values = list(recording.failed.values())
    if recording.loss is not None:
        values.append(recording.loss)
    if recording.error is not None:
        values += _raised_operands(recording.trace)
    return values


def _raised_operands(trace: Trace) -> list[Value]:
    raised = next((op for op in reversed(trace.ops) if op.raised), None)
    return list(raised.inputs) if raised else []


def _births(recording: Recording) -> tuple[slicing.Births, tuple[str, ...]]:
    """Return the births behind what failed, and its names. A failing loss comes before failing gradients."""
    names = tuple(recording.failed)
    if recording.error is not None:
        bad = [
            v
            for v in _raised_operands(recording.trace)
            if slicing.range_of(recording.trace, v).is_bad
        ]
        return slicing.trace_back(recording.trace, bad), ("exception", *names)
    sinks = [recording.failed["loss"]] if "loss" in recording.failed else recording.failed.values()
    return slicing.trace_back(recording.trace, sinks), names


def _wanted(
    recording: Recording, births: slicing.Births, absorbed: tuple[slicing.Absorption, ...]
) -> frozenset[int]:
    chosen = [*births.inf[:_MAX_CLOSEUPS], *births.nan[:_MAX_CLOSEUPS]]
    chosen += [index for index, _ in births.external[:2]]
    for absorption in absorbed[:4]:
        chosen += [absorption.birth, absorption.absorber]
    chosen += [op.index for op in recording.trace.ops if op.raised]
    return frozenset(chosen)


def _close_up(
    step: Step, micro: int, wanted: frozenset[int], *, update: bool, phase: Phase
) -> tuple[Recording, Mapping[int, CloseUp]]:
    batch = step.batches[micro]
    ids = step.view.token_ids(batch)
    names = {
        tensor.untyped_storage()._cdata: name
        for name, tensor in known_tensors(step, batch).items()
        if tensor.layout is torch.strided and tensor.device.type != "meta"
    }
    observer = Observer(
        wanted,
        names,
        (int(ids.shape[0]), int(ids.shape[1])) if ids is not None and ids.dim() == 2 else None,
        frozenset(tuple(p.shape) for p in step.view.root.parameters()),
    )
    recording = record(step, micro, observer=observer, update=update, phase=phase)
    return recording, observer.seen


def _same_ops(first: Trace, second: Trace, wanted: Iterable[int]) -> bool:
    return all(
        index >= len(first.ops)
        or (index < len(second.ops) and first.ops[index].name == second.ops[index].name)
        for index in wanted
    )


class _Story:
    """Chooses among the births the one that explains the failure, and says it as a record."""

    def __init__(
        self,
        recording: Recording,
        births: slicing.Births,
        closeups: Mapping[int, CloseUp],
        sinks: tuple[str, ...],
    ) -> None:
        self._trace = recording.trace
        self._recording = recording
        self._births = births
        self._closeups = closeups
        self._sinks = sinks

    def tell(self, absorbed: tuple[slicing.Absorption, ...]) -> Localization:
        """Return the localization: an op that gave birth, else a tensor that was bad before, else what was absorbed."""
        overflowed = tuple(a for a in absorbed if self._is_overflow(a.birth))
        events = tuple(self.event(a.birth) for a in overflowed)
        born = self._first_born()
        external = self._first_external(born)
        if external is not None:
            return replace(self._external(*external), absorbed=events)
        if born is not None:
            return replace(self._born(born), absorbed=events)
        raised = next((op for op in reversed(self._trace.ops) if op.raised), None)
        if self._recording.error is not None:
            return self._exception(raised)
        if overflowed:
            found = self._born(overflowed[0].birth)
            key = replace(found.key, kind="absorbed")
            return replace(found, key=key, origin="absorbed", absorbed=events)
        return Localization(
            key=FailureKey(kind=self._kind(None), phase="forward"),
            first_bad=None,
            origin="unknown",
            reaches=self._sinks,
            blind_spots=(_OUTSIDE,),
        )

    def _first_external(self, born: int | None) -> tuple[int, Value] | None:
        """Return the first bad tensor that no op wrote, if it comes before the first birth.

        A nameless infinity is a constant of the program (a mask value), not a fault of its own.
        """
        for reader, value in self._births.external:
            constant = value.storage.name is None and not _holds_nan(self._trace, value)
            if not (constant and born is not None) and (born is None or reader <= born):
                return reader, value
        return None

    def _first_born(self) -> int | None:
        """Return the earliest birth that was not meant: a real infinity before the NaN it turned into."""
        real = [i for i in self._births.inf if not self._is_legal(i)]
        forward_ok = "loss" not in self._sinks and "exception" not in self._sinks
        if forward_ok:
            # Forward ended finite: an infinity that it discarded is only the cause if its format was too narrow.
            real = [
                i
                for i in real
                if self._trace.ops[i].phase in ("backward", "optimizer", "recompute")
                or self._is_overflow(i)
            ]
        nan = [i for i in self._births.nan if not self._is_legal(i)]
        if real and nan and self._masks_all(nan[0]):
            return min(nan)
        return min(real + nan, default=None)

    def _masks_all(self, index: int) -> bool:
        closeup = self._closeups.get(index)
        only_negative = all(
            not math.isinf(self._trace.high[o.slot]) and not math.isnan(self._trace.high[o.slot])
            for i in self._births.inf
            for o in self._trace.ops[i].outputs
            if o.slot >= 0
        )
        return closeup is not None and closeup.fully_masked_rows > 0 and only_negative

    def _is_legal(self, index: int) -> bool:
        op = self._trace.ops[index]
        if slicing.is_constant(op):
            return True
        closeup = self._closeups.get(index)
        return closeup is not None and closeup.legal is not None and not self._makes_nan(index)

    def _makes_nan(self, index: int) -> bool:
        outputs = self._trace.ops[index].outputs
        return any(slicing.range_of(self._trace, o).has_nan for o in outputs)

    def _is_overflow(self, index: int) -> bool:
        closeup = self._closeups.get(index)
        return closeup is not None and closeup.wider == "finite" and closeup.legal is None

    def _born(self, index: int) -> Localization:
        event = self.event(index)
        closeup = self._closeups.get(index)
        smuggled = self._smuggled(index)
        return Localization(
            key=FailureKey(
                kind=self._kind(event), phase=event.phase, op=event.op, module=event.module
            ),
            first_bad=event,
            origin="unknown" if smuggled else "born_here",
            culprit=self._lane_owner(index) if event.phase == "optimizer" else None,
            reaches=self._sinks,
            blind_spots=(_OUTSIDE,) if smuggled else (),
            growth=tuple(self.event(i) for i in slicing.growth_chain(self._trace, index)),
            positions=closeup.positions if closeup else None,
        )

    def _smuggled(self, index: int) -> bool:
        """Return whether the op reads a bad value although every op that wrote its operands wrote finite ones."""
        closeup = self._closeups.get(index)
        seen_bad = closeup is not None and any(not stats.finite for stats in closeup.inputs)
        inputs = self._trace.ops[index].inputs
        return seen_bad and not any(slicing.range_of(self._trace, v).is_bad for v in inputs)

    def _external(self, reader: int, value: Value) -> Localization:
        name = value.storage.name
        event = self.event(reader) if reader < len(self._trace.ops) else None
        return Localization(
            key=FailureKey(
                kind=_kind_of(slicing.range_of(self._trace, value)),
                phase=event.phase if event else "forward",
                op=event.op if event else "",
                module=event.module if event else "",
            ),
            first_bad=event,
            origin=_origin_of(name),
            culprit=name.removeprefix("buffer ") if name else None,
            reaches=self._sinks,
            blind_spots=() if name else (_OUTSIDE,),
        )

    def _exception(self, raised: Op | None) -> Localization:
        event = self.event(raised.index) if raised else None
        return Localization(
            key=FailureKey(
                kind="exception",
                phase=event.phase if event else "forward",
                op=event.op if event else type(self._recording.error).__name__,
                module=event.module if event else "",
            ),
            first_bad=event,
            origin="born_here" if event else "unknown",
            reaches=self._sinks,
        )

    def _lane_owner(self, index: int) -> str | None:
        """Return the parameter that a list op of the optimizer broke."""
        lanes = {o.lane for o in self._bad_outputs(index)}
        for value in self._trace.ops[index].inputs:
            name = value.storage.name
            if (
                value.lane in lanes
                and name
                and not name.startswith(("state ", "batch[", "buffer "))
            ):
                return name
        return next((s for s in self._sinks if s not in ("loss", "exception")), None)

    def _bad_outputs(self, index: int) -> list[Value]:
        outputs = self._trace.ops[index].outputs
        return [o for o in outputs if slicing.range_of(self._trace, o).is_bad]

    def _kind(self, event: OpEvent | None) -> FailureKind:
        if event is None:
            first = next(iter(self._recording.failed.values()), None)
            return _kind_of(slicing.range_of(self._trace, first)) if first else "nan"
        counts = [
            sum(getattr(o, kind) for o in event.outputs) for kind in ("nan", "posinf", "neginf")
        ]
        if not any(counts) and self._bad_outputs(event.index):
            return _kind_of(slicing.range_of(self._trace, self._bad_outputs(event.index)[0]))
        kinds: tuple[FailureKind, ...] = ("nan", "+inf", "-inf")
        return kinds[counts.index(max(counts))]

    def event(self, index: int) -> OpEvent:
        """Return the record of an op, with full statistics where a close-up was taken."""
        op = self._trace.ops[index]
        closeup = self._closeups.get(index)
        lanes = {o.lane for o in self._bad_outputs(index)} - {None}
        inputs = closeup.inputs if closeup else self._light(op.inputs)
        outputs = closeup.outputs if closeup else self._light(op.outputs)
        if lanes:
            inputs = self._light(v for v in op.inputs if v.lane in lanes)
            outputs = self._light(v for v in op.outputs if v.lane in lanes)
        return OpEvent(
            index=index,
            phase=op.phase,
            op=op.name,
            module=op.module,
            source=source_line(op.line),
            inputs=inputs,
            outputs=outputs,
            scalars=op.scalars,
            node=op.node,
            forward_op=op.forward,
            wider=closeup.wider if closeup else "unknown",
            reference=closeup.reference if closeup else "unknown",
            fully_masked_rows=closeup.fully_masked_rows if closeup else 0,
            legal=closeup.legal if closeup else None,
        )

    def _light(self, values: Iterable[Value]) -> tuple[TensorStats, ...]:
        return tuple(_light_stats(value, slicing.range_of(self._trace, value)) for value in values)


def _light_stats(value: Value, seen: slicing.Range) -> TensorStats:
    finite = [abs(edge) for edge in (seen.low, seen.high) if math.isfinite(edge)]
    return TensorStats(
        shape=value.shape,
        dtype=format_name(value.dtype),
        nan=int(seen.has_nan),
        posinf=int(seen.high == math.inf),
        neginf=int(seen.low == -math.inf),
        absmax=max(finite, default=0.0),
        name=value.storage.name,
    )


def _holds_nan(trace: Trace, value: Value) -> bool:
    return slicing.range_of(trace, value).has_nan


def _kind_of(seen: slicing.Range) -> FailureKind:
    if seen.has_nan:
        return "nan"
    return "+inf" if seen.high == math.inf else "-inf"


def _origin_of(name: str | None) -> Origin:
    if name is None:
        return "unknown"
    if name.startswith("batch["):
        return "from_batch"
    if name.startswith("buffer "):
        return "from_buffer"
    return "from_state" if name.startswith("state ") else "from_param"


def source_line(line: tuple[Any, int] | None) -> SourceLine | None:
    """Return the source text of a (code, line) pair."""
    if line is None:
        return None
    code, number = line
    text = linecache.getline(code.co_filename, number).strip()
    return SourceLine(file=code.co_filename, line=number, function=code.co_name, text=text)
