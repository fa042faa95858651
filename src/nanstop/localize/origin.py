"""Chooses among the births of bad values the one that explains a failure, and says it as a
record.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

from nanstop.localize import constants, dataflow, meant, slicing
from nanstop.localize.positions import BatchLayout, positions_in_turn, positions_that_fail
from nanstop.localize.provenance import descents, kinds_of, named
from nanstop.localize.slicing import range_of
from nanstop.records import (
    FailureKey,
    FailureKind,
    Localization,
    OpEvent,
    Position,
    TensorStats,
)
from nanstop.records.values import origin_of
from nanstop.records.vocabulary import NOT_FINITE, Descent
from nanstop.tracing.op_details import OpDetails
from nanstop.tracing.op_patches import Spot
from nanstop.tracing.places import source_line
from nanstop.tracing.recorder import Op, Trace, Value

_OUTSIDE = "the bad value was written outside any operation that torch dispatches"
_OTHER_PATH = "the second recorded run took another path"


class FailureOrigin:
    """One recorded failure: its births, what a second run saw of them, and what they reached.

    ``error``: the type of the exception that the run raised, or "".
    ``samples``: what is known of the batch.
    """

    def __init__(
        self,
        trace: Trace,
        births: slicing.Births,
        details: Mapping[int, OpDetails],
        reaches: tuple[str, ...],
        absorbed: tuple[int, ...],
        *,
        error: str = "",
        samples: BatchLayout | None = None,
    ) -> None:
        self.reaches = reaches
        self.trace = trace
        self._births = births
        self.stable = all(trace.ops[i].name == look.op for i, look in details.items())
        """Whether the second run saw the ops that were recorded."""
        self._details = details if self.stable else {}
        self._error = error
        self._samples = samples or BatchLayout()
        self._made = descents(trace, self._samples.masks)
        self.absorbed = tuple(filter(self._is_overflow, absorbed))

    def but(self, **known: tuple[Any, ...]) -> FailureOrigin:
        """Return the same failure with what it ``reaches``, or what was ``absorbed``, another."""
        other = copy.copy(self)
        vars(other).update(known)
        return other

    def suspects(self) -> dict[int, Spot]:
        """Return the op that is blamed with its bad elements, for ``Patch``, and behind it the
        others that gave birth at its place; nothing if none is.
        """
        born = self._first_born()
        if born is None or self._first_external(born) is not None:
            return {}
        at = self.trace.ops[born].place
        births = (born, *self._births.inf, *self._births.nan)
        there = [i for i in dict.fromkeys(births) if i >= born and self.trace.ops[i].place == at]
        seen = [(i, self._details[i]) for i in there if i in self._details]
        is_bad = (any(mask is not None for mask in one.bad) for _, one in seen)
        spots = {i: Spot(one.op, one.bad, one.read) for i, one in compress(seen, is_bad)}
        return spots if born in spots else {}

    def outside(self) -> dict[int, Spot]:
        """Return the op blamed for what it read, for ``Patch``, if others gave birth, too."""
        born = self._first_born()
        reader, _ = (born is not None and self._first_external(born)) or (-1, None)
        one = self._details.get(reader)
        is_bad = one is not None and any(mask is not None for mask in one.bad)
        return {reader: Spot(one.op, one.bad, one.read)} if one is not None and is_bad else {}

    def is_born_as(self, other: FailureOrigin) -> bool:
        """Return whether what failed was born as in another run, and nothing was bad before."""
        return self._births.alone_are(other._births)

    def localization(self) -> Localization | None:
        """Return the localization: an op that gave birth, else a tensor that was bad before,
        else what was absorbed.
        """
        found = self._explained()
        if found is None:
            return None
        spots = found.blind_spots if self.stable else (*found.blind_spots, _OTHER_PATH)
        if self.trace.unseen:
            spots += ("not measured: " + ", ".join(self.trace.unseen),)
        absorbed = tuple(map(self.event, self.absorbed))
        return replace(found, absorbed=absorbed, blind_spots=spots)

    def _explained(self) -> Localization | None:
        born = self._first_born()
        external = self._first_external(born)
        if external is not None:
            return self._external(*external)
        if born is not None:
            written = constants.written_number(self.trace, born, self._details.get(born))
            return self._born(born) if written is None else self._external(born, written)
        if self._error:
            return self._exception()
        if self.absorbed:
            found = self._born(self.absorbed[0])
            return replace(found, key=replace(found.key, kind="absorbed"), origin="absorbed")
        if not self.reaches:
            return None
        return Localization(
            key=FailureKey(kind="nan", phase="forward"),
            first_bad=None,
            origin="unknown",
            reaches=self.reaches,
            blind_spots=(_OUTSIDE,),
        )

    def _first_external(self, born: int | None) -> tuple[int, Value] | None:
        """Return the first bad tensor that no op wrote, if it is read before the first birth.

        Infinities without a name are constants of the program, and negative ones in a batch may be
        its mask: where they are added to scores, or the failure is a row that is masked throughout,
        they are not what is wrong.
        """
        for reader, value in self._births.external:
            if born is not None and reader > born:
                return None
            seen = range_of(self.trace, value)
            constant = not _name_of(value) or (not value.storage.other and seen.high != math.inf)
            if not constant or seen.has_nan or born is None:
                return reader, value
            if not self._masks_scores(reader) and not self._masked(born):
                return reader, value
        return None

    def _masks_scores(self, reader: int) -> bool:
        details = self._details.get(reader)
        return details is not None and details.masking

    def _masked(self, index: int) -> bool:
        """Return whether an op failed on rows that are masked throughout, or reads no infinity
        but the program's own.
        """
        details = self._details.get(index)
        named = any(_name_of(value) for _, value in self._births.external)
        return not named or (details is not None and details.hides)

    def _first_born(self) -> int | None:
        """Return the earliest birth that was not meant:
        a real infinity before the NaN it turned into.

        An infinity that looks meant, and is all that a failing loss goes back to, was not, unless
        it hid a choice that something else counts.
        """
        real = [i for i in self._births.inf if not self._is_meant(i)]
        if "loss" not in self.reaches and not self._error:
            # Forward ended finite: an infinity that it discarded is only the cause if its format
            # was too narrow, or where a derivative of another line reads it.
            late = slicing.read_late(self.trace, self._births)
            real = [i for i in real if i in late or self._is_overflow(i)]
        placed = [i for i in self._births.inf if slicing.is_placed(self.trace.ops[i])]
        computed = [i for i in self._births.inf if i not in placed]
        spoiling = (computed or placed) if "loss" in self.reaches else []
        born = min([*real, *self._births.nan], default=None)
        if born not in real and ("loss" in self.reaches or self._error):
            behind = meant.behind(self.trace, self._births, born)
            born = behind if behind in self._details else born
        if born is None:
            born = min(spoiling, default=None)
        return dataflow.turned_over(self.trace, self._births, born)

    def _is_meant(self, index: int) -> bool:
        return meant.is_meant(self.trace, index, self._details, self._made)

    def _is_overflow(self, index: int) -> bool:
        details = self._details.get(index)
        return details is not None and details.wider == "finite" and not self._is_meant(index)

    def _born(self, index: int) -> Localization:
        event = self.event(index)
        smuggled = self._smuggled(index)
        growth = dataflow.growth_chain(self.trace, index, self._made)
        return Localization(
            key=self._key(event, self._kind(event)),
            first_bad=event,
            origin="unknown" if smuggled else "born_here",
            culprit=self._lane_owner(index) if event.phase == "optimizer" else None,
            reaches=self.reaches,
            blind_spots=(_OUTSIDE,) if smuggled else (),
            growth=tuple(self.event(i) for i in growth),
            positions=self._positions(index),
            masks=self._made_masks(index, event),
            vanished=self._vanished(event),
            is_written=constants.spells_constant(event),
            filled=next(map(self.event, dataflow.fills(self.trace, index)), None),
            emptied=next(map(self.event, dataflow.emptied(self.trace, index)), None),
            hidden=meant.hidden_choice(self.trace, index, self._details),
            **self._held(index),
            counted=self._counted(event),
        )

    def _held(self, index: int) -> dict[str, Any]:
        """Return fields of ``Localization``: what has held an infinity that an op makes NaN of."""
        held = constants.held_infinity(self.trace, index, self._details)
        if held is None:
            return {}
        return {"held_in": held.name, "held_at": held.line, "held_read": self.event(held.read_by)}

    def _made_masks(self, index: int, event: OpEvent) -> tuple[OpEvent, ...]:
        """Return what made the -inf of rows that are masked throughout, where no fill and no
        cast of one did.
        """
        if not event.fully_masked_rows:
            return ()
        made = [i for i in self._births.inf if i < index and i in self._details]
        if any(slicing.is_placed(self.trace.ops[i]) for i in made) or self._births.external:
            return ()
        return tuple(self.event(i) for i in made)

    def _positions(self, index: int) -> tuple[Position, ...] | None:
        grid = self._samples.grid
        if grid is None and index < len(self.trace.ops):
            return positions_in_turn(self.trace, self.trace.ops[index], self._samples.rows)
        if grid is None:
            return None
        return positions_that_fail(self.trace, index, self._births.nan, self._details, grid)

    def _smuggled(self, index: int) -> bool:
        """Return whether the op reads a bad value although every op that wrote its operands
        wrote finite ones.
        """
        details = self._details.get(index)
        seen_bad = details is not None and any(not stats.finite for stats in details.inputs)
        inputs = self.trace.ops[index].inputs
        return seen_bad and not any(range_of(self.trace, v).is_bad for v in inputs)

    def _external(self, reader: int, value: Value) -> Localization:
        name = _name_of(value)
        event = self.event(reader) if reader < len(self.trace.ops) else None
        found = Localization(
            key=self._key(event, range_of(self.trace, value).kind),
            first_bad=event,
            origin=origin_of(name),
            culprit=name.removeprefix("buffer ") if name else None,
            reaches=self.reaches,
            positions=self._positions(reader),
            weighs_choices=origin_of(name) == "from_batch"
            and dataflow.weighs_choices(self.trace, self._made, value),
            blind_spots=() if name else (_OUTSIDE,),
            of_another_model=name != value.storage.name,
        )
        details = self._details.get(reader)
        own = constants.as_constant(found, value, details, self._samples)
        return own or constants.with_holder(found, value, details)

    def _exception(self) -> Localization:
        refused = dataflow.refused(self.trace)
        event = self.event(refused) if refused is not None else None
        key = self._key(event, "exception")
        return Localization(
            key=key if event else replace(key, op=self._error),
            first_bad=event,
            origin="born_here" if event else "unknown",
            reaches=self.reaches,
        )

    @staticmethod
    def _key(event: OpEvent | None, kind: FailureKind) -> FailureKey:
        if event is None:
            return FailureKey(kind=kind, phase="forward")
        return FailureKey(kind=kind, phase=event.phase, op=event.op, module=event.module)

    def _lane_owner(self, index: int) -> str | None:
        """Return the parameter that an op of the optimizer broke."""
        lanes = {o.lane for o in self._bad_outputs(index)}
        inputs = self.trace.ops[index].inputs
        named = [v.storage.name for v in inputs if v.storage.name and v.lane in lanes]
        parameters = [n for n in named if origin_of(n) == "from_param"]
        states = [n.rpartition(" of ")[2] for n in named if origin_of(n) == "from_state"]
        return next(iter((*parameters, *states, *self.reaches)), None)

    def _bad_outputs(self, index: int) -> list[Value]:
        outputs = self.trace.ops[index].outputs
        return [o for o in outputs if range_of(self.trace, o).is_bad]

    def _kind(self, event: OpEvent) -> FailureKind:
        counts = [sum(getattr(o, k) for o in event.outputs) for k in ("nan", "posinf", "neginf")]
        if not any(counts):
            bad = self._bad_outputs(event.index)
            return range_of(self.trace, bad[0]).kind if bad else "nan"
        return NOT_FINITE[counts.index(max(counts))]

    def event(self, index: int) -> OpEvent:
        """Return the record of an op, with full statistics where details were kept."""
        op, details = self.trace.ops[index], self._details.get(index)
        lanes, read = self._read(index)
        inputs, outputs = self._light(read), self._light(op.outputs)
        if lanes:
            outputs = self._light(v for v in op.outputs if v.lane in lanes)
        elif details:
            inputs, outputs = details.inputs, details.outputs
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
            forward_outputs=self._light(dataflow.forward_outputs(self.trace, op)),
            wider=details.wider if details else "unknown",
            reference=details.reference if details else "unknown",
            unwritten=details.unwritten if details else None,
            fully_masked_rows=details.fully_masked_rows if details else 0,
            legal=self._legal(op),
            descent=self._descent(read, inputs),
            read_by=dataflow.read_by(self.trace, index) if details else (),
            zeros=details.zeros if details else (),
            lines_in_half=dataflow.lines_in_half(self.trace, index) if details else (),
        )

    def _read(self, index: int) -> tuple[set[int | None], list[Value]]:
        """Return the lanes of an op over lists of tensors that are bad, and what it has read."""
        lanes = {o.lane for o in self._bad_outputs(index)} - {None}
        return lanes, [v for v in self.trace.ops[index].inputs if not lanes or v.lane in lanes]

    def _descent(
        self, read: Sequence[Value], inputs: tuple[TensorStats, ...]
    ) -> tuple[tuple[Descent, ...], ...]:
        """Return what each input is by descent; nothing where inputs and values do not match."""
        shown = _shown(read, inputs)
        if [value.shape for value in shown] != [stats.shape for stats in inputs]:
            return ()
        kinds = (kinds_of(self.trace, self._made, value, self._samples.masks) for value in shown)
        return tuple(map(named, kinds))

    def divisor(self, event: OpEvent) -> Value | None:
        """Return what an op divides by, where that is known."""
        place, shown = event.divisor, _shown(self._read(event.index)[1], event.inputs)
        return shown[place] if place is not None and len(shown) == len(event.inputs) else None

    def _vanished(self, event: OpEvent) -> OpEvent | None:
        op, divisor = self.trace.ops[event.index], self.divisor(event)
        found = dataflow.lost(self.trace, op, divisor, of_function=event.is_of_function)
        return self.event(found) if found is not None else None

    def _counted(self, event: OpEvent) -> tuple[str, ...]:
        """Return the entries of the batch that the op's divisor counts."""
        divisor = self.divisor(event)
        if divisor is None or "count" not in kinds_of(self.trace, self._made, divisor):
            return ()
        return dataflow.entries_of(self.trace, divisor)

    def _legal(self, op: Op) -> str | None:
        if not self._bad_outputs(op.index) or not self._is_meant(op.index):
            return None
        return "placed by the program" if slicing.is_placed(op) else "part of a mask"

    def _light(self, values: Iterable[Value]) -> tuple[TensorStats, ...]:
        return tuple(
            slicing.light_stats(value, range_of(self.trace, value))
            for value in values
            if value.slot >= 0
        )


def _shown(read: Sequence[Value], inputs: Sequence[TensorStats]) -> Sequence[Value]:
    """Return the values that an op has read whose ranges stand in its event."""
    return read if len(read) == len(inputs) else [value for value in read if value.slot >= 0]


def _name_of(value: Value) -> str | None:
    """Return what a value is called, as a parameter of a model beside the trained one, too."""
    return value.storage.name or value.storage.other
