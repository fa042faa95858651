"""A call that can be made again.

Its function, and its arguments with what must not be held replaced by stand-ins.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from inspect import CO_OPTIMIZED
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nanstop.errors import NanstopError
from nanstop.frozen import frozen
from nanstop.hosts.tape.numbers import Number
from nanstop.hosts.tape.tensors import Autocast, SavedHooks, in_autocast, in_hooks
from nanstop.numerics.graph import is_leaf, node_of
from nanstop.numerics.nested import leaves, mapped
from nanstop.numerics.tensors import bytes_of, has_bad, tensors, version
from nanstop.own_code import is_wrapper
from nanstop.replay.rng import RngState, restore_rng
from nanstop.rewrite.source import span_at, spelled
from nanstop.tracebacks import passes_through, relay
from nanstop.tracing.places import Line
from nanstop.tracing.source.assignments import tree_of

__tracebackhide__ = passes_through

T = TypeVar("T")
MAX_HELD_BYTES, _MAX_ALL_BYTES = 2**20, 2**24
"""Larger tensors from outside are not held for what the script makes of them: logits of another
model, say; nor more than this in all.
"""


@frozen
class Slot:
    """Stands for the ``index``-th tensor that the calls so far have returned.

    ``outer``: see ``TapedCall``.
    """

    index: int
    outer: bool = False


class _Referred:
    """What may be referred to weakly and has slots (a dataclass alone does that from 3.11 on)."""

    __slots__ = ("__weakref__",)


@dataclass(slots=True, eq=False)
class Constant(_Referred):
    """A tensor from outside, by reference, with the version of its values at the call; a copy of
    it where the script was about to write to it.

    ``origin``: its slot, if the script made it before the first model call and the tape knows of
    what. ``unrepeated``: see ``Unrepeated``.
    """

    tensor: Tensor
    version: int
    origin: int | None = None
    unrepeated: bool = False

    @property
    def moved(self) -> bool:
        return version(self.tensor) != self.version

    @property
    def is_lost(self) -> bool:
        """Whether it is not finite, and what made it so is not made again. Synchronises the
        device where that may be.
        """
        return self.unrepeated and has_bad(self.tensor)


@dataclass(slots=True, eq=False)
class Cut(Constant):
    """A tensor whose graph began before the tape, by a leaf that holds the same values.

    ``is_end``: no gradient is asked for that goes further back than to it.
    """

    is_end: bool = False


class Cuts:
    """Leaves that stand for tensors with an earlier graph, in a loop without an optimizer."""

    def __init__(self) -> None:
        self._leaves: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        self._made: list[Cut] = []

    def of(self, tensor: Tensor) -> Cut:
        """Return what stands for a tensor with an earlier graph."""
        cut = Cut(self.leaf(tensor), version(tensor))
        self._made.append(cut)
        return cut

    def ask(self, inputs: Iterable[Tensor]) -> None:
        """Note of what gradients are asked for: those of a leaf may come from an earlier graph."""
        asked = list(inputs)
        ends = {id(self.leaf(tensor)) for tensor in asked}
        is_later = not any(map(is_leaf, asked))
        for cut in self._made:
            cut.is_end |= is_later or id(cut.tensor) in ends

    def leaf(self, tensor: Tensor) -> Tensor:
        """Return a tensor itself if it is a leaf, else the one that stands for it."""
        if is_leaf(tensor):
            return tensor
        known = self._leaves.get(id(tensor))
        if known is None or known[0]() is not tensor:
            known = weakref.ref(tensor), tensor.detach().requires_grad_()
            self._leaves[id(tensor)] = known
        return known[1]


class EarlierGraph:
    """Stands for a tensor whose graph began before the tape."""


HISTORY = EarlierGraph()


@frozen
class Left:
    """Stands for a tensor that a model has left in an attribute of one of its modules, or in a
    list there (``place``). ``slot``: of the first result of the call that did. ``seen``: the tensor
    of the first time.
    """

    module: nn.Module
    name: str
    place: int | None
    slot: int
    seen: weakref.ref[Tensor]

    def made_anew(self) -> Tensor:
        """Return what is there after another call. Errors: NanstopError where that left none."""
        found = left_in(self.module, self.name, self.place)
        if not isinstance(found, Tensor) or found is self.seen():
            raise NanstopError(f"the model leaves no `{self.name}` when it is called again")
        return found


@dataclass(slots=True)
class TapedCall:
    """One call.

    ``first`` and ``count``: slots of its results. ``writes``: slots of the operands it changed in
    place.

    ``foreign``: what it changed that cannot be put back. ``keep``: needed whatever uses its results
    (``backward``). ``outer``: no result of a model is among its operands, nor anything made of one.
    ``scalar``: its result is one number. ``instruction``: of the line's code, that made it.
    ``hooks``: of the script's own on what autograd saves. ``into``: of a call that writes into a
    copy of what is not the step's own, all slots that hold it or a part of it (see ``Lent``).
    """

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    autocast: Autocast
    grad: bool
    line: Line
    rng: RngState | None
    first: int
    count: int = 0
    writes: tuple[int, ...] = ()
    foreign: str = ""
    keep: bool = False
    outer: bool = False
    scalar: bool = False
    instruction: int = -1
    hooks: SavedHooks | None = None
    into: Collection[int] | None = None

    @property
    def results(self) -> range:
        """The slots of its results."""
        return range(self.first, self.first + self.count)

    def held(self, kind: type[T] | tuple[type[T], ...]) -> Iterator[T]:
        """Yield the stand-ins of a kind, or of some, among its arguments."""
        return leaves(self.args, self.kwargs, kind=kind)

    @property
    def obstacle(self) -> str:
        """Why the call cannot be made again, or ""."""
        ends = all(cut.is_end for cut in self.held(Cut))
        if not ends or any(True for _ in self.held(EarlierGraph)):
            return "the loss or an input of the model comes from ops that were not recorded"
        if any(constant.moved for constant in self.held(Constant)):
            return "an input was changed in place after the forward"
        if any(constant.is_lost for constant in self.held(Constant)):
            return "what is not finite was made by a call that cannot be made again: it may draw"
        return self.foreign

    def given(self, data: Mapping[int, Constant]) -> TapedCall:
        """Return the call with constants in place of some slots, itself where it reads none."""
        if data.keys().isdisjoint(slot.index for slot in self.held(Slot)):
            return self

        def entry(value: Any) -> Any:
            return data.get(value.index, value) if isinstance(value, Slot) else value

        return replace(self, args=mapped(self.args, entry), kwargs=mapped(self.kwargs, entry))

    def play(
        self, values: dict[int, Tensor], replaced: Mapping[int, Tensor], *, hooked: bool = False
    ) -> None:
        """Make the call again and put its results into ``values``; ``hooked``: under its hooks on
        what autograd saves.
        """
        if self.rng is not None:
            restore_rng(self.rng)
        args, kwargs = filled(self.args, values, replaced), filled(self.kwargs, values, replaced)
        hooks = in_hooks(self.hooks if hooked else None)
        with torch.set_grad_enabled(self.grad), in_autocast(self.autocast), hooks:
            result = relay(self.line, self.instruction)(self.function, args, kwargs)
        for place, tensor in enumerate(tensors(result)):
            values[self.first + place] = tensor


def filled(value: Any, values: Mapping[int, Tensor], replaced: Mapping[int, Tensor]) -> Any:
    """Return arguments with what their stand-ins stand for."""

    def entry(value: Any) -> Any:
        if isinstance(value, Slot):
            return values[value.index]
        if isinstance(value, Left):
            return value.made_anew()
        if isinstance(value, Number):
            return float(values[value.slot].detach())
        if isinstance(value, Constant):
            if value.origin is not None and value.origin in values:
                return values[value.origin]
            return replaced.get(id(value.tensor), value.tensor)
        return value

    return mapped(value, entry)


def left_in(module: nn.Module, name: str, place: int | None) -> Any:
    """Return what a module has in an attribute, or at a place of a list there; None for nothing."""
    held = vars(module).get(name)
    if place is None:
        return held
    return held[place] if isinstance(held, list) and place < len(held) else None


def root_of(tensor: Tensor) -> Tensor:
    """Return the tensor that another one is a view of, or itself."""
    return tensor if tensor._base is None else tensor._base


class HeldData:
    """How much of what is not the step's own a tape holds."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._known: set[int] = set()

    def takes(self, outside: Iterable[Tensor], *, again: bool = False) -> bool:
        """Return whether there is room for tensors from outside, and count them as held then; what
        is known needs none, unless it is ``again`` a copy.
        """
        data = {id(root_of(t)): bytes_of(t) for t in outside if not t.requires_grad}
        size = sum(nbytes for key, nbytes in data.items() if again or key not in self._known)
        is_large = max(data.values(), default=0) > MAX_HELD_BYTES
        if is_large or self._num_bytes + size > _MAX_ALL_BYTES:
            return False
        self._num_bytes += size
        self._known.update(data)
        return True


