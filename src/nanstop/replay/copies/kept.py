"""What a snapshot holds: copies of tensors, and what an optimizer keeps beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanstop.frozen import frozen
from nanstop.numerics.parked import copied_to_host
from nanstop.numerics.tensors import by_torch_alone
from nanstop.numerics.trained import Trained


@frozen
class Kept:
    """A tensor and a copy of what it held."""

    tensor: Tensor
    copy: Tensor

    def fits(self) -> bool:
        """Return whether the tensor still has the form of the copy."""
        own, copy = self.tensor, self.copy
        return own.shape == copy.shape and own.dtype == copy.dtype and own.layout == copy.layout

    def put_back(self) -> Tensor:
        """Copy the values back in place, and return the tensor. No synchronisation."""
        with torch.no_grad():
            self.tensor.data.copy_(self.copy)
        return self.tensor


@frozen
class KeptList:
    """A list of an optimizer's state and what was in it, by reference.

    LBFGS keeps a hundred directions and as many changes of gradients in such, and writes to none.
    """

    place: list[Any]
    items: tuple[Any, ...]
    versions: tuple[int, ...]

    @classmethod
    def of(cls, place: list[Any]) -> KeptList:
        return cls(place, tuple(place), _versions(place))

    def is_whole(self) -> bool:
        """Return whether nothing that was in it has been written to since."""
        return _versions(self.items) == self.versions

    def put_back(self) -> list[Any]:
        """Have the list hold again what it held, and return it."""
        self.place[:] = self.items
        return self.place


def _versions(items: Sequence[Any]) -> tuple[int, ...]:
    return tuple(item._version for item in items if isinstance(item, Tensor))


class Keeping:
    """Keeps values: copies of tensors on ``device`` (None: where each is), in memory of ``spare``
    copies of the same tensors, by id, where they fit.
    """

    def __init__(self, device: str | None, spare: Mapping[int, Kept]) -> None:
        self._device = device
        self._spare = spare

    def keep(self, value: Any) -> Any:
        """Return a copy of a tensor, what a list holds, or any other value as it is."""
        if isinstance(value, list):
            return KeptList.of(cast("list[Any]", value))
        if not isinstance(value, Tensor):
            return value
        old = self._spare.get(id(value))
        with by_torch_alone():  # no call of the script: no remedy of a line has a part in it
            if old is not None and old.tensor is value and old.fits():
                old.copy.copy_(value.detach())
                return old
            copy = copied_to_host(value) if self._device else value.detach().clone()
        return Kept(value, copy)


class KeptOptimizer:
    """An optimizer, and its state, groups and counters as they were.

    Tensors in a list of the state are not copied.
    """

    def __init__(self, optimizer: Optimizer, keep: Callable[[Any], Any]) -> None:
        self.optimizer = optimizer
        self.state = {
            p: (e, {k: keep(v) for k, v in e.items()}) for p, e in optimizer.state.items()
        }
        self.lists = [kept for kept in self._held() if isinstance(kept, KeptList)]
        self.groups = [
            {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
        ]
        self.trained = Trained.by(optimizer)
        self._numbers = _numbers_of(optimizer)

    def copies(self) -> list[Kept]:
        """Return the copies of tensors."""
        return [kept for kept in self._held() if isinstance(kept, Kept)]

    def restore(self) -> None:
        """Put everything back; state made since then goes, and groups given since then stay."""
        optimizer = self.optimizer
        optimizer.state.clear()
        for parameter, (state, entries) in self.state.items():
            state.clear()
            state.update(
                {
                    k: v.put_back() if isinstance(v, Kept | KeptList) else v
                    for k, v in entries.items()
                }
            )
            optimizer.state[parameter] = state
        for group, values in zip(optimizer.param_groups, self.groups, strict=False):
            _put_back(group, values, group.keys() - {"params"})
        _put_back(vars(optimizer), self._numbers, _numbers_of(optimizer).keys())

    def _held(self) -> list[Any]:
        return [kept for _, entries in self.state.values() for kept in entries.values()]


def _put_back(held: dict[str, Any], values: Mapping[str, Any], present: Set[str]) -> None:
    """Have ``held`` hold ``values`` under their names, and nothing under others of ``present``."""
    for later in present - values.keys():
        del held[later]
    held.update(values)


def _numbers_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return what an optimizer counts in attributes of its own, or is yet to count: an engine in
    its place counts more than its updates.
    """
    held = vars(optimizer) if isinstance(optimizer, Optimizer) else {}
    return {name: value for name, value in held.items() if isinstance(value, int | float | None)}
