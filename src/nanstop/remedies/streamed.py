"""A float32 run in which one part of a model is float32 at a time, for a device that has no room
for a copy of all of it.

A part is a block of the model, or a module outside of the blocks that has parameters of its own. It
is held in float32 while it runs: in the forward, of which only what it was given is kept, and once
more in the backward, where its gradients are made and go out of the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nanstop.errors import NanstopError
from nanstop.numerics.modules import quantized_layers, repeated_blocks
from nanstop.numerics.parked import ParkedTensors
from nanstop.numerics.tensors import HALF
from nanstop.remedies.forward import Wrapper, forward_replaced, is_callable
from nanstop.remedies.given import Given, with_tensors, without_tensors
from nanstop.remedies.precision import computed_anew, computed_in
from nanstop.replay.conditions import unrecorded
from nanstop.replay.held import swapped
from nanstop.replay.path import passage
from nanstop.replay.rng import note_rng, restore_rng, rng_kept
from nanstop.replay.step import ModelView

_REFUSED = "the model cannot be run in float32 part by part"
_NARROW = frozenset(HALF)


@contextmanager
def streamed(view: ModelView, stream: Stream) -> Iterator[None]:
    """Run forwards and backwards inside in float32, one part at a time: what ``reference`` does for
    the whole model. The stream has the gradients; an update is not run so.
    """
    roots = (view.root, *view.beside)
    with ExitStack() as undo:
        undo.enter_context(computed_in(view, _NARROW, torch.float32))
        for root in roots:
            narrow, found = narrow_tensors(root), parts(root).values()
            inside = {id(tensor) for part in found for tensor in _tensors_of(part)}
            outside = [t for key, t in narrow.items() if key not in inside]
            undo.enter_context(swapped(outside, torch.float32))
            for part in found:
                own = [t for t in dict.fromkeys(_tensors_of(part)) if id(t) in narrow]
                undo.enter_context(forward_replaced(part, _PartForward(stream, own)))
        undo.enter_context(computed_anew(view))
        yield


class Stream:
    """The gradients of a streamed run, which are made part by part and wait elsewhere."""

    def __init__(self, root: nn.Module) -> None:
        self._names = {id(parameter): name for name, parameter in root.named_parameters()}
        self._gradients = ParkedTensors()

    def gathered(self, root: nn.Module) -> Mapping[str, Tensor]:
        """Return the gradients of a run that has ended, by name.

        Errors: ``NanstopError`` where a parameter was used outside of its part, in its own format.
        """
        for name, parameter in root.named_parameters():
            if parameter.grad is not None and parameter.dtype in HALF:
                raise NanstopError(f"{_REFUSED}: `{name}` is used outside of its module")
            self.take(parameter)
        return self._gradients

    def take(self, parameter: Tensor) -> None:
        """Have the gradient of a parameter out of the way."""
        name, gradient = self._names.get(id(parameter)), parameter.grad
        parameter.grad = None
        if name is not None and gradient is not None:
            self._gradients.take(name, gradient.detach())


def parts(root: nn.Module) -> dict[str, nn.Module]:
    """Return what of a model is held at a time, by name: its blocks, and outermost modules outside
    of them that have parameters or buffers of their own and hold no block.
    """
    blocks = repeated_blocks(root)
    found: dict[str, nn.Module] = {}
    for name, module in root.named_modules():
        if any(name.startswith(f"{one}." if one else "") for one in found):
            continue
        around = any(block.startswith(f"{name}." if name else "") for block in blocks)
        if name in blocks or (not around and is_callable(module) and _owns(module)):
            found[name] = module
    return found


def _owns(module: nn.Module) -> bool:
    own = chain(module._parameters.values(), module._buffers.values())
    return any(tensor is not None for tensor in own)


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())


def narrow_tensors(root: nn.Module) -> dict[int, Tensor]:
    """Return the half-precision tensors of a model by id, without packed weights."""
    packed = {id(root.get_submodule(name).weight) for name in quantized_layers(root)}
    narrow = (t for t in _tensors_of(root) if t.dtype in HALF)
    return {id(t): t for t in narrow if id(t) not in packed}


class _PartForward(Wrapper):
    """Runs a part of a model in float32, and once more in the backward. ``own``: what is held."""

    def __init__(self, stream: Stream, own: Sequence[Tensor]) -> None:
        self.stream = stream
        self.own = own

    def call(self, *args: Any, **kwargs: Any) -> Any:
        given = pytree.tree_leaves((args, kwargs))
        learning = (*self.module.parameters(), *(t for t in given if isinstance(t, Tensor)))
        if not (torch.is_grad_enabled() and any(t.requires_grad for t in learning)):
            with self.held():
                return self.inner(*args, **kwargs)
        run = _PartRun(self, Given(args, kwargs))
        anchor = torch.empty(0, requires_grad=True)  # the output hangs on parameters as well
        return run.output(_Part.apply(run, anchor, *run.given.tensors))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have the part's tensors in float32 inside."""
        with ExitStack() as undo:
            with unrecorded():
                undo.enter_context(swapped(self.own, torch.float32))
            try:
                yield
            finally:
                with unrecorded():
                    undo.close()


class _PartRun:
    """One call of a part: what it was given, and where the run was then."""

    def __init__(self, part: _PartForward, given: Given) -> None:
        self.part = part
        self.given = given
        self._rng, self._again = note_rng(), passage()
        self._made: tuple[list[Any], Any] = ([], None)

    def forward(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors among what the part returns, without a graph."""
        self.given.tensors = []  # autograd keeps them
        versions = [tensor._version for tensor in given]
        with self.part.held():
            result, is_whole = self.given.first(self.part.inner)
            leaves, form, made = without_tensors(result)
        if not is_whole or versions != [tensor._version for tensor in given]:
            raise NanstopError(f"{_REFUSED}: it writes to what it is given")
        self._made = leaves, form
        known = {id(tensor) for tensor in given}
        return tuple(one.view_as(one) if id(one) in known else one for one in made)

    def output(self, made: Sequence[Tensor]) -> Any:
        """Return what the part returns, with the tensors that autograd made of its own."""
        (leaves, form), self._made = self._made, ([], None)
        return pytree.tree_unflatten(with_tensors(leaves, made), form)

    def backward(
        self, given: Sequence[Tensor], upstream: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Run the part once more, with a graph; return the gradients of what it was given."""
        if any(parameter.grad is not None for parameter in self.part.module.parameters()):
            raise NanstopError(f"{_REFUSED}: parameters are used outside of their module")
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in given]
        with rng_kept(), self.part.held(), torch.enable_grad():
            restore_rng(self._rng)
            with self._again():
                made = without_tensors(self.given.again(self.part.inner, inputs))[-1]
            pairs = zip(made, upstream, strict=True)
            ends = [(t, g) for t, g in pairs if g is not None and t.requires_grad]
            if ends:  # what a checkpoint within recomputes comes next on the path
                torch.autograd.backward([t for t, _ in ends], [g for _, g in ends])
            del made, pairs, ends
            with unrecorded():
                for parameter in self.part.module.parameters():
                    self.part.stream.take(parameter)
        return [tensor.grad for tensor in inputs]


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _PartRun, _anchor: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.save_for_backward(*given)
        ctx.set_materialize_grads(False)
        made = run.forward(given)
        ctx.mark_non_differentiable(*(one for one in made if not one.is_floating_point()))
        return made

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NanstopError(f"{_REFUSED}: a gradient is differentiated once more")
        return (None, None, *ctx.run.backward(ctx.saved_tensors, upstream))
