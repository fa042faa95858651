"""Copies to go back to of the trainable state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanstop.frozen import frozen
from nanstop.numerics.parked import copied_to_host
from nanstop.numerics.tensors import by_torch_alone, nonfinite
from nanstop.numerics.trained import Trained, held_by
from nanstop.replay.untouched import versions_kept


@frozen
class Trainable:
    """What an update changes. ``parameters``: by name, those that require gradients."""

    parameters: Mapping[str, Tensor]
    optimizer: Optimizer | None = None
    scaler: Any = None

    def num_bytes(self) -> int:
        """Return the bytes a snapshot would take now (optimizer state as far as it exists yet)."""
        tensors = [*self.parameters.values(), *self.state_tensors().values()]
        return sum(t.numel() * t.element_size() for t in tensors)

    def tensors(self) -> list[Tensor]:
        """Return all that it holds."""
        scaler = vars(self.scaler).values() if self.scaler is not None else ()
        of_scaler = [value for value in scaler if isinstance(value, Tensor)]
        return [*self.parameters.values(), *self.state_tensors().values(), *of_scaler]

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the optimizer's tensors as ``PARAMETER:KEY``."""
        if self.optimizer is None:
            return {}
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        return {
            f"{names.get(id(parameter), f'#{index}')}:{key}": value
            for index, (parameter, entries) in enumerate(self.optimizer.state.items())
            for key, value in entries.items()
            if isinstance(value, Tensor)
        }


@frozen
class _Kept:
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
class _KeptList:
    """A list of an optimizer's state and what was in it, by reference.

    LBFGS keeps a hundred directions and as many changes of gradients in such, and writes to none.
    """

    place: list[Any]
    items: tuple[Any, ...]
    versions: tuple[int, ...]

    @classmethod
    def of(cls, place: list[Any]) -> _KeptList:
        return cls(place, tuple(place), _versions(place))

    def is_whole(self) -> bool:
        """Return whether nothing that was in it has been written to since."""
        return _versions(self.items) == self.versions

    def put_back(self) -> list[Any]:
        """Have the list hold again what it held, and return it."""
        self.place[:] = self.items
        return self.place


_HELD = (_Kept, _KeptList)


def _versions(items: Sequence[Any]) -> tuple[int, ...]:
    return tuple(item._version for item in items if isinstance(item, Tensor))


