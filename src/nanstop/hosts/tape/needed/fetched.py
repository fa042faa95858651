"""Data that a step reads: what loaders have given, and what a script takes by an index."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from nanstop.hosts.tape.numbers import Number
from nanstop.hosts.tape.tape_calls import Constant, Slot, TapedCall, filled, spelled_by
from nanstop.numerics.tensors import bad_mask, has_bad, version
from nanstop.records import BatchRows

_TAKING = frozenset(
    (Tensor.__getitem__, Tensor.index_select, torch.index_select, Tensor.narrow, torch.narrow)
)


def makers(slot: int, early: Sequence[TapedCall]) -> list[TapedCall]:
    """Return, in order, the calls that a slot comes from."""
    wanted, found = {slot}, list[TapedCall]()
    for call in reversed(early):
        if wanted.intersection(call.results):
            wanted.update(one.index for one in call.held(Slot))
            wanted.update(number.slot for number in call.held(Number))
            found.append(call)
    return found[::-1]


def comes_of_model(slot: int, calls: Sequence[TapedCall]) -> bool:
    """Return whether a call of a model has a part in what is in a slot."""
    return any(isinstance(call.function, nn.Module) for call in makers(slot, calls))


def fetched_data(
    chosen: Iterable[TapedCall], calls: Sequence[TapedCall], given: dict[int, Constant]
) -> dict[int, Constant]:
    """Return what is finite of the data that the ``chosen`` of some calls make: what a loader has
    ``given``, by slot, and what the script has taken by an index of what nothing in this step has
    made, which is noted there. Its rows are the samples; those of all data are none.
    """
    found: dict[int, Constant] = {}
    made = {call.first: call for call in calls if call.count}
    for call in (made[one.first] for one in chosen if one.first in made):
        if call.first not in given and _takes_rows(call):
            taken = _as_constant(call, calls)
            if taken is not None:
                given[call.first] = taken
        known = given.get(call.first)
        if known is not None and call.count == 1 and not known.moved and not has_bad(known.tensor):
            found[call.first] = known
    return found


def taken_beside(
    chosen: Iterable[TapedCall], calls: Sequence[TapedCall], given: dict[int, Constant]
) -> dict[int, Constant]:
    """Return what of the ``chosen`` calls the script has taken by an index once a model was called,
    with a row for each sample of the model's: its labels, where ``loss(model(x[i:j]), y[i:j])`` is
    asked for. Noted as in ``fetched_data``; what has bad rows alone is made again.
    """
    model = next((call for call in calls if call.rng is not None), None)
    if model is None:
        return {}
    read = (one.tensor for one in model.held(Constant))
    num_rows = next((len(tensor) for tensor in read if tensor.dim()), 0)
    found: dict[int, Constant] = {}
    for call in chosen if num_rows else ():
        if call.first > model.first and _takes_rows(call):
            known = given.get(call.first) or _as_constant(call, calls)
            if known is not None and len(known.tensor) == num_rows and not _is_all_bad(known):
                found[call.first] = given[call.first] = known
    return found


def _as_constant(call: TapedCall, calls: Sequence[TapedCall]) -> Constant | None:
    taken = _values(call, calls).get(call.first)
    has_rows = taken is not None and taken.dim()
    return Constant(taken, version(taken), call.first) if taken is not None and has_rows else None


def _is_all_bad(constant: Constant) -> bool:
    bad = bad_mask(constant.tensor)
    return bool(bad.reshape(len(bad), -1).any(1).all())


def rows_taken(inputs: Iterable[Constant], calls: Sequence[TapedCall]) -> BatchRows | None:
    """Return which rows of which tensor the first of the inputs that the script has taken by an
    index is made of; None where there is none.
    """
    for one in inputs:
        call = _taking(one, calls)
        rows = _rows(call, calls) if call is not None else None
        if call is not None and rows is not None and len(rows) == len(one.tensor):
            name = spelled_by(call, call.args[0])
            return BatchRows(data=f"`{name}`", rows=rows) if name else None
    return None


def is_data(constant: Constant, calls: Sequence[TapedCall], given: Mapping[int, Constant]) -> bool:
    """Return whether a loader has given a constant, or the script has taken it by an index."""
    return constant.origin in given or _taking(constant, calls) is not None


def data_of(constant: Constant, calls: Sequence[TapedCall]) -> str:
    """Return what the script calls the data that it has taken a constant from, "" for none."""
    call = _taking(constant, calls)
    return spelled_by(call, call.args[0]) if call is not None else ""


def _taking(constant: Constant, calls: Sequence[TapedCall]) -> TapedCall | None:
    if constant.origin is None:
        return None
    made = next((one for one in calls if constant.origin in one.results), None)
    return made if made is not None and _takes_rows(made) else None


def _takes_rows(call: TapedCall) -> bool:
    if call.function not in _TAKING or call.count != 1 or not call.args:
        return False
    data = call.args[0]
    return isinstance(data, Constant) and data.origin is None and not data.tensor.requires_grad


def _values(call: TapedCall, calls: Sequence[TapedCall]) -> dict[int, Tensor]:
    """Return what a call and those that it comes from give; nothing of it where a model has a part
    in that, or it cannot be made again.
    """
    values: dict[int, Tensor] = {}
    with suppress(Exception):  # what cannot be made again is not looked at
        for one in makers(call.first, calls):
            if one.obstacle or isinstance(one.function, nn.Module):
                break
            one.play(values, {})
    return values


def _rows(call: TapedCall, calls: Sequence[TapedCall]) -> tuple[int, ...] | None:
    """Return the rows that a call takes: it takes the same of their numbers."""
    with suppress(Exception):  # it takes no rows, or not of the first dimension
        values = _values(call, calls)
        data, *rest = filled(call.args, values, {})
        kwargs: dict[str, Any] = filled(call.kwargs, values, {})
        if call.function is Tensor.__getitem__ and isinstance(rest[0], tuple):
            rest = list(rest[0][:1])
        found = call.function(torch.arange(len(data), device=data.device), *rest, **kwargs)
        return tuple(found.tolist()) if found.dim() == 1 else None
    return None
