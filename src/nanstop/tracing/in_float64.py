"""Some operations of a second run once more beside it, all in float64."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from nanstop.numerics.tensors import bad_mask, is_inexact, is_measurable, is_plain
from nanstop.records import Finiteness
from nanstop.tracing.operators import outputs_of


@dataclass(frozen=True, slots=True)
class _Storage:
    """The memory that tensors and their views show, in float64. ``held``: one of them, so that
    nobody else gets its memory.
    """

    held: Tensor
    dtype: torch.dtype
    flat: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> _Storage:
        """Return the memory behind a tensor with what it holds now."""
        num = tensor.untyped_storage().nbytes() // tensor.element_size()
        return cls(tensor, tensor.dtype, _widened(tensor.detach().as_strided((num,), (1,), 0)))

    def shown_by(self, tensor: Tensor) -> Tensor:
        """Return what a tensor shows of it."""
        return self.flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class InFloat64:
    """Computes ``ops``, the last of them with what the others gave, as if every number had been
    float64 from their start.

    Numbers that are drawn, whole numbers and choices are those of the run. ``outcome``: whether the
    last one is finite there where its result is not; "unknown" where one could not be computed.
    Holds what the operations read and made until its end.
    """

    def __init__(self, ops: Collection[int], last: int) -> None:
        self.outcome: Finiteness = "unknown"
        self._ops, self._last = frozenset(ops) | {last}, last
        self._known: dict[int, _Storage] = {}
        self._gave_up = False

    @torch.no_grad()
    def __call__(
        self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        """Compute an operation before the run does; return what is to be called with its result."""
        if index not in self._ops or self._gave_up:
            return None
        if torch.Tag.nondeterministic_seeded in func.tags:
            return None
        try:
            given, options = self._exact(args), self._exact(dict(kwargs))
            exact = outputs_of(func, given, options, func(*given, **options))
        except Exception:
            self._gave_up = True
            return None

        def done(result: Any) -> None:
            outputs = outputs_of(func, args, kwargs, result)
            if index == self._last:
                self._judge(outputs, exact)
                return
            for output, one in zip(outputs, exact, strict=False):
                if is_inexact(output) and is_plain(output):
                    self._keep(output, one)

        return done

    def _keep(self, made: Tensor, exact: Tensor) -> None:
        key = made.untyped_storage()._cdata
        if key not in self._known or self._known[key].dtype is not made.dtype:
            self._known[key] = _Storage.of(made)
        self._known[key].shown_by(made).copy_(exact)

    def _exact(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            known = self._known.get(value.untyped_storage()._cdata) if is_plain(value) else None
            if known is None or known.dtype is not value.dtype:
                return _widened(value)
            return known.shown_by(value)
        if isinstance(value, torch.dtype):
            return wide(value)
        if isinstance(value, list | tuple):
            return type(value)(map(self._exact, value))
        if isinstance(value, dict):
            return {key: self._exact(one) for key, one in value.items()}
        return value

    def _judge(self, outputs: list[Tensor], exact: list[Tensor]) -> None:
        self._known.clear()
        for output, one in zip(outputs, exact, strict=False):
            if not is_measurable(output) or output.shape != one.shape:
                continue
            bad = bad_mask(output)
            if bool((bad & bad_mask(one)).any()):
                self.outcome = "nonfinite"
                return
            if bool(bad.any()):
                self.outcome = "finite"


class NarrowFailures(TorchDispatchMode):
    """Looks for operations that a run in float64 computes in a narrower format all the same, as
    tensors of the script's own are in, and that are finite in float64.

    ``are_any``: whether there was one. Reads every result in a narrower format.
    """

    def __init__(self) -> None:
        super().__init__()
        self.are_any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.are_any or torch.Tag.nondeterministic_seeded in func.tags:
            return func(*args, **kwargs)
        given = args, kwargs
        if func._schema.is_mutable:
            given = tree_map(_kept, given)
        result = func(*args, **kwargs)
        for place, made in enumerate(outputs_of(func, args, kwargs, result)):
            if is_narrow(made) and bool(bad_mask(made).any()):
                with suppress(Exception):  # an operation that has no float64
                    wide_args, options = tree_map(_kept, given)
                    one = outputs_of(func, wide_args, options, func(*wide_args, **options))[place]
                    self.are_any |= bool((bad_mask(made) & ~bad_mask(one)).any())
        return result


class Lifted(TorchDispatchMode):
    """Has a run in a wide format stay there where the script casts to one of the ``narrow`` ones,
    or makes tensors of its own in it. Numbers are drawn as without it.
    """

    def __init__(self, dtype: torch.dtype, narrow: Collection[torch.dtype]) -> None:
        super().__init__()
        self._dtype, self._narrow = dtype, frozenset(narrow)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags
        if is_drawn or func._schema.is_mutable:
            return func(*args, **kwargs)
        if kwargs.get("dtype") in self._narrow:
            kwargs["dtype"] = self._dtype
        read = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if not read:
            return tree_map_only(Tensor, self._lifted, func(*args, **kwargs))
        if any(one.dtype is self._dtype for one in read):
            args, kwargs = tree_map_only(Tensor, self._lifted, (args, kwargs))
        try:
            return func(*args, **kwargs)
        except RuntimeError:  # an operation that has no float64
            if self._dtype is not torch.float64:
                raise
            given, options = tree_map_only(Tensor, _in_float32, (args, kwargs))
            return tree_map_only(Tensor, self._lifted, func(*given, **options))

    def _lifted(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if tensor.dtype in self._narrow else tensor


def _in_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype is torch.float64 else tensor


def is_narrow(tensor: Tensor) -> bool:
    """Return whether a tensor holds floating-point numbers of fewer bits than float64."""
    return is_measurable(tensor) and is_plain(tensor) and wide(tensor.dtype) != tensor.dtype


def _kept(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _widened(value)
    return wide(value) if isinstance(value, torch.dtype) else value


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the format of 64 bits for each part of a number, an integer's own."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def _widened(tensor: Tensor) -> Tensor:
    """Return a copy, so that what the operation writes does not reach the run."""
    return tensor.detach().to(wide(tensor.dtype), copy=True)
