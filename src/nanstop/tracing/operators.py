"""What the tracer must know of torch's operators:
which are views, which overwrite, which only select.

Read from the operator schemas; the short name sets are for what a schema does not say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nanstop.frozen import frozen
from nanstop.records import op_name

_UNINITIALISED = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
)
_OVERWRITES = frozenset(
    {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"}
)
_UNDECLARED_VIEWS = frozenset(
    {"_unsafe_view", "_reshape_alias", "lift", "lift_fresh", "detach", "set_"}
)
FILLS = frozenset(
    {"full", "full_like", "new_full", "fill_", "fill", "scalar_tensor", "masked_fill"}
    | {"masked_fill_", "where", "lift_fresh_copy", "index_fill", "index_fill_", "constant_pad_nd"}
)
"""Ops that write a number given by the program, or choose it."""
NAN_DROPS = frozenset({"nansum", "nanmedian"})
"""Ops that leave NaN out of what they compute."""
ADDITIVE = frozenset({"add", "add_", "sub", "sub_", "rsub"})
"""Ops that add or subtract: by one of them a mask meets the scores it masks."""
SCALES = frozenset({"mul", "mul_", "div", "div_"})
"""Ops by which a temperature meets scores that are masked by now."""
CASTS = frozenset({"_to_copy", "copy_"})
"""Ops by which a value changes its format."""


@frozen
class Traits:
    """``mutated`` and ``overwritten``: positions (or names) of arguments that are written, and
    written without being read.
    """

    name: str
    base: str
    is_view: bool
    uninitialised: bool
    mutated: frozenset[int | str]
    overwritten: frozenset[int | str]
    makes_list: bool = False
    """Whether it returns a list of tensors, one for each of its list operands
    (``_foreach_mul``).
    """
    may_copy: bool = False
    """Whether it is declared as a view and made of other ops, one of which may copy (``to``)."""


@cache
def traits(func: Any) -> Traits:
    """Return the traits of an ``OpOverload``; ``name`` is printed as torch does
    (``aten.mul.Tensor``).
    """
    schema = func._schema
    base = op_name(str(func))
    mutated: set[int | str] = set()
    outs: set[int | str] = set()
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            keys = (argument.name,) if argument.kwarg_only else (position, argument.name)
            mutated.update(keys)
            if argument.kwarg_only:
                outs.update(keys)
    aliases = [r.alias_info for r in schema.returns if r.alias_info is not None]
    is_view = base in _UNDECLARED_VIEWS or (
        bool(aliases) and not mutated and not any(alias.is_write for alias in aliases)
    )
    overwritten = outs | (mutated if base in _OVERWRITES else set())
    return Traits(
        name=str(func),
        base=base,
        is_view=is_view,
        uninitialised=base in _UNINITIALISED,
        mutated=frozenset(mutated),
        overwritten=frozenset(overwritten),
        may_copy=is_view and bool(aliases) and func._can_decompose(),
        makes_list=[str(r.type) for r in schema.returns] == ["List[Tensor]"],
    )


def takes_memory(op: str) -> bool:
    """Return whether an op, by the name that torch prints, takes memory and writes nothing."""
    return op_name(op) in _UNINITIALISED


def tensors(args: Any, kwargs: Mapping[str, Any]) -> Iterator[tuple[int | str, int | None, Tensor]]:
    """Yield (argument position or name, lane, tensor);
    the lane is the place in a list argument, else None.
    """
    for position, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, Tensor):
            yield position, None, value
        elif isinstance(value, list | tuple):
            for lane, item in enumerate(value):
                if isinstance(item, Tensor):
                    yield position, lane, item


def scalars(args: Any, kwargs: Mapping[str, Any]) -> Iterator[float]:
    """Yield the plain numbers among the arguments."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield float(value)


def written(
    traits: Traits, args: Any, kwargs: Mapping[str, Any], result: Any
) -> Iterator[tuple[int | None, Tensor]]:
    """Yield (lane, tensor) of all that an op wrote:
    operands that it changed, then what it returned.
    """
    for position, lane, tensor in tensors(args, kwargs):
        if position in traits.mutated:
            yield lane, tensor
    returned = result if isinstance(result, tuple | list) else (result,)
    for place, item in enumerate(returned):
        if isinstance(item, Tensor):
            yield (place if traits.makes_list else None), item


def operands_of(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an op reads, in the order of its arguments."""
    overwritten = traits(func).overwritten
    return [t for position, _, t in tensors(args, kwargs) if position not in overwritten]


def outputs_of(func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> list[Tensor]:
    """Return the tensors that an op wrote, each once: changed operands first."""
    found: dict[int, Tensor] = {}
    for _, tensor in written(traits(func), args, kwargs, result):
        found.setdefault(id(tensor), tensor)
    return list(found.values())


def selected_operands(base: str, args: Any) -> Mapping[int | str, Tensor]:
    """Return, for ops that choose between operands, what they really take: the rest is zeroed.

    A NaN in the branch that ``where`` leaves out is no cause of anything.
    """
    if base == "where" and len(args) == 3:
        condition, first, second = args
        if isinstance(first, Tensor) and isinstance(second, Tensor):
            zero = first.new_zeros(())
            return {
                1: torch.where(condition, first, zero),
                2: torch.where(condition, zero.to(second.dtype), second),
            }
    if base in ("masked_fill", "masked_fill_") and isinstance(args[0], Tensor):
        return {0: torch.where(args[1], args[0].new_zeros(()), args[0])}
    return {}


def extremes(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return (min, max) as 0-dim tensors on the device; both NaN where any element is.
    No synchronisation.
    """
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    elif values.dtype.itemsize == 1:  # 8-bit floats have no reductions
        values = values.float()
    low, high = torch.aminmax(values)
    return low, high
