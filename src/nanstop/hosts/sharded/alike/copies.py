"""What one rank says of its copy of a model: checksums of its tensors, by name."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nanstop.numerics.checksums import Checksums
from nanstop.numerics.tensors import is_plain
from nanstop.numerics.trained import held_by
from nanstop.records import SourceLine
from nanstop.records.record import record


@record
class Copy:
    """Of one backward. Every checksum has the place of its parameter in ``names``.

    ``exchanged``: whether DistributedDataParallel brings its gradient to all ranks. ``arrived``:
    gradients as the backward of step ``looked_at`` left them, none where that was not looked at;
    ``consumed``: as its update took them, None where it took none. ``states``, ``options``: of the
    optimizer before that update. ``num_updates``: that this
    rank has come to before it, ``num_local`` of them by an optimizer that had seen no exchange
    since its last, and ``num_late`` of gradients that a backward had added to after the exchange.
    ``written_at``: lines of the script that have written to gradients in between.
    """

    number: int
    step: int
    names: tuple[str, ...]
    exchanged: tuple[bool, ...]
    weights: tuple[int, ...]
    arrived: tuple[int | None, ...] = ()
    looked_at: int | None = None
    consumed: tuple[int | None, ...] = ()
    states: tuple[tuple[str, int], ...] = ()
    options: tuple[tuple[str, float], ...] = ()
    num_updates: int = 0
    num_local: int = 0
    num_late: int = 0
    written_at: tuple[SourceLine, ...] = ()

    @property
    def digest(self) -> str:
        """A digest of the weights, in 16 characters."""
        return hashlib.sha256(repr((self.names, self.weights)).encode()).hexdigest()[:16]


@record
class Told:
    """What a rank tells where copies differ. ``before``: the last that did not."""

    copy: Copy
    before: Copy | None = None


def has_hook(model: DistributedDataParallel) -> bool:
    """Return whether gradients are exchanged by a communication hook. Asking takes a while."""
    return bool(model._comm_hooks or model._get_ddp_logging_data().get("comm_hook"))


def parameters_to_compare(model: DistributedDataParallel) -> dict[str, Tensor]:
    """Return the parameters that every rank has as a whole, and has the same.

    Without those that the script told DistributedDataParallel to ignore. Buffers are not among
    them: they are those of the first rank after each forward's beginning, or the script's own.
    """
    ignored = model.parameters_to_ignore
    named = model.module.named_parameters()
    return {name: p for name, p in named if name not in ignored and is_plain(p)}


def copy_of(model: DistributedDataParallel, number: int, step: int, sums: Checksums) -> Copy:
    """Return this rank's copy after the ``number``-th backward, no gradient being looked at and no
    update being counted. Reads weights once; synchronises each device.
    """
    parameters = parameters_to_compare(model)
    known = {id(parameter) for parameter in model._module_parameters}
    weights = _by_place(sums, parameters, parameters)
    return Copy(
        number=number,
        step=step,
        names=tuple(parameters),
        exchanged=tuple(id(p) in known for p in parameters.values()),
        weights=tuple(one or 0 for one in weights),
    )


def with_gradients(copy: Copy, model: DistributedDataParallel, step: int, sums: Checksums) -> Copy:
    """Return a copy with the gradients that a backward has left in this ``step``. Reads them once;
    synchronises each device.
    """
    gradients = {name: p.grad for name, p in parameters_to_compare(model).items()}
    arrived = _by_place(sums, dict.fromkeys(copy.names), gradients)
    return replace(copy, arrived=arrived, looked_at=step)


def at_update(
    copy: Copy,
    model: DistributedDataParallel,
    optimizer: Optimizer,
    written_at: tuple[SourceLine, ...],
    sums: Checksums,
) -> Copy:
    """Return a copy with what an optimizer is about to take. Reads gradients and state once;
    synchronises each device.
    """
    parameters, held = parameters_to_compare(model), set(map(id, held_by(optimizer)))
    gradients = {name: p.grad if id(p) in held else None for name, p in parameters.items()}
    states = {
        f"{key} of {name}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor) and is_plain(value)
    }
    return replace(
        copy,
        consumed=_by_place(sums, dict.fromkeys(copy.names), gradients),
        states=tuple(zip(states, sums.all_of(states.values()), strict=True)),
        options=tuple(_options(optimizer)),
        written_at=written_at,
    )


def _by_place(
    sums: Checksums, names: Mapping[str, Any], given: Mapping[str, Tensor | None]
) -> tuple[int | None, ...]:
    """Return the checksum of each name's tensor, None where it has none that is dense."""
    plain = {name: given.get(name) for name in names}
    dense = {name: one for name, one in plain.items() if one is not None and is_plain(one)}
    found = dict(zip(dense, sums.all_of(dense.values()), strict=True))
    return tuple(found.get(name) for name in names)


def _options(optimizer: Optimizer) -> list[tuple[str, float]]:
    """Return the numbers that an optimizer was told, by name and parameter group."""
    found: list[tuple[str, float]] = []
    several = len(optimizer.param_groups) > 1
    for place, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            parts = value if isinstance(value, tuple) else (value,)
            name = f"{key} of group {place}" if several else key
            if key != "params" and all(isinstance(one, (int, float, Tensor)) for one in parts):
                found += [(name, float(one)) for one in parts]
    return found
