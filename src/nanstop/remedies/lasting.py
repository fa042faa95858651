"""Remedies for the rest of a run:
in force while a step computes, and out of the script's sight between steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from nanstop.numerics.optimizer_state import innermost
from nanstop.numerics.tensors import HALF
from nanstop.numerics.trained import held_by
from nanstop.records import Atom
from nanstop.remedies.apply import applied
from nanstop.remedies.forward import MeetsWide, callable_modules, forward_replaced, wrapper_of
from nanstop.remedies.storage import state_swapped
from nanstop.replay.held import Held, holders, holders_in
from nanstop.replay.step import ModelView


@contextmanager
def lasting(view: ModelView, atoms: Sequence[Atom]) -> Iterator[None]:
    """Have ``atoms`` in force as ``applied`` does, where the script saves, copies and averages
    between steps, evaluates and generates.

    What is held in another format is put at rest when an update of it is over, and wakes with the
    next forward: the two read and write each such parameter once. They were proven on a step, and a
    model has other ways through it: what an island emits may meet half weights there.
    """
    with ExitStack() as undo:
        for module in _meeting(view, atoms):
            undo.enter_context(forward_replaced(module, MeetsWide()))
        undo.enter_context(applied(view, atoms))
        if holders_in(view.root):
            between = _BetweenSteps(view, undo)
            undo.callback(register_optimizer_step_pre_hook(between.before_update).remove)
            undo.callback(register_optimizer_step_post_hook(between.after_update).remove)
        yield
        grown = _grown_elsewhere(view, atoms)
    for entries, own in grown:
        entries.update(own)


def _grown_elsewhere(
    view: ModelView, atoms: Sequence[Atom]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the entries of an optimizer's state with what a remedy that updates in its place has
    made of them: the script saves that optimizer, and may go on with it.
    """
    if not any(atom.remedy == "optimizer_swap" for atom in atoms):
        return []
    optimizer = innermost(view.optimizer)
    held = optimizer.__getstate__()["state"]
    own = [parameter for parameter in held_by(optimizer) if held.get(parameter)]
    return [(optimizer.state[parameter], held[parameter]) for parameter in own]


def _meeting(view: ModelView, atoms: Sequence[Atom]) -> Iterator[nn.Module]:
    """Yield the modules with half weights of their own that float32 of an island may come to."""
    remedies = {atom.remedy for atom in atoms}
    is_wide = any(atom.remedy == "island" and atom.value == "float32" for atom in atoms)
    if not is_wide or "outer_autocast" in remedies:
        return
    for module in callable_modules(view.root):
        weights = (p for p in module.parameters() if p.dtype in HALF and p.dim() > 1)
        if next(module.children(), None) is None and any(True for _ in weights):
            yield module


class _BetweenSteps:
    """Acts on the parameters of whatever optimizer takes a step."""

    def __init__(self, view: ModelView, undo: ExitStack) -> None:
        self._view = view
        self._known = set() if view.optimizer is None else {id(innermost(view.optimizer))}
        self._undo = undo
        self._updated: set[int] = set()

    def before_update(self, optimizer: Optimizer, *_: Any) -> None:
        """Have parameters awake, and the state of an optimizer that came later in their format."""
        held_now = _held_by(optimizer)
        self._updated |= {id(held) for held in held_now}
        for held in held_now:
            held.wake()
            held.align()
        if held_now and id(optimizer) not in self._known:
            self._known.add(id(optimizer))
            parameters = [held.tensor for held in held_now]
            self._undo.enter_context(state_swapped(optimizer, parameters, held_now[0].dtype))

    def after_update(self, optimizer: Optimizer, *_: Any) -> None:
        """Put at rest what this update was the end of.

        What other optimizers update, or has no gradient yet, may still have a backward before it;
        so may what is frozen, as long as anything trainable is awake.
        """
        mine = _held_by(optimizer)
        if not mine or _is_needed_as_it_is(self._view.root):
            return
        for swap in dict.fromkeys(held.swap for held in mine if not held.swap.pins):
            for held in swap.members:
                if held in mine or (held.tensor.grad is not None and id(held) not in self._updated):
                    held.rest()
            if all(held.resting for held in swap.members if held.tensor.requires_grad):
                for held in swap.members:
                    held.rest()


def _held_by(optimizer: Optimizer) -> list[Held]:
    return holders(held_by(optimizer))


def _is_needed_as_it_is(root: nn.Module) -> bool:
    """Return whether code that was made for the present format goes on with it.

    Compiled code, and what sums gradients of several processes, were made for one format and do not
    ask again.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return True
    return any(_is_compiled(vars(module).get("forward")) for module in root.modules())


def _is_compiled(forward: Any) -> bool:
    wrapper = wrapper_of(forward)
    return wrapper is not None and (wrapper.is_compiled or _is_compiled(wrapper.inner))