class Lent:
    """Tensors from outside that a step writes results of its model into (a target that it fills),
    and the slots that hold their copies and parts of those.
    """

    def __init__(self) -> None:
        self._slots: dict[int, tuple[weakref.ref[Tensor], set[int]]] = {}

    def calls(
        self, root: Tensor, written: Tensor, known: Mapping[int, tuple[weakref.ref[Tensor], Slot]]
    ) -> Iterator[tuple[Tensor, Callable[..., Any], tuple[Any, ...]]]:
        """Yield the calls that copy ``root`` as it is now and take the parts of it that are known,
        and that which is ``written``: for which tensor, with what. The caller notes each.
        """
        if not root.is_contiguous() or root.grad_fn is not None or root.requires_grad:
            return
        parts = [reference() for reference, _ in known.values()]
        parts = [one for one in (written, *parts) if one is not None and one._base is root]
        self._slots[id(root)] = weakref.ref(root), set()
        copy = root.detach().clone()
        yield root, torch.clone, (Constant(copy, version(copy)),)
        whole = Slot(max(self._slots[id(root)][1]))
        for part in {id(one): one for one in parts}.values():
            begin = part.storage_offset() - root.storage_offset()
            yield part, torch.as_strided, (whole, tuple(part.shape), part.stride(), begin)

    def slots(self, tensor: Tensor) -> Collection[int] | None:
        """Return the slots of what a tensor is a part of, None where it is not lent."""
        known = self._slots.get(id(root_of(tensor)))
        return known[1] if known is not None and known[0]() is root_of(tensor) else None

    def note(self, tensor: Tensor, slot: int) -> None:
        """Note that a slot holds what may be a part."""
        if self._slots and isinstance(found := self.slots(tensor), set):
            found.add(slot)


