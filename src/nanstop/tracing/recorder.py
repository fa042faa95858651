"""The recorder: every operation of one run as a node of a data-flow graph, with the range of what
it read and wrote.

A ``TorchDispatchMode`` sees ops below autograd, in forward, in checkpoint recomputation, in
backward and in the optimizer. Values are identified by storage, so a saved tensor that backward
unpacks is the one that forward wrote. Nothing synchronises the device while recording: minima and
maxima stay on it and are read once at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from nanstop.frozen import frozen
from nanstop.numerics.tensors import dense_parts, is_measurable
from nanstop.records import Phase
from nanstop.tracing import operators
from nanstop.tracing.places import BackwardLine, Place, Places, current_node, graph_task

UNMEASURED = -1


@dataclass(slots=True)
class Storage:
    """One block of memory and the ops that wrote into it, oldest first.

    The weak reference keeps the address from being given to another storage while recording lasts.
    ``line``: (code, line number) that wrote its first values down, or took them from NumPy: no op
    has made those. ``other``: the parameter that it is of a model that is not under the root.
    """

    ref: StorageWeakRef
    name: str | None
    line: tuple[Any, int] | None = None
    other: str | None = None
    writers: list[int] = field(default_factory=list)
    cache: dict[Any, Value] = field(default_factory=dict)


@dataclass(slots=True)
class Value:
    """A tensor at one moment. ``slot``: place of its extremes;
    ``generation``: how many ops had written its storage.

    ``layout``: (strides, offset) in the storage; ``covers``: whether it is its whole storage.
    """

    storage: Storage
    generation: int
    slot: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: tuple[tuple[int, ...], int]
    lane: int | None = None
    covers: bool = True


@dataclass(slots=True)
class Op:
    """One dispatched operation; module and line are those of the forward op for backward ones.

    ``forward``: that op's name, and ``made_by`` its index; None where a hook asked for the op.
    """

    index: int
    name: str
    phase: Phase
    module: str
    line: tuple[Any, int] | None
    node: str | None
    forward: str | None
    made_by: int | None = None
    inputs: tuple[Value, ...] = ()
    outputs: tuple[Value, ...] = ()
    scalars: tuple[float, ...] = ()
    raised: bool = False

    @property
    def place(self) -> tuple[str, Phase, str, tuple[Any, int] | None]:
        """What calls of one line of a program have in common."""
        return self.name, self.phase, self.module, self.line


@frozen
class Trace:
    """What a recorded run did. ``low``/``high``: extremes by slot (NaN in both where a NaN is
    held).

    ``unseen``: names of ops whose operands could not be measured.
    """

    ops: tuple[Op, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    unseen: tuple[str, ...] = ()


def is_counted(func: Any, types: Any) -> bool | None:
    """Return whether a dispatched op is one of a trace: views are not;
    None if a wrapper tensor is to open it first.
    """
    if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
        return None
    return not operators.traits(func).is_view


def opened(mode: TorchDispatchMode, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Run an op that may copy (``Traits.may_copy``) as the ops it is made of, which ``mode`` sees.

    Autograd opens it before a mode is asked. Where autograd is left out, in inference mode and in
    what a wrapper tensor runs, it comes as it is: its copy would be a value that no op has made.
    """
    TorchDispatchMode.__enter__(mode)
    try:
        return func.decompose(*args, **kwargs)
    finally:
        TorchDispatchMode.__exit__(mode, None, None, None)


