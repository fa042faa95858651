"""Remedies of number format: islands, outer autocast, bfloat16, float32 trainables, float32
logits; the reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import chain

import torch
from torch import Tensor, nn

from nanstop.errors import NanstopError
from nanstop.numerics.modules import lies_on_several, quantized_layers
from nanstop.numerics.tensors import HALF, format_name
from nanstop.records import Atom
from nanstop.remedies.forward import (
    AutocastForward,
    AutocastOverride,
    Float32Forward,
    Float32Recompute,
    InputCast,
    WideOwnerForward,
    WithoutAutocast,
    Wrapper,
    callable_modules,
    computing_in,
    forward_replaced,
    is_callable,
    wrapper_of,
)
from nanstop.remedies.storage import state_swapped, stored_in
from nanstop.replay.conditions import eager
from nanstop.replay.held import saved_plain, swapped
from nanstop.replay.step import ModelView

_FORMATS = {format_name(dtype): dtype for dtype in HALF}


def island(view: ModelView, atom: Atom) -> AbstractContextManager[None]:
    """One module in float32. Value "float32" emits float32, "float32->input" the format of its
    input.

    Without an autocast around it, what a half-precision model computes next from a float32 output
    raises: use the second form, or the atom ``outer_autocast`` beside the first.
    """
    if atom.value not in ("float32", "float32->input"):
        raise NanstopError(f"{atom}: the value must be float32 or float32->input")
    return _island(view, atom.target, narrow=atom.value.endswith("input"))


@contextmanager
def _island(view: ModelView, target: str, *, narrow: bool) -> Iterator[None]:
    modules = modules_named(view, target)
    with ExitStack() as undo:
        for module, part in ((m, part) for m in modules for part in callable_modules(m)):
            owner = wrapper_of(part.forward)
            if isinstance(owner, WideOwnerForward):
                undo.enter_context(owner.emitting(torch.float32))
            kind = Float32Forward if part is module else Float32Recompute
            wrapper = kind(view.device_type, narrow=narrow and part is module)
            undo.enter_context(forward_replaced(part, wrapper))
        yield


@contextmanager
def outer_autocast(view: ModelView, atom: Atom) -> Iterator[None]:
    """The root's forward under autocast to float16 or bfloat16, so that float32 outputs of
    islands meet half weights.
    """
    if atom.value not in _FORMATS:
        raise NanstopError(f"{atom}: the value must be float16 or bfloat16")
    wrapper = AutocastForward(view.device_type, _FORMATS[atom.value])
    with forward_replaced(view.root, wrapper):
        yield


@contextmanager
def bf16(view: ModelView, _: Atom) -> Iterator[None]:
    """Bfloat16 wherever float16 stands:
    storage, optimizer state, 4-bit compute format and the host's autocast.
    """
    _require_own_weights(view)
    with _in_format(view, frozenset((torch.float16,)), torch.bfloat16):
        yield


@contextmanager
def reference(
    view: ModelView, dtype: torch.dtype = torch.float32, *, with_state: bool = True
) -> Iterator[None]:
    """The whole model in float32 or float64: storage, optimizer state, 4-bit compute format;
    the host's autocast is off. ``with_state``: whether an update is run inside.

    Compiled code runs eagerly. Needs room for a copy of every parameter that is narrower.
    The same storages are back on exit.
    """
    half = frozenset(HALF)
    narrower = half if dtype is torch.float32 else half | {torch.float32}
    with _in_format(view, narrower, dtype, with_state=with_state), computed_anew(view):
        yield


@contextmanager
def computed_anew(view: ModelView) -> Iterator[None]:
    """Have nothing inside computed by compiled code, or in the format of an autocast."""
    with eager(), WithoutAutocast(view.device_type, frozenset(HALF)):
        yield


@contextmanager
def fp32_trainables(view: ModelView, _: Atom) -> Iterator[None]:
    """Trainable half-precision parameters, their gradients and their optimizer state in float32.

    The modules that own them compute in float32 and emit the format that they emitted before.
    """
    _require_own_weights(view)
    trainable = [p for p in stored_in(view, HALF) if p.requires_grad]
    chosen = {id(parameter) for parameter in trainable}
    with ExitStack() as undo:
        for name, module in view.root.named_modules():
            owned = [p for p in module._parameters.values() if p is not None and id(p) in chosen]
            if owned and is_callable(module):
                undo.enter_context(
                    forward_replaced(module, WideOwnerForward(view.device_type, owned[0].dtype))
                )
            elif owned:  # a ParameterDict: whoever it belongs to reads it
                undo.enter_context(forward_replaced(_reader(view.root, name), Wrapper()))
        if view.optimizer is not None:
            undo.enter_context(state_swapped(view.optimizer, trainable, torch.float32))
        undo.enter_context(swapped(trainable, torch.float32))
        undo.enter_context(saved_plain(view.root))
        yield


def _require_own_weights(view: ModelView) -> None:
    """Errors: ``NanstopError`` where a weight is not this process's alone to be held in another
    format.
    """
    if lies_on_several(view.root):
        raise NanstopError("parts of each weight lie on other processes: its format stays")


def _reader(root: nn.Module, name: str) -> nn.Module:
    """Return the innermost module with a forward that a container lies in;
    the root where there is none.
    """
    places = name.split(".")
    around = (root.get_submodule(".".join(places[:end])) for end in range(len(places) - 1, 0, -1))
    return next((module for module in around if is_callable(module)), root)


def fp32_logits(view: ModelView, atom: Atom) -> AbstractContextManager[None]:
    """The output head in float32; it emits float32, so that the loss is computed there too."""
    head = view.head()
    if head is None:
        raise NanstopError(f"{atom}: this model has no output head")
    return _island(view, head, narrow=False)


def modules_named(view: ModelView, name: str) -> list[nn.Module]:
    """Return the module of that name; of those beside the model, which their classes name, all.
    Raises NanstopError where there is none.
    """
    with suppress(AttributeError):
        return [view.root.get_submodule(name)]
    kind, _, part = name.partition(".")
    found = []
    for module in view.beside:
        with suppress(AttributeError):
            found += [module.get_submodule(part)] if type(module).__name__ == kind else []
    if not found:
        raise NanstopError(f"the model has no module `{name}`")
    return found


@contextmanager
def _in_format(
    view: ModelView,
    replaced: frozenset[torch.dtype],
    dtype: torch.dtype,
    *,
    with_state: bool = True,
) -> Iterator[None]:
    """Everything that is stored or computed in one of ``replaced``, beside the model too: in
    ``dtype``.
    """
    tensors = stored_in(view, replaced)
    with ExitStack() as undo:
        undo.enter_context(computed_in(view, replaced, dtype))
        for owner in _owners(view, tensors):
            # A program may cast what it hands over to the format that it knows of its weights.
            undo.enter_context(forward_replaced(owner, InputCast(replaced, dtype)))
        if with_state and view.optimizer is not None:
            undo.enter_context(state_swapped(view.optimizer, tensors, dtype))
        undo.enter_context(swapped((*tensors, *_beside_in(view, replaced)), dtype))
        for root in (view.root, *view.beside):
            undo.enter_context(saved_plain(root))
        yield


@contextmanager
def computed_in(
    view: ModelView, replaced: frozenset[torch.dtype], dtype: torch.dtype
) -> Iterator[None]:
    """What computes in one of ``replaced`` does so in ``dtype``, whatever formats are stored."""
    region = dtype if dtype in HALF else None
    with ExitStack() as undo:
        for root in (view.root, *view.beside):
            for module in callable_modules(root):
                override = AutocastOverride(view.device_type, replaced, region)
                undo.enter_context(forward_replaced(module, override))
            undo.enter_context(forward_replaced(root, InputCast(replaced, dtype)))
        for name in quantized_layers(view.root):
            layer = view.root.get_submodule(name)
            if vars(layer).get("compute_dtype") in (*replaced, None):
                computing_in(layer, undo, dtype)
        yield


def _owners(view: ModelView, tensors: Sequence[Tensor]) -> Iterator[nn.Module]:
    """Yield the modules with a forward that hold one of the tensors themselves."""
    chosen = {id(tensor) for tensor in tensors}
    for module in callable_modules(view.root):
        held = chain(module._parameters.values(), module._buffers.values())
        if any(id(one) in chosen for one in held):
            yield module


def _beside_in(view: ModelView, formats: frozenset[torch.dtype]) -> list[Tensor]:
    """Return parameters and buffers in these formats of the modules beside the model, each once."""
    own = {id(tensor) for tensor in chain(view.root.parameters(), view.root.buffers())}
    found = (t for m in view.beside for t in chain(m.parameters(), m.buffers()))
    return list({id(t): t for t in found if t.dtype in formats and id(t) not in own}.values())
