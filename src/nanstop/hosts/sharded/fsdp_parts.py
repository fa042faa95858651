"""What ``fully_shard`` has made of a model: its groups of parameters, here in part or as a whole.

There is no public way to have a forward and backward without an exchange but that of gradient
accumulation: parameters are gathered, stay so, and gradients are not reduced. All that is set for
it is put back.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nanstop.replay.undo import attributes_kept


def state_of(module: nn.Module) -> Any:
    """Return the state of a module that ``fully_shard`` was called on, None of any other."""
    library = sys.modules.get("torch.distributed.fsdp")  # imported by whoever calls that
    kind = getattr(library, "FSDPModule", None)
    laid_out: Any = module if kind is not None and isinstance(module, kind) else None
    return laid_out._get_fsdp_state() if laid_out is not None else None


def states_in(root: nn.Module) -> list[Any]:
    """Return the states of a module and its parts, each once, in the order of the parts."""
    own = state_of(root)
    # The root of what is called together knows all from its first forward on.
    met = getattr(own._state_ctx, "all_states", None) if getattr(own, "_is_root", False) else None
    return met or list(dict.fromkeys(s for m in root.modules() if (s := state_of(m))))


def groups_of(state: Any) -> list[Any]:
    """Return a state's groups of parameters, which are gathered and reduced together."""
    several = getattr(state, "_fsdp_param_groups", None)  # later versions have any number
    if several is not None:
        return list(several)
    one = getattr(state, "_fsdp_param_group", None)
    return [one] if one is not None else []


class FsdpParts:
    """The parts of a model whose root is ``root``."""

    def __init__(self, root: nn.Module) -> None:
        self.states = [*states_in(root)]
        self.groups = [group for state in self.states for group in groups_of(state)]
        self.parameters = [one for group in self.groups for one in group.fsdp_params]

    def num_bytes(self) -> int:
        """Return the memory that the whole of its weights takes, with as much for gradients."""
        sizes = [(one._orig_size.numel(), _format(one)) for one in self.parameters]
        return 2 * sum(num * kind.itemsize for num, kind in sizes)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Have all of the model here inside. Every rank enters it."""
        with ExitStack() as undo:
            for group in self.groups:
                places = ("reduce_grads", "reshard_after_backward", "post_forward_mesh_info")
                undo.enter_context(attributes_kept([(group, name) for name in places]))
                group.reduce_grads = group.reshard_after_backward = False
                group.post_forward_mesh_info = None
            for one in self.parameters:
                undo.enter_context(attributes_kept([(one, "reduce_dtype")]))
                one.reduce_dtype = None  # gradients stay where everybody looks for them
            for state in self.states:
                undo.enter_context(attributes_kept([(state, "_mp_policy")]))
                state._mp_policy = _PresentFormats(state)
            undo.callback(self._part)
            for group in self.groups:
                group.unshard()
                group.wait_for_unshard()
            yield

    def _part(self) -> None:
        for one in self.parameters:
            self.clear(one)
        for group in self.groups:
            group.reshard()

    @staticmethod
    def clear(one: Any) -> None:
        """Forget the gradient of a parameter that is here as a whole."""
        one.unsharded_accumulated_grad = None
        if getattr(one, "_unsharded_param", None) is not None:
            one._unsharded_param.grad = None

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Have the states inside and afterwards as between two steps, what is run inside may end
        anywhere; no gradient is exchanged. Call inside ``gathered``.
        """
        self._settle()
        try:
            yield
        finally:
            self._settle()

    def _settle(self) -> None:
        for group in self.groups:
            # Whoever defers an exchange, as ``no_sync`` does, asks for the next one afterwards.
            group.reduce_grads = False
        for state in self.states:
            state._training_state = type(state._training_state).IDLE
            state._state_ctx.iter_forward_root = None
            state._state_ctx.post_backward_final_callback_queued = False
            state._comm_ctx.all_gather_state = None
            state._comm_ctx.post_forward_order.clear()
            getattr(state, "_modules_to_run_forward", set()).clear()
        for group in self.groups:
            group._training_state = type(group._training_state).IDLE
            group._post_forward_indices.clear()

    def reduce(self) -> None:
        """Reduce the gradients that are here as a whole to this rank's parts of them. Every rank
        calls it, with gradients of the same parameters.
        """
        for group in reversed(self.groups):
            group.reduce_grads = True
            try:
                group.post_backward()
            finally:
                group.reduce_grads = False
                group._training_state = type(group._training_state).IDLE
        for group in self.groups:
            group.finalize_backward()
        for state in self.states:
            self._wait(state._comm_ctx)

    @staticmethod
    def _wait(context: Any) -> None:
        states = getattr(context, "reduce_scatter_states", None)
        several = states is not None
        last = getattr(context, "reduce_scatter_state", None)  # before torch 2.13 there was one
        for one in states if several else [last] if last is not None else ():
            if one.event is not None:
                context.device_handle.current_stream().wait_event(one.event)
        if several:
            states.clear()
        else:
            context.reduce_scatter_state = None


def whole_of(one: Any) -> Tensor:
    """Return a parameter that is here as a whole."""
    return one._unsharded_param


def _format(one: Any) -> torch.dtype:
    return one.param_dtype or one.orig_dtype


class _PresentFormats:
    """A policy of mixed precision that casts what a module is given to the format that its weights
    have now: a remedy may hold them in another.
    """

    def __init__(self, state: Any) -> None:
        self._own = state._mp_policy
        self._weights = [one for group in groups_of(state) for one in group.fsdp_params]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    @property
    def param_dtype(self) -> torch.dtype | None:
        if self._own.param_dtype is None:
            return None
        present = (whole_of(one).dtype for one in self._weights)
        return next((one for one in present if one.is_floating_point), self._own.param_dtype)

    @property
    def output_dtype(self) -> torch.dtype | None:
        own, present = self._own, self.param_dtype
        return own.output_dtype if present is own.param_dtype else None
