"""What is stored in which format, and the optimizer's state held in another.

Casting there and back is not an undo: so the storage that was there is kept and put back, and only
elements that changed meanwhile are rounded into it. Parameters and buffers: see ``held``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanstop.numerics.modules import quantized_layers
from nanstop.numerics.optimizer_state import innermost
from nanstop.numerics.tensors import HALF
from nanstop.numerics.trained import held_by
from nanstop.replay.held import holder, round_into
from nanstop.replay.step import ModelView
from nanstop.replay.undo import exchanged


def stored_in(view: ModelView, formats: Collection[torch.dtype]) -> tuple[Tensor, ...]:
    """Return parameters and buffers of these formats, each once;
    packed weights of quantized layers are left out.
    """
    packed = {id(view.root.get_submodule(name).weight) for name in quantized_layers(view.root)}
    unique = {id(tensor): tensor for tensor in chain(view.root.parameters(), view.root.buffers())}
    return tuple(
        tensor for key, tensor in unique.items() if tensor.dtype in formats and key not in packed
    )


@contextmanager
def state_swapped(
    optimizer: Optimizer, parameters: Iterable[Tensor], dtype: torch.dtype
) -> Iterator[None]:
    """Hold the half-precision optimizer state of ``parameters`` in ``dtype``; back in its format
    and storage on exit. State that is wider from the first stays as it is.

    Enter before the parameters themselves are swapped. State that is created meanwhile takes the
    format of its parameter on exit; step counts, which are scalars, stay as they are. What leaves
    the optimizer meanwhile (its ``state_dict``, a copy, a pickle) has the formats of the exit, and
    what is loaded is widened before the next step.
    """
    optimizer = innermost(optimizer)
    state = _WideState(optimizer, {p: plain_format(p) for p in parameters}, dtype)
    try:
        state.widen()
        with (
            optimizer.register_step_pre_hook(state.widen),
            state_saved_as(optimizer, state.plain),
        ):
            yield
    finally:
        state.restore()


@contextmanager
def state_saved_as(
    optimizer: Optimizer, plain: Callable[[Any, dict[str, Any]], dict[str, Any]]
) -> Iterator[None]:
    """Have what leaves an optimizer (its ``state_dict``, a copy, a pickle) hold
    ``plain(parameter, entries)``.
    """

    def saved(_: Optimizer, found: dict[str, Any]) -> None:
        packed = [place for group in found["param_groups"] for place in group["params"]]
        given = found["state"]
        pairs = zip(packed, held_by(optimizer), strict=True)
        made = {name: plain(p, given.get(name, {})) for name, p in pairs}
        found["state"] = given | {n: entries for n, entries in made.items() if entries}

    def copied() -> dict[str, Any]:
        found = dict(before())
        made = {p: plain(p, found["state"].get(p, {})) for p in held_by(optimizer)}
        filled = {p: entries for p, entries in made.items() if entries}
        return {**found, "state": defaultdict(dict, found["state"] | filled)}

    before = optimizer.__getstate__
    with (
        optimizer.register_state_dict_post_hook(saved),
        exchanged(vars(optimizer), {"__getstate__": copied}),
    ):
        yield


class _WideState:
    """The state of some parameters of an optimizer in another format.
    ``formats``: those of the parameters.
    """

    def __init__(
        self, optimizer: Optimizer, formats: Mapping[Tensor, torch.dtype], dtype: torch.dtype
    ) -> None:
        self.optimizer = optimizer
        self.formats = formats
        self.dtype = dtype
        self.noted = {
            (parameter, name): value
            for parameter in formats
            for name, value in optimizer.state.get(parameter, {}).items()
            if _is_half(value)
        }
        self.wide = {
            (parameter, name)
            for parameter in formats
            for name, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.dtype == dtype
        }
        """What an optimizer keeps in that format by itself: the scales of 8-bit moments, say."""

    def widen(self, *_: Any) -> None:
        """Have what is in half precision in ``dtype``; an optimizer's step pre-hook."""
        for parameter in self.formats:
            state = self.optimizer.state.get(parameter, {})
            for name, value in state.items():
                if _is_half(value) and value.dtype != self.dtype:
                    state[name] = value.to(self.dtype)

    def restore(self) -> None:
        """Put back the tensors that were there, with what they have become. Where memory is short
        for that, they are as they were, and it is raised once all are back.
        """
        with ExitStack() as undo:
            for parameter in self.formats:
                state = self.optimizer.state.get(parameter, {})
                for name, value in state.items():
                    noted = self.noted.get((parameter, name))
                    if noted is None:
                        undo.callback(self._narrowed, state, parameter, name, value)
                        continue
                    state[name] = noted
                    if value is not noted:
                        undo.callback(round_into, noted, value)

    def _narrowed(self, state: dict[str, Any], parameter: Tensor, name: str, value: Any) -> None:
        state[name] = self._narrow(parameter, name, value)

    def plain(self, parameter: Any, entries: dict[str, Any]) -> dict[str, Any]:
        """Return the entries of a parameter in the formats of the exit."""
        if parameter not in self.formats:
            return entries
        return {name: self._narrow(parameter, name, value) for name, value in entries.items()}

    def _narrow(self, parameter: Tensor, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype != self.dtype:
            return value
        if (parameter, name) in self.wide:
            return value
        noted = self.noted.get((parameter, name))
        if noted is not None:
            return value.to(noted.dtype)
        return value.to(self.formats[parameter]) if value.dim() else value


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in HALF


def plain_format(parameter: Tensor) -> torch.dtype:
    """Return the format that a parameter has for the script."""
    held = holder(parameter)
    return parameter.dtype if held is None else held.plain().dtype
