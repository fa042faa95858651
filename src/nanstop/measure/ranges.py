"""The range of everything that one window computes, against the formats that the run computes it
in.

Ranges are taken in a run that is wide enough to have them (under ``remedies.precision.reference``):
what overflows in the run's own format is saturated there. Which op emits which format is taken from
a run as it is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nanstop.numerics.tensors import dense_parts, floats, format_name
from nanstop.records import FORMAT_MAX, Phase, RangeRow, op_name
from nanstop.records.values import origin_of
from nanstop.replay.conditions import Under
from nanstop.replay.step import Step
from nanstop.tracing import operators
from nanstop.tracing.record_step import known_tensors, record
from nanstop.tracing.recorder import Op, Trace

_MASK = -(2.0**14)
"""A negative number of the program's own beyond which it can only be a mask:
2 bits below the end of float16.
"""
_CREATES = frozenset(
    {"full", "full_like", "new_full", "fill_", "fill", "scalar_tensor", "lift_fresh_copy"}
)
_SILENT = (
    _CREATES | operators.CASTS | {"zeros", "zeros_like", "new_zeros", "zero_", "clone", "ones_like"}
)
"""Ops that make no number: their ranges are those of what they copy, or the program's own."""


@dataclass(frozen=True, slots=True)
class Formats:
    """The narrowest format that each op's result is in, or is cast to by what reads it.

    ``exact``: by (micro-batch, phase, module, op, how many such ops came before);
    ``usual``: by (phase, module) alone.
    """

    exact: Mapping[tuple[int, Phase, str, str, int], str]
    usual: Mapping[tuple[Phase, str], str]
    narrowest: str

    def of(self, key: tuple[int, Phase, str, str, int]) -> str:
        """Return the format of an op that may have been recorded under another kernel or without
        casts.
        """
        return self.exact.get(key) or self.usual.get((key[1], key[2])) or self.narrowest

    def gradient(self, module: str, stored: str) -> str:
        """Return the narrowest format that a gradient of one of ``module``'s parameters goes
        through.
        """
        return _narrower(stored, self.usual.get(("backward", module)))


def probe_ranges(
    step: Step,
    *,
    dtype: str | None = "float16",
    formats: Formats | None = None,
    under: Under = nullcontext,
    micros: Iterable[int] | None = None,
) -> tuple[RangeRow, ...]:
    """Return the range of what every op of a window outputs, worst headroom first;
    rows differ in phase, module, op, dtype.

    ``under``: the context to run in, normally ``lambda: reference(step.view)``, so that values are
    true and not saturated. They are read against ``dtype``; with ``formats`` (from ``op_formats``)
    against what the run emits there, and ``dtype`` is not looked at. ``micros``: which
    micro-batches, all by default. The backward's ranges are those of the loss as the step scales
    it. Masks (large negative numbers that the program itself writes) and infinities are left out.
    Values of the forward that checkpointing computes again are counted once.

    Undone bitwise. Synchronises the device at every op. Raises what the step raises.
    """
    largest: dict[tuple[Phase, str, str, str], float] = {}
    for micro in _chosen(step, micros):
        look = _Look(_buffer_masks(step, micro))
        trace = record(step, micro, under=under, look=look).whole_trace()
        for key, op in keyed(trace, micro):
            if op.index in look.seen and op.phase != "recompute":
                narrow = formats.of(key) if formats is not None else dtype
                place = op.phase, op.module, op.name, narrow or "float32"
                largest[place] = max(look.seen[op.index], largest.get(place, 0.0))
    rows = (
        RangeRow(
            phase=phase,
            module=module,
            op=op,
            dtype=narrow,
            absmax=absmax,
            headroom_bits=headroom_bits(absmax, narrow),
        )
        for (phase, module, op, narrow), absmax in largest.items()
    )
    return tuple(sorted(rows, key=lambda row: row.headroom_bits))


def op_formats(step: Step, *, micros: Iterable[int] | None = None) -> Formats:
    """Return the format of what every op of a window emits as the run is. Undone bitwise."""
    exact: dict[tuple[int, Phase, str, str, int], str] = {}
    usual: dict[tuple[Phase, str], str] = {}
    for micro in _chosen(step, micros):
        trace = record(step, micro).whole_trace()
        emitted = _emitted(trace)
        for key, op in keyed(trace, micro):
            if op.index in emitted:
                exact[key] = emitted[op.index]
                place = key[1], key[2]
                usual[place] = _narrower(emitted[op.index], usual.get(place))
    narrowest = "float32"
    for name in usual.values():
        narrowest = _narrower(name, narrowest)
    return Formats(exact, usual, narrowest)


