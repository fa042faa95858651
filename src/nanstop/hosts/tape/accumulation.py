"""How the losses of a window are made one, as far as its recorded micro-batches tell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from nanstop.hosts.model.updates import seen_accumulation
from nanstop.hosts.tape.pieces import pieces, program_of
from nanstop.hosts.tape.taped_micro import TapedMicro
from nanstop.records import AccumulationFacts
from nanstop.tracing.places import source_line


def accumulation_in(
    micros: Sequence[TapedMicro], updated: Iterable[Tensor]
) -> AccumulationFacts | None:
    """Return how a window's own losses and gradients are made one; ``updated``: what its update
    changes. Synchronises the device.
    """
    seen = [micro for micro in micros if micro.loss is not None]
    if len(seen) < 2:
        return None
    programs = {id(micro): program_of(micro) for micro in seen}
    split = pieces((micro, programs[id(micro)]) for micro in seen)
    program = programs[id(split[0])] if split else None
    found = seen_accumulation(
        program.modules if program is not None else (),
        [micro.batch for micro in split],
        [float(micro.loss) for micro in split if micro.loss is not None],
        (parameter.grad for parameter in updated),
    )
    return replace(found, made_at=source_line(split[0].made_at)) if found and split else found