class Recorder(TorchDispatchMode):
    """Records every op while entered. ``names``: tensors known by name (parameters, buffers, batch
    entries, state); of two names for one memory the first is kept.

    ``look``, if given, is called with each op before it runs and may return what is to be called
    with its result (``op_patches.Patch``). Whatever goes wrong while measuring an op is kept to
    itself: it runs, and is recorded without ranges.
    """

    def __init__(
        self,
        root: nn.Module,
        names: Mapping[str, Tensor],
        *,
        phase: Phase = "forward",
        look: Any = None,
    ) -> None:
        super().__init__()
        self._places = Places(root)
        self._phase: Phase = phase
        self._look = look
        self._storages: dict[int, Storage] = {}
        self._low: list[Tensor] = []
        self._high: list[Tensor] = []
        self._ops: list[Op] = []
        self._unseen: dict[str, None] = {}
        for name, tensor in names.items():
            for part in dense_parts(tensor):
                storage = self._storage(part)
                storage.name = storage.name or name

    def __enter__(self) -> Recorder:
        self._places.attach(sys._getframe(1).f_code)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._places.detach()
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        counted = is_counted(func, types)
        if counted is None:
            return NotImplemented
        traits = operators.traits(func)
        if traits.may_copy:
            return opened(self, func, args, kwargs)
        op = self._place(traits.name)
        if not counted:
            result = func(*args, **kwargs)
            if traits.base == "lift_fresh":
                self._note_literal(result, op)
            return result
        self._ops.append(op)
        try:
            op.inputs = tuple(self._inputs(traits, args, kwargs))
            op.scalars = tuple(operators.scalars(args, kwargs))
        except Exception:  # an operand of a kind not foreseen must not end the run
            self._unseen[op.name] = None
        done = self._look(op.index, func, args, kwargs) if self._look else None
        try:
            result = func(*args, **kwargs)
        except BaseException:
            op.raised = True
            raise
        if done is not None:
            done(result)
        try:
            op.outputs = tuple(self._outputs(op.index, traits, args, kwargs, result))
        except Exception:  # as above
            self._unseen[op.name] = None
        return result

    def _note_literal(self, tensor: Any, op: Op) -> None:
        with suppress(Exception):  # a tensor of a kind not foreseen must not end the run
            storage = self._storage(tensor)
            if storage.name is None and not storage.writers:
                storage.line = op.line

    def _place(self, name: str) -> Op:
        """Return the op of this dispatch with its phase, module and line;
        views too number autograd nodes.
        """
        places, index = self._places, len(self._ops)
        written, node = None, None
        if graph_task() == -1:
            line = places.line()
        else:
            written = places.line_in_backward()
            line = written.line
            node = None if written.anew else current_node()
        if written is not None and node is not None:
            place = self._place_in_backward(node, written)
            return Op(
                index,
                name,
                self._named("backward"),
                place.module,
                place.line,
                node.name(),
                place.op,
                place.index,
            )
        place = places.forward(name, line, index)
        outside = places.left_root and not places.inside
        anew = written is not None and written.anew
        phase: Phase = "recompute" if anew else "loss" if outside else "forward"
        return Op(index, name, self._named(phase), place.module, line, None, None)

    def _place_in_backward(self, node: Any, written: BackwardLine) -> Place:
        variable = getattr(node, "variable", None)
        if variable is None:
            return self._places.backward(node, written)
        owner = self._owner(variable)
        return Place(owner, written.line, None if written.by_hook else "AccumulateGrad")

    def _owner(self, parameter: Tensor) -> str:
        """Return the module of a parameter whose gradient is being accumulated."""
        parts = dense_parts(parameter)
        name = self._storage(parts[0]).name if parts else None
        return (name or "").rpartition(".")[0]

    def _named(self, phase: Phase) -> Phase:
        return phase if self._phase == "forward" else self._phase

    def _storage(self, tensor: Tensor) -> Storage:
        raw = tensor.untyped_storage()
        known = self._storages.get(raw._cdata)
        if known is None:
            known = self._storages[raw._cdata] = Storage(StorageWeakRef(raw), None)
        return known

    def _inputs(self, traits: operators.Traits, args: Any, kwargs: Any) -> Iterator[Value]:
        selected = operators.selected_operands(traits.base, args)
        for position, lane, tensor in operators.tensors(args, kwargs):
            if position in traits.overwritten:
                continue
            if position in selected:
                yield self._new_value(self._storage(tensor), selected[position], lane)
                continue
            for part in self._parts(traits, tensor):
                # Ids and masks have no range, but data flows through them.
                look = self._value if is_measurable(part) else self._unmeasured
                yield look(part, lane)

    def _parts(self, traits: operators.Traits, tensor: Tensor) -> tuple[Tensor, ...]:
        parts = tuple(part for part in dense_parts(tensor) if not part.is_quantized)
        if not parts and (tensor.is_nested or tensor.numel() > 0):
            self._unseen[traits.name] = None
        return parts

    def _outputs(
        self, index: int, traits: operators.Traits, args: Any, kwargs: Any, result: Any
    ) -> Iterator[Value]:
        seen: set[tuple[int, int, int]] = set()
        for lane, tensor in operators.written(traits, args, kwargs, result):
            for part in self._parts(traits, tensor):
                storage = self._storage(part)
                key = (id(storage), int(part.storage_offset()), part.numel())
                if key in seen:
                    continue
                seen.add(key)
                storage.writers.append(index)
                if is_measurable(part):
                    look = self._unmeasured if traits.uninitialised else self._value
                    yield look(part, lane)

    def _value(self, tensor: Tensor, lane: int | None = None) -> Value:
        storage = self._storage(tensor)
        generation = len(storage.writers)
        whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        shape, layout = tuple(tensor.shape), (tensor.stride(), int(tensor.storage_offset()))
        key: Any = (
            (generation, tensor.dtype) if whole else (generation, tensor.dtype, shape, layout)
        )
        known = storage.cache.get(key)
        if known is None:
            known = storage.cache[key] = self._new_value(storage, tensor, lane)
            known.covers = whole
        if known.lane != lane or known.shape != shape or known.layout != layout:
            slot, dtype = known.slot, tensor.dtype
            return Value(storage, generation, slot, shape, dtype, layout, lane, whole)
        return known

    def _new_value(self, storage: Storage, tensor: Tensor, lane: int | None) -> Value:
        low, high = operators.extremes(tensor)
        self._low.append(low)
        self._high.append(high)
        return self._bare(storage, tensor, len(self._low) - 1, lane)

    def _unmeasured(self, tensor: Tensor, lane: int | None) -> Value:
        return self._bare(self._storage(tensor), tensor, UNMEASURED, lane)

    def _bare(self, storage: Storage, tensor: Tensor, slot: int, lane: int | None) -> Value:
        layout = (tensor.stride(), int(tensor.storage_offset()))
        generation = len(storage.writers)
        return Value(storage, generation, slot, tuple(tensor.shape), tensor.dtype, layout, lane)

    def values(self, tensor: Tensor) -> tuple[Value, ...]:
        """Return the values that a tensor holds now (of a sparse one: its entries):
        how the caller names what failed.
        """
        return tuple(self._value(part) for part in dense_parts(tensor) if is_measurable(part))

    def finish(self) -> Trace:
        """Return the trace. Synchronises the device once."""
        low, high = _to_floats(self._low), _to_floats(self._high)
        for name, held in self._places.others:
            for part in dense_parts(held):
                storage = self._storage(part)
                storage.other = storage.other or name
        return Trace(tuple(self._ops), low, high, tuple(self._unseen))


def _to_floats(scalars: Sequence[Tensor]) -> tuple[float, ...]:
    """Read many 0-dim tensors of mixed formats and devices with one transfer for each kind."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, scalar in enumerate(scalars):
        kinds.setdefault((scalar.dtype, scalar.device), []).append(place)
    values = [0.0] * len(scalars)
    with torch.no_grad():
        for places in kinds.values():
            block = torch.stack([scalars[place].detach() for place in places]).tolist()
            for place, value in zip(places, block, strict=True):
                values[place] = float(value)
    return tuple(values)