def keyed(trace: Trace, micro: int) -> Iterator[tuple[tuple[int, Phase, str, str, int], Op]]:
    """Yield each op with a name for it that another run of the same micro-batch, with other
    casts, shares.
    """
    count: Counter[tuple[Phase, str, str]] = Counter()
    for op in trace.ops:
        place = op.phase, op.module, op.name
        yield (micro, *place, count[place]), op
        count[place] += 1


def headroom_bits(absmax: float, dtype: str) -> float:
    """Return how often ``absmax`` can double before it leaves ``dtype``: negative beyond its
    end, inf for 0.
    """
    limit = FORMAT_MAX.get(dtype, math.inf)
    return math.log2(limit / absmax) if absmax > 0.0 else math.inf


def _chosen(step: Step, micros: Iterable[int] | None) -> tuple[int, ...]:
    return tuple(range(len(step.batches)) if micros is None else micros)


def _emitted(trace: Trace) -> dict[int, str]:
    """Return the format of each op's floating result, narrowed to that of a cast which reads it."""
    found: dict[int, str] = {}
    for op in trace.ops:
        for value in op.outputs:
            if value.dtype.is_floating_point:
                found[op.index] = _narrower(format_name(value.dtype), found.get(op.index))
        if op_name(op.name) in operators.CASTS and op.inputs and op.index in found:
            source = op.inputs[-1]
            writers = source.storage.writers[: source.generation]
            if writers and writers[-1] in found:
                found[writers[-1]] = _narrower(found[op.index], found[writers[-1]])
    return found


def _narrower(name: str, other: str | None) -> str:
    """Return the format of smaller range, of smaller precision where ranges are alike."""
    return name if other is None or FORMAT_MAX.get(name, math.inf) < FORMAT_MAX[other] else other


class _Look:
    """Called with each op and then with its result; keeps the largest finite size of its outputs
    that are no mask, and follows masks from op to op.
    """

    def __init__(self, masks: Mapping[int, float]) -> None:
        self.seen: dict[int, float] = {}
        self._masks = dict(masks)

    def __call__(
        self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None]:
        traits = operators.traits(func)
        number = self._mask_among(args, kwargs)

        def done(result: Any) -> None:
            for _, tensor in operators.written(traits, args, kwargs, result):
                for part in dense_parts(tensor):
                    self._measure(index, traits, part, number)

        return done

    def _mask_among(self, args: Any, kwargs: Mapping[str, Any]) -> float:
        """Return the mask number nearest to zero among what an op reads, 0 if there is none."""
        numbers = [v for v in (*args, *kwargs.values()) if isinstance(v, float) and v <= _MASK]
        for _, _, tensor in operators.tensors(args, kwargs):
            for part in dense_parts(tensor):
                known = self._masks.get(part.untyped_storage()._cdata)
                numbers += [known] if known is not None else []
        return max(numbers, default=0.0)

    def _measure(self, index: int, traits: operators.Traits, part: Tensor, number: float) -> None:
        storage = part.untyped_storage()._cdata
        for values in floats(part):
            low = float(values.min())
            if traits.base in _CREATES and low <= _MASK:
                number = low
            if number and low <= number / 2:
                self._masks[storage] = number
            if traits.base not in _SILENT and not traits.uninitialised:
                above = values[values > number / 2] if number else values
                self._note(index, above)

    def _note(self, index: int, values: Tensor) -> None:
        largest = self.seen.setdefault(index, 0.0)
        if values.numel():
            size = values.abs().nan_to_num(0.0, 0.0, 0.0).amax()
            self.seen[index] = max(largest, float(size))


class SizeLook(_Look):
    """Keeps no more than the largest finite size of each output;
    give it to ``record`` as ``look``.
    """

    def __init__(self, step: Step, micro: int) -> None:
        super().__init__(_buffer_masks(step, micro))
        self._micro = micro
        self._outputs: dict[int, list[Tensor]] = {}

    def sizes(self, trace: Trace) -> dict[tuple[int, Phase, str, str, int], tuple[float, ...]]:
        """Return the sizes of the outputs of each op, by the names of ``keyed``. Synchronises
        the device.
        """
        return {
            key: tuple(map(float, self._outputs[op.index]))
            for key, op in keyed(trace, self._micro)
            if op.index in self._outputs
        }

    def _note(self, index: int, values: Tensor) -> None:
        empty = values.new_zeros(())
        size = values.abs().nan_to_num(0.0, 0.0, 0.0).amax() if values.numel() else empty
        self._outputs.setdefault(index, []).append(size)


def _buffer_masks(step: Step, micro: int) -> dict[int, float]:
    """Return the buffers and batch entries that hold a mask already, by storage."""
    named = known_tensors(step, micro)
    kept = ("from_buffer", "from_batch")
    entries = [t for name, t in named.items() if origin_of(name) in kept]
    return {
        values.untyped_storage()._cdata: low
        for tensor in entries
        for values in floats(tensor)
        if (low := float(values.min())) <= _MASK
    }
