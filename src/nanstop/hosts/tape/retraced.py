"""What a forward that is run once more from its tape tells of the lines of the script."""

from __future__ import annotations

from torch import Tensor

from nanstop.hosts.tape.numbers import Number
from nanstop.hosts.tape.tape import Tape
from nanstop.hosts.tape.tape_calls import Constant, Slot
from nanstop.replay.step import Measure
from nanstop.tracing.places import Line


def cuts(tape: Tape) -> list[Line]:
    """Return the lines by which the loss loses its graph: their operands need a gradient, their
    results do not (``detach``, ``data``, a number). Runs forward once more.
    """
    values: dict[int, Tensor] = {}
    found: dict[Line, None] = {}
    for call in tape.needed():
        if call.keep or set(tape.asked).intersection(call.results):
            continue
        given = [values[slot.index] for slot in call.held(Slot)]
        read = [one for one in call.held(Number) if values[one.slot].requires_grad]
        found |= dict.fromkeys(one.line for one in read)
        call.play(values, {})
        made = [values[slot] for slot in call.results if values[slot].is_floating_point()]
        had = call.grad and any(tensor.requires_grad for tensor in given)
        if had and made and not any(tensor.requires_grad for tensor in made):
            found[call.line] = None
    return list(found)


def makers(tape: Tape, measure: Measure) -> list[Line]:
    """Return the lines that made something of which more is measured than of all that they
    read, in order, as far as they were recorded. Runs forward once more.
    """
    values: dict[int, Tensor] = {}
    found: dict[Line, None] = {}
    needed = tape.needed()
    for call in tape.calls:
        if call.keep or not (call.outer or any(call is one for one in needed)):
            continue
        slots = [slot.index for slot in call.held(Slot)]
        if any(slot not in values for slot in slots):
            continue
        call.play(values, {})
        read = [*(values[slot] for slot in slots), *(c.tensor for c in call.held(Constant))]
        made = [values[slot] for slot in call.results if slot in values]
        if max(map(measure, made), default=0) > max(map(measure, read), default=0):
            found[call.line] = None
    return list(found)
