"""An update rehearsed on a sample of the weights, in the run's own formats and in float32, before
it is applied.

Both rehearsals are the optimizer's own step on copies that go on from each other, each with a state
of its own. A state that is rounded to nothing between two updates shows as well as arithmetic that
fails in one of them: in float32 the same gradients move the same weights by their proper length.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanstop.frozen import frozen
from nanstop.measure.own_memory import leaving_no_trace
from nanstop.measure.updates import second_moments, trained_by
from nanstop.numerics.tensors import HALF, odd_stride
from nanstop.numerics.update_length import is_ruinous
from nanstop.records import Signal, StateRow, StepId
from nanstop.replay.conditions import unheard
from nanstop.replay.rng import note_rng, rng_kept

MOST_TENSORS, MOST_ELEMENTS = 16, 1024

_KERNELS = {"foreach": False, "fused": False}
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, type(None))
_PENDING = ("grad_scale", "found_inf")
"""What ``GradScaler`` hands to a step that unscales by itself."""


class CannotRehearseError(Exception):
    """The optimizer cannot be run on copies without touching the run's own:
    it holds, or draws, more than numbers.
    """


@frozen
class Moved:
    """How far the rehearsed updates have moved the sample of a parameter, in its own format and
    in float32.
    """

    parameter: str
    length: float
    in_float32: float

    @property
    def is_ruinous(self) -> bool:
        """Return whether the length is out of all proportion, or not even a number."""
        return is_ruinous(self.length, self.in_float32)

    def as_signal(self, at: StepId) -> Signal:
        """Return it as what the update of a step is expected to do."""
        return Signal(source="param", name=self.parameter, value=self.length, at=at)


class Rehearsal:
    """Two small copies of an optimizer's work, made when an update is near that it has gradients
    for.

    Errors: ``CannotRehearseError``, from here and from ``rehearse``. What the optimizer's own step
    raises on copies passes.
    """

    def __init__(self, optimizer: Optimizer, root: torch.nn.Module) -> None:
        while "optimizer" in vars(optimizer):  # accelerate's wrapper
            optimizer = vars(optimizer)["optimizer"]
        trained = trained_by(optimizer, root)
        half = {name: p for name, p in trained.items() if p.dtype in HALF}
        # Vectors last: matrices are what a model is made of, and their gradients are the smaller
        # ones.
        names = sorted(half, key=lambda name: half[name].dim() < 2)
        each = max(1, sum(half[name].dim() > 1 for name in names) // MOST_TENSORS)
        self._optimizer = optimizer
        self._chosen = {name: half[name] for name in names[::each][:MOST_TENSORS]}
        self._own = _Copy(optimizer, self._chosen.values(), wide=False)
        self._wide = _Copy(optimizer, self._chosen.values(), wide=True)

    def rehearse(self) -> tuple[Moved, ...]:
        """Return how far the gradients that are there now will have moved each parameter since the
        first rehearsal.

        Empty where an optimizer that unscales by itself is to leave the update out.
        Synchronises the device once.
        """
        pending = vars(self._optimizer)
        found, scale = (pending.get(name) for name in reversed(_PENDING))
        if found is not None and bool(found):
            return ()
        own = chain(self._own.tensors(), self._wide.tensors())
        with rng_kept() as before, unheard(), leaving_no_trace(type(self._optimizer), own=own):
            self._own.step(self._chosen.values(), scale=None)
            if not _same_draws(before):
                raise CannotRehearseError("its step draws random numbers")
            self._wide.step(self._chosen.values(), scale=scale)
        lengths = torch.stack([*self._own.lengths(), *self._wide.lengths()]).tolist()
        names, half = list(self._chosen), len(self._chosen)
        return tuple(map(Moved, names, lengths[:half], lengths[half:]))

    def lost_moments(self) -> tuple[StateRow, ...]:
        """Return of each parameter how many second moments of the sample are 0 by now that are not
        in float32. Synchronises the device.
        """
        found: list[StateRow] = []
        for name, own, wide in zip(
            self._chosen, self._own.moments(), self._wide.moments(), strict=True
        ):
            for (form, kept), (_, true) in zip(own, wide, strict=False):
                lost, total = int((true & ~kept).sum()), int(true.sum())
                row = StateRow(parameter=name, dtype=form, num_vanished=lost, num_total=total)
                found += [row] if lost else []
        return tuple(found)

    def take_back(self) -> None:
        """Forget the last rehearsal: its update was not applied."""
        self._own.take_back()
        self._wide.take_back()


class _Copy:
    """An optimizer of the same class over a sample of some of its parameters."""

    def __init__(self, optimizer: Optimizer, chosen: Any, *, wide: bool) -> None:
        self._of = optimizer
        self._wide = wide
        self.weights = [self._taken(p, p).requires_grad_() for p in chosen]
        self._start = [w.detach().clone() for w in self.weights]
        twins = dict(zip((id(p) for p in chosen), self.weights, strict=True))
        self._groups = [
            (place, mine)
            for place, group in enumerate(optimizer.param_groups)
            if (mine := [twins[id(p)] for p in group["params"] if id(p) in twins])
        ]
        state = {twins[id(p)]: self._state(p) for p in chosen if optimizer.state.get(p)}
        self._optimizer = self._made(state)
        self._before: tuple[list[Tensor], Any] | None = None

    def step(self, chosen: Any, *, scale: Tensor | None) -> None:
        """Update the sample with the gradients that the parameters have now, divided by
        ``scale``.
        """
        kept = {w: {k: _noted(v) for k, v in e.items()} for w, e in self._optimizer.state.items()}
        self._before = [w.detach().clone() for w in self.weights], kept
        for weight, parameter in zip(self.weights, chosen, strict=True):
            gradient = parameter.grad
            taken = None if gradient is None else self._taken(gradient, parameter)
            weight.grad = taken if scale is None or taken is None else taken / scale
        for (place, _), group in zip(self._groups, self._optimizer.param_groups, strict=True):
            group.update(self._options(place))
        self._set_attributes()
        step: Any = type(self._optimizer).step
        # Below torch's wrapper: hooks, also those of every optimizer, are told of the run's own
        # steps only.
        own: Callable[[Any], Any] = step.__wrapped__ if hasattr(step, "hooked") else step
        own(self._optimizer)

    def tensors(self) -> Iterator[Tensor]:
        """Yield what a step of the copy writes to."""
        states = (held for state in self._optimizer.state.values() for held in state.values())
        return chain(self.weights, (one for one in states if isinstance(one, Tensor)))

    def lengths(self) -> Sequence[Tensor]:
        """Return how far each sample is from where it began, scalars on one device."""
        pairs = zip(self.weights, self._start, strict=True)
        moved = [(w.detach().float() - start.float()).norm() for w, start in pairs]
        return [length.to(moved[0].device) for length in moved]

    def moments(self) -> list[list[tuple[str, Tensor]]]:
        """Return of each sample its second moments: their formats, and where they are not zero."""
        states = self._optimizer.state
        return [list(second_moments(states.get(w, {}), w, each=1)) for w in self.weights]

    @torch.no_grad()
    def take_back(self) -> None:
        if self._before is None:
            return
        values, state = self._before
        for weight, value in zip(self.weights, values, strict=True):
            weight.copy_(value)
        self._optimizer.state.clear()
        self._optimizer.state.update(state)
        self._before = None

    def _taken(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        """Return a copy of evenly spread rows (and of long rows, elements) of what has a
        parameter's shape.
        """
        picked = tensor.detach()
        if parameter.dim():
            row = parameter[0].numel()
            picked = picked[:: odd_stride(parameter.shape[0], max(1, MOST_ELEMENTS // row))]
            if parameter.dim() > 1 and row > MOST_ELEMENTS:
                picked = picked[..., :: odd_stride(row, MOST_ELEMENTS)]
        wide = self._wide and tensor.dtype in HALF
        return picked.to(torch.float32 if wide else tensor.dtype, copy=True).contiguous()

    def _state(self, parameter: Tensor) -> dict[str, Any]:
        return {k: self._part(v, parameter) for k, v in self._of.state[parameter].items()}

    def _part(self, value: Any, parameter: Tensor) -> Any:
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            return self._taken(value, parameter)
        return _copied(value)

    def _options(self, place: int) -> dict[str, Any]:
        group = self._of.param_groups[place]
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        slow = {k: v for k, v in _KERNELS.items() if self._wide and k in options}
        return {k: _copied(v) for k, v in (options | slow).items()}

    def _made(self, state: Mapping[Tensor, dict[str, Any]]) -> Optimizer:
        """Return the copy as unpickling would make it:
        no constructor runs, so that nothing is entered anywhere.
        """
        kind = type(self._of)
        made = kind.__new__(kind)
        groups = [{**self._options(place), "params": mine} for place, mine in self._groups]
        made.__setstate__(
            {
                "defaults": dict(self._of.defaults),
                "state": defaultdict(dict),
                "param_groups": groups,
            }
        )
        made.state.update(state)
        self._optimizer = made
        self._inherited = frozenset(vars(made)) | {"step"}  # which schedulers wrap
        self._set_attributes()
        return made

    def _set_attributes(self) -> None:
        for name, value in vars(self._of).items():
            if name in _PENDING:
                if not self._wide:
                    vars(self._optimizer)[name] = value
            elif name not in self._inherited:
                vars(self._optimizer)[name] = _copied(value)


def _copied(value: Any) -> Any:
    """Return a copy of a number, of what is made of numbers, or of a scalar tensor."""
    if isinstance(value, Tensor) and value.numel() <= 1:
        return value.detach().clone()
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(_copied(one) for one in value)
    if isinstance(value, _PLAIN):
        return value
    raise CannotRehearseError(f"it holds a {type(value).__name__}")


def _noted(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else _copied(value)


def _same_draws(before: Any) -> bool:
    now = note_rng()
    same = torch.equal(before.torch, now.torch) and before.python == now.python
    return same and all(map(torch.equal, before.devices, now.devices))
