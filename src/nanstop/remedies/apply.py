"""Every remedy by name, and the one way to apply them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from nanstop.errors import NanstopError
from nanstop.records import Atom
from nanstop.records.remedies import remedy_of
from nanstop.remedies import data, kernels, precision, training
from nanstop.remedies.data import dropped_micros, rebatch
from nanstop.remedies.forms.mode import finite_constant, form, memory_fill
from nanstop.remedies.precision import reference
from nanstop.replay.step import ModelView

__all__ = ["TABLE", "Remedy", "applied", "dropped_micros", "rebatch", "reference", "until_update"]

Span = Literal["micro", "window"]


@dataclass(frozen=True, slots=True)
class Remedy:
    """A remedy in code. ``apply(view, atom)``: in force inside, undone bitwise on exit.

    ``span``: what it must enclose. "micro": forward and backward of the failing micro-batch.
    "window": every micro-batch of the window and the update, because gradients or the update itself
    are in another format or scale.
    """

    name: str
    apply: Callable[[ModelView, Atom], AbstractContextManager[None]]
    span: Span = "micro"


TABLE: Mapping[str, Remedy] = MappingProxyType(
    {
        remedy.name: remedy
        for remedy in (
            Remedy("drop_micro", data.drop_micro),
            Remedy("drop_sample", data.drop_sample),
            Remedy("init_rows", data.init_rows, "window"),
            Remedy("attention", kernels.attention),
            Remedy("sdpa_kernel", kernels.sdpa_kernel),
            Remedy("eager", kernels.eager),
            Remedy("bf16", precision.bf16, "window"),
            Remedy("fp32_trainables", precision.fp32_trainables, "window"),
            Remedy("fp32_logits", precision.fp32_logits),
            Remedy("form", form),
            Remedy("stable_form", form),
            Remedy("memory_fill", memory_fill),
            Remedy("held_fill", form),
            Remedy("finite_fill", form),
            Remedy("finite_constant", finite_constant),
            Remedy("fp32_line", form),
            Remedy("island", precision.island),
            Remedy("outer_autocast", precision.outer_autocast),
            Remedy("loss_scale", training.loss_scale, "window"),
            Remedy("unscale", training.unscale, "window"),
            Remedy("clip", training.clip, "window"),
            Remedy("lr", training.lr, "window"),
            Remedy("weight_decay", training.weight_decay, "window"),
            Remedy("optimizer_eps", training.optimizer_eps, "window"),
            Remedy("fp32_optimizer_state", training.fp32_optimizer_state, "window"),
            Remedy("optimizer_swap", training.optimizer_swap, "window"),
        )
    }
)
"""In the order in which they are applied. Storage comes before the forward, so that an island lies
around what float32 trainables emit; guards come before log space, which then answers first: what is
known there needs none; clipping and rates come before what takes the optimizer's step over.
"""

_ORDER = {name: place for place, name in enumerate(TABLE)}


@contextmanager
def applied(view: ModelView, atoms: Sequence[Atom]) -> Iterator[None]:
    """Have all ``atoms`` in force, whatever order they come in; on exit all is bitwise as before.

    Raises NanstopError, with nothing left applied, for an unknown remedy, target or value, and for
    two atoms that give one target different values.
    """
    with ExitStack() as undo:
        for atom in _in_order(atoms):
            undo.enter_context(TABLE[atom.remedy].apply(view, atom))
        yield


def until_update(atoms: Iterable[Atom]) -> tuple[Atom, ...]:
    """Return the atoms that must be on for the whole window and its update, each once."""
    return tuple(a for a in dict.fromkeys(atoms) if TABLE[remedy_of(a).name].span == "window")


def _in_order(atoms: Sequence[Atom]) -> list[Atom]:
    chosen: dict[tuple[str, str], Atom] = {}
    for atom in atoms:
        place = remedy_of(atom).name, atom.target
        if chosen.setdefault(place, atom) != atom:
            raise NanstopError(f"{atom} contradicts {chosen[place]}")
    return sorted(chosen.values(), key=lambda atom: (_ORDER[atom.remedy], atom.target))