class Snapshot:
    """Parameters, optimizer state and scaler as they are now;
    copies on ``device`` (None: where each tensor is).

    Tensors in a list of the state are not copied. Copying from CUDA to host memory synchronises the
    device. ``spent``: an earlier one whose memory is used again, which is not to be used any more.
    """

    def __init__(
        self, trainable: Trainable, *, device: str | None = "cpu", spent: Snapshot | None = None
    ) -> None:
        spare = spent.copies() if spent is not None else {}

        def keep(value: Any) -> Any:
            if isinstance(value, list):
                return _KeptList.of(cast("list[Any]", value))
            if not isinstance(value, Tensor):
                return value
            old = spare.get(id(value))
            with by_torch_alone():  # no call of the script: no remedy of a line has a part in it
                if old is not None and old.tensor is value and old.fits():
                    old.copy.copy_(value.detach())
                    return old
                copy = copied_to_host(value) if device else value.detach().clone()
            return _Kept(value, copy)

        self.trainable = trainable
        self.parameters = {name: keep(p) for name, p in trainable.parameters.items()}
        optimizer = trainable.optimizer
        self._state = (
            {p: (e, {k: keep(v) for k, v in e.items()}) for p, e in optimizer.state.items()}
            if optimizer is not None
            else {}
        )
        self._lists = [
            kept
            for _, entries in self._state.values()
            for kept in entries.values()
            if isinstance(kept, _KeptList)
        ]
        self._groups = (
            [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            if optimizer is not None
            else []
        )
        self._numbers = _numbers_of(optimizer)
        self._trained = Trained.by(optimizer)
        self._scaler = trainable.scaler.state_dict() if trainable.scaler is not None else None
        self._stages = _scaler_stages(trainable.scaler)

    def copies(self) -> dict[int, _Kept]:
        """Return what is held, by the id of the tensor that it is a copy of."""
        states = (kept for _, entries in self._state.values() for kept in entries.values())
        held = (kept for kept in (*self.parameters.values(), *states) if isinstance(kept, _Kept))
        return {id(kept.tensor): kept for kept in held}

    def nonfinite(self) -> tuple[str, ...]:
        """Return names of copied parameters that hold NaN or Inf."""
        return nonfinite({name: kept.copy for name, kept in self.parameters.items()})

    def is_whole(self) -> bool:
        """Return whether the optimizer trains the same parameters as then, none unfrozen, frozen,
        added or removed, and has written to nothing that is not copied.
        """
        lists = all(kept.is_whole() for kept in self._lists) if self._lists else True
        return lists and self._trained.is_by(self.trainable.optimizer)

    def restore(self) -> None:
        """Put everything back bitwise, into the same tensors, at the versions that they have;
        state made since then goes.

        Groups that the optimizer was given since then stay as they are.
        """
        for kept in self.parameters.values():
            kept.put_back()
        optimizer = self.trainable.optimizer
        if optimizer is not None:
            optimizer.state.clear()
            for parameter, (state, entries) in self._state.items():
                state.clear()
                state.update(
                    {k: v.put_back() if isinstance(v, _HELD) else v for k, v in entries.items()}
                )
                optimizer.state[parameter] = state
            for group, values in zip(optimizer.param_groups, self._groups, strict=False):
                _put_back(group, values, group.keys() - {"params"})
            _put_back(vars(optimizer), self._numbers, _numbers_of(optimizer).keys())
        if self._scaler is not None:
            _load_scaler(self.trainable.scaler, self._scaler)
            _set_scaler_stages(self.trainable.scaler, self._stages)

    @contextmanager
    def loaded(self, place: Callable[[Trainable], str | None] = lambda _: "cpu") -> Iterator[None]:
        """Be at the snapshot inside the context and back at the present state, bitwise, after it.
        ``place``: where that waits.
        """
        with self._trained_as_then(), versions_kept(self.trainable.tensors()):
            present = Snapshot(self.trainable, device=place(self.trainable))
            self.restore()
            try:
                yield
            finally:
                present.restore()

    @contextmanager
    def _trained_as_then(self) -> Iterator[None]:
        """Take out the groups that the optimizer was given since then, and what was unfrozen or
        frozen since.
        """
        groups = self.trainable.optimizer.param_groups if self.trainable.optimizer else []
        trained = self._trained.ids()
        held = held_by(self.trainable.optimizer)
        moved = [p for p in held if p.is_leaf and p.requires_grad != (id(p) in trained)]
        added = groups[len(self._groups) :]
        del groups[len(self._groups) :]
        _flip(moved)
        try:
            yield
        finally:
            groups += added
            _flip(moved)


def _put_back(held: dict[str, Any], values: Mapping[str, Any], present: Set[str]) -> None:
    """Have ``held`` hold ``values`` under their names, and nothing under others of ``present``."""
    for later in present - values.keys():
        del held[later]
    held.update(values)


def _numbers_of(optimizer: Optimizer | None) -> dict[str, Any]:
    """Return what an optimizer counts in attributes of its own, or is yet to count: an engine in
    its place counts more than its updates.
    """
    held = vars(optimizer) if isinstance(optimizer, Optimizer) else {}
    return {name: value for name, value in held.items() if isinstance(value, int | float | None)}


def ready_scaler(scaler: Any) -> None:
    """Forget that gradients were unscaled in this window, so that they can be made and unscaled
    again.
    """
    if scaler is not None:
        scaler._per_optimizer_states.clear()


def _flip(parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        parameter.requires_grad_(not parameter.requires_grad)


def _scaler_stages(scaler: Any) -> dict[int, dict[str, Any]]:
    if scaler is None:
        return {}
    return {key: dict(value) for key, value in scaler._per_optimizer_states.items()}


def _set_scaler_stages(scaler: Any, stages: dict[int, dict[str, Any]]) -> None:
    scaler._per_optimizer_states.clear()
    scaler._per_optimizer_states.update({key: dict(value) for key, value in stages.items()})


def _load_scaler(scaler: Any, state: dict[str, Any]) -> None:
    # state_dict() of a disabled scaler is empty, and loading it is an error.
    if state:
        scaler.load_state_dict(state)