Slots = dict[int, tuple[weakref.ref[Tensor], Slot]]


def forget_written(slots: Slots, written: Sequence[Tensor], *, parts: bool, made: bool) -> None:
    """Have tensors that were written to be taken as they are later, and with them other ``parts``
    of their memory, and what was ``made`` of the old values.
    """
    for tensor in written:
        slots.pop(id(tensor), None)
    roots = {id(root_of(tensor)) for tensor in written}
    for key, (reference, slot) in list(slots.items()) if roots and parts else ():
        tensor = reference()
        is_made = made and (tensor is None or node_of(tensor) is None)
        if slot.outer and (is_made or (tensor is not None and id(root_of(tensor)) in roots)):
            del slots[key]


def is_kept(written: Tensor) -> bool:
    """Return whether the calls keep what they were given of a tensor that is written to."""
    return bytes_of(written) <= MAX_HELD_BYTES and not written.requires_grad


def spelled_by(call: TapedCall, constant: Constant) -> str:
    """Return how the source spells an operand of a call, "" where it is no name or attribute."""
    if call.line is None or not any(one is constant for one in call.args):
        return ""
    code, _ = call.line
    names = _operands_at(code.co_filename, code, call.instruction, len(call.args))
    same = [name for name, one in zip(names, call.args, strict=False) if one is constant]
    return same[0] if same else ""


@lru_cache(maxsize=1024)
def _operands_at(file: str, code: CodeType, instruction: int, number: int) -> tuple[str, ...]:
    """Return how the source spells the operands of a call, see ``spelled``: a loop makes its calls
    again in each step, and its file is long.
    """
    span, tree = span_at(code, instruction), tree_of(file)
    return spelled(tree, span, number) if span and tree else ()


def variable_names(*, of_weights: bool = False) -> dict[int, str]:
    """Return what the script calls its tensors.

    Ids of the tensors in its variables and dicts, innermost frame first. ``of_weights``: of the
    weights of modules in them, too.
    """
    found: dict[int, str] = {}
    frame = sys._getframe(1)
    while frame is not None:
        if not is_wrapper(frame.f_code.co_filename):
            variables = frame.f_locals
            for name, value in variables.items():
                entries = value.items() if type(value) is dict else ((name, value),)
                for key, entry in entries:
                    if isinstance(key, str) and isinstance(entry, Tensor):
                        found.setdefault(id(entry), key)
                    elif of_weights and isinstance(entry, nn.Module):
                        for inner, weight in nn.Module.named_parameters(entry, str(key)):
                            found.setdefault(id(weight), inner)
            if sys.version_info < (3, 13) and frame.f_code.co_flags & CO_OPTIMIZED:
                # A function's variables are a copy that its frame keeps: it would hold the step's
                # graph (PEP 667).
                variables.clear()
        frame = frame.f_back
    return found
