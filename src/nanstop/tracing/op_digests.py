"""Digests of what each operation of a run reads and writes, and how far one is from float64."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from nanstop.numerics.checksums import Checksums
from nanstop.numerics.tensors import is_measurable, is_plain
from nanstop.tracing import operators
from nanstop.tracing.in_float64 import wide
from nanstop.tracing.operators import operands_of, outputs_of


class Digest(NamedTuple):
    """Of one operation. ``read``: of all that it was given; ``wrote``: of its results, "" where
    they are not said by what it was given.
    """

    read: str
    wrote: str


class OpDigests:
    """A look (see ``op_patches.Look``) that has every operation of a run digested on its device.

    Draws are made from a seed of their own, the same wherever the same operation has that number.
    Tensors are read once for each operation that reads or writes them.
    """

    def __init__(self) -> None:
        self._sums = Checksums()
        self._kept: dict[int, tuple[str, list[Tensor], list[Tensor]]] = {}

    def __call__(
        self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        leaves, form = tree_flatten((args, dict(kwargs)))
        if any(isinstance(leaf, Generator) for leaf in leaves):
            return None
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.manual_seed(index)
        read = operands_of(func, args, kwargs)
        if operators.traits(func).uninitialised or not all(map(is_plain, read)):
            return None
        said = [_shape_of(leaf) for leaf in leaves]
        static = hashlib.sha256(repr((str(func), form, said)).encode()).hexdigest()
        sums = [self._sums.of(tensor) for tensor in read]

        def done(result: Any) -> None:
            wrote = [one for one in outputs_of(func, args, kwargs, result) if is_measurable(one)]
            if all(map(is_plain, wrote)):
                self._kept[index] = (static, sums, [self._sums.of(one) for one in wrote])

        return done

    def read(self) -> dict[int, Digest]:
        """Return the digest of each operation, by its number. Synchronises each device once."""
        scalars = [one for _, read, wrote in self._kept.values() for one in (*read, *wrote)]
        values = iter(Checksums.values(scalars))
        found: dict[int, Digest] = {}
        for index, (static, read, wrote) in self._kept.items():
            given = [next(values) for _ in read]
            made = [next(values) for _ in wrote]
            found[index] = Digest(_hashed(static, given), _hashed("", made) if made else "")
        return found


def _shape_of(leaf: Any) -> str:
    """Return what there is to say of an argument but its numbers and the number of its device."""
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype} {tuple(leaf.shape)} {leaf.stride()} {leaf.requires_grad}"
    return leaf.type if isinstance(leaf, torch.device) else repr(leaf)


def _hashed(text: str, numbers: list[int]) -> str:
    return hashlib.sha256(f"{text} {numbers}".encode()).hexdigest()[:16]


class FarFromFloat64:
    """A look that says how far one operation's results are from the same in float64 on the host.

    ``error``: the largest difference, in units of the format's spacing at the largest value; None
    where the operation draws, or cannot be computed there.
    """

    def __init__(self, index: int) -> None:
        self.error: float | None = None
        self._index = index

    @torch.no_grad()
    def __call__(
        self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.manual_seed(index)
            return None
        if index != self._index:
            return None
        given, named = _on_host(args), _on_host(dict(kwargs))
        exact = outputs_of(func, given, named, func(*given, **named))

        def done(result: Any) -> None:
            made = outputs_of(func, args, kwargs, result)
            pairs = zip(made, exact, strict=False)
            errors = [_error(one, true) for one, true in pairs if is_measurable(one)]
            self.error = max(errors, default=None)

        return done


def _on_host(value: Any) -> Any:
    moved = tree_map_only(Tensor, _widened, value)
    moved = tree_map_only(torch.device, lambda _: torch.device("cpu"), moved)
    return tree_map_only(torch.dtype, wide, moved)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", wide(tensor.dtype), copy=True)


def _error(made: Tensor, exact: Tensor) -> float:
    """Return a difference in spacings at the largest exact value; inf where only one is finite."""
    if made.shape != exact.shape or not made.numel():
        return 0.0
    difference = (made.detach().cpu().to(exact.dtype) - exact).abs().max()
    largest = float(exact.abs().max())
    spacing = torch.finfo(made.dtype).eps * largest or torch.finfo(made.dtype).tiny
    error = float(difference) / spacing
    return float("inf") if math.isnan(error) else error
