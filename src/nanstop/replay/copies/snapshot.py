"""Copies to go back to of the trainable state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from nanstop.frozen import frozen
from nanstop.numerics.tensors import nonfinite
from nanstop.numerics.trained import held_by
from nanstop.replay.copies.kept import Keeping, Kept, KeptOptimizer
from nanstop.replay.untouched import versions_kept


@frozen
class Trainable:
    """What an update changes. ``parameters``: by name, those that require gradients. ``others``:
    other optimizers that train weights of the model beside ``optimizer``.
    """

    parameters: Mapping[str, Tensor]
    optimizer: Optimizer | None = None
    scaler: Any = None
    others: tuple[Optimizer, ...] = ()

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """All that make the update."""
        return (self.optimizer, *self.others) if self.optimizer is not None else self.others

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
        """Return the optimizers' tensors as ``PARAMETER:KEY``."""
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        states = chain.from_iterable(one.state.items() for one in self.optimizers)
        return {
            f"{names.get(id(parameter), f'#{index}')}:{key}": value
            for index, (parameter, entries) in enumerate(states)
            for key, value in entries.items()
            if isinstance(value, Tensor)
        }


class Snapshot:
    """Parameters, optimizers' state and scaler as they are now;
    copies on ``device`` (None: where each tensor is).

    Tensors in a list of a state are not copied. Copying from CUDA to host memory synchronises the
    device. ``spent``: an earlier one whose memory is used again, which is not to be used any more.
    """

    def __init__(
        self, trainable: Trainable, *, device: str | None = "cpu", spent: Snapshot | None = None
    ) -> None:
        keep = Keeping(device, spent.copies() if spent is not None else {}).keep
        self.trainable = trainable
        self.parameters = {name: keep(p) for name, p in trainable.parameters.items()}
        self._optimizers = [KeptOptimizer(one, keep) for one in trainable.optimizers]
        self._scaler = trainable.scaler.state_dict() if trainable.scaler is not None else None
        self._stages = scaler_stages(trainable.scaler)

    def copies(self) -> dict[int, Kept]:
        """Return what is held, by the id of the tensor that it is a copy of."""
        states = chain.from_iterable(one.copies() for one in self._optimizers)
        held = (kept for kept in (*self.parameters.values(), *states) if isinstance(kept, Kept))
        return {id(kept.tensor): kept for kept in held}

    def nonfinite(self) -> tuple[str, ...]:
        """Return names of copied parameters that hold NaN or Inf."""
        return nonfinite({name: kept.copy for name, kept in self.parameters.items()})

    def is_whole(self) -> bool:
        """Return whether the optimizers train the same parameters as then, none unfrozen, frozen,
        added or removed, and have written to nothing that is not copied.
        """
        for kept in self._optimizers:
            lists = all(one.is_whole() for one in kept.lists) if kept.lists else True
            if not (lists and kept.trained.is_by(kept.optimizer)):
                return False
        return True

    def restore(self) -> None:
        """Put everything back bitwise, into the same tensors, at the versions that they have;
        state made since then goes.

        Groups that an optimizer was given since then stay as they are.
        """
        for kept in self.parameters.values():
            kept.put_back()
        for optimizer in self._optimizers:
            optimizer.restore()
        if self._scaler is not None:
            _load_scaler(self.trainable.scaler, self._scaler)
            set_scaler_stages(self.trainable.scaler, self._stages)

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
        """Take out the groups that an optimizer was given since then, and what was unfrozen or
        frozen since.
        """
        moved: list[Tensor] = []
        added: list[tuple[list[Any], list[Any]]] = []
        for kept in self._optimizers:
            groups, trained = kept.optimizer.param_groups, kept.trained.ids()
            held = held_by(kept.optimizer)
            met = set(map(id, moved))
            moved += [
                p
                for p in held
                if p.is_leaf and p.requires_grad != (id(p) in trained) and id(p) not in met
            ]
            added.append((groups, groups[len(kept.groups) :]))
            del groups[len(kept.groups) :]
        _flip(moved)
        try:
            yield
        finally:
            for groups, later in added:
                groups.extend(later)
            _flip(moved)


def ready_scaler(scaler: Any) -> None:
    """Forget that gradients were unscaled in this window, so that they can be made and unscaled
    again.
    """
    if scaler is not None:
        scaler._per_optimizer_states.clear()


def _flip(parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        parameter.requires_grad_(not parameter.requires_grad)


def scaler_stages(scaler: Any) -> dict[int, dict[str, Any]]:
    """Return what a scaler has done in this window, of each optimizer."""
    if scaler is None:
        return {}
    return {key: dict(value) for key, value in scaler._per_optimizer_states.items()}


def set_scaler_stages(scaler: Any, stages: dict[int, dict[str, Any]]) -> None:
    """Have a scaler be at such stages."""
    scaler._per_optimizer_states.clear()
    scaler._per_optimizer_states.update({key: dict(value) for key, value in stages.items()})


def _load_scaler(scaler: Any, state: dict[str, Any]) -> None:
    # state_dict() of a disabled scaler is empty, and loading it is an error.
    if state:
        scaler.load_state_dict(state)
