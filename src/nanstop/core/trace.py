"""The recorder: every operation of one run as a node of a data-flow graph, with the range of what it read and wrote.

A ``TorchDispatchMode`` sees ops below autograd, in forward, in checkpoint recomputation, in backward and in the
optimizer. Values are identified by storage, so a saved tensor that backward unpacks is the one that forward wrote.
Nothing synchronises the device while recording: minima and maxima stay on it and are read once at the end.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode

from nanstop.core import optable
from nanstop.core.numerics import is_measurable
from nanstop.records import Phase

_sequence_nr = torch.autograd._get_sequence_nr  # pyright: ignore[reportPrivateImportUsage]
_current_node = torch._C._current_autograd_node
_graph_task = torch._C._current_graph_task_id

_NOT_THE_USERS = (
    torch.__path__[0],
    "/bitsandbytes/",
    "/transformers/utils/",
    "/accelerate/",
    "/nanstop/",
)
"""Files whose frames are wrappers around the line that a user would want to see."""


@dataclass(slots=True)
class Storage:
    """One block of memory and the ops that wrote into it, oldest first.

    The weak reference keeps the address from being given to another storage while recording lasts.
    """

    ref: StorageWeakRef
    name: str | None
    writers: list[int] = field(default_factory=list)
    cache: dict[Any, Value] = field(default_factory=dict)


@dataclass(slots=True)
class Value:
    """A tensor at one moment. ``slot``: place of its extremes; ``generation``: how many ops had written its storage."""

    storage: Storage
    generation: int
    slot: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    lane: int | None = None
    covers: bool = True
    """Whether it is its whole storage."""


@dataclass(slots=True)
class Op:
    """One dispatched operation; ``place`` is (module, frame code, line), of the forward op for backward ones."""

    index: int
    name: str
    phase: Phase
    module: str
    line: tuple[Any, int] | None
    node: str | None
    forward: str | None
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...] = ()
    scalars: tuple[float, ...] = ()
    raised: bool = False


@dataclass(frozen=True, slots=True)
class Trace:
    """What a recorded run did. ``low``/``high``: float32 extremes by slot (NaN in both where a NaN is held)."""

    ops: tuple[Op, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    storages: Mapping[int, Storage]

    def find(self, tensor: Tensor) -> Storage | None:
        """Return the storage record of a tensor, if any op touched it."""
        return self.storages.get(tensor.untyped_storage()._cdata)


class Recorder(TorchDispatchMode):
    """Records every op while entered. ``names``: tensors known by name (parameters, buffers, batch entries, state).

    ``observer``, if given, is called as ``observer(index, func, args, kwargs)`` before an op runs and returns a
    callable for its result, or None: the close-up of a second pass.
    """

    def __init__(
        self,
        root: nn.Module,
        names: Mapping[str, Tensor],
        *,
        phase: Phase = "forward",
        observer: Any = None,
    ) -> None:
        super().__init__()
        self._module_names = {id(m): name for name, m in root.named_modules()}
        self._root = root
        self._phase: Phase = phase
        self._observer = observer
        self._stack: list[str] = []
        self._left_root = False
        self._handles: list[Any] = []
        self._storages: dict[int, Storage] = {}
        self._low: list[Tensor] = []
        self._high: list[Tensor] = []
        self._ops: list[Op] = []
        self._places: dict[tuple[int, int], tuple[str, Any, str]] = {}
        self._main = threading.get_ident()
        for name, tensor in names.items():
            if tensor.device.type != "meta" and tensor.layout is torch.strided:
                self._storage(tensor).name = name

    def __enter__(self) -> Recorder:
        self._handles = [
            hooks.register_module_forward_pre_hook(self._entered),
            hooks.register_module_forward_hook(self._left, always_call=True),
        ]
        return super().__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        super().__exit__(kind, error, traceback)

    def _entered(self, module: nn.Module, _args: Any) -> None:
        inherited = self._stack[-1] if self._stack else type(module).__name__
        self._stack.append(self._module_names.get(id(module), inherited))

    def _left(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if self._stack:
            self._stack.pop()
        if module is self._root:
            self._left_root = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        traits = optable.traits(func)
        in_backward = _graph_task() != -1 and not self._stack
        place = self._place(traits.name, in_backward)
        if traits.is_view:
            return func(*args, **kwargs)
        inputs = tuple(self._inputs(func, traits, args, kwargs))
        node = _current_node() if in_backward else None
        op = Op(
            index=len(self._ops),
            name=traits.name,
            phase=self._phase_now(in_backward),
            module=place[0],
            line=place[1],
            node=node.name() if node is not None else None,
            forward=place[2] if in_backward else None,
            inputs=inputs,
            scalars=tuple(optable.scalars(args, kwargs)),
        )
        self._ops.append(op)
        done = self._observer(op.index, func, args, kwargs) if self._observer else None
        try:
            result = func(*args, **kwargs)
        except BaseException:
            op.raised = True
            raise
        op.outputs = tuple(self._outputs(op.index, traits, args, kwargs, result))
        if done is not None:
            done(result)
        return result

    def _phase_now(self, in_backward: bool) -> Phase:
        if self._phase != "forward":
            return self._phase
        if in_backward:
            return "backward"
        if _graph_task() != -1:
            return "recompute"
        return "loss" if self._left_root and not self._stack else "forward"

    def _place(self, name: str, in_backward: bool) -> tuple[str, Any, str]:
        """Return (module, line, forward op): of this op, or in backward of the forward op it belongs to."""
        if not in_backward:
            place = (self._stack[-1] if self._stack else "", _user_line(), name)
            # Autograd numbers a node before it dispatches: the op's own number is the last one given out.
            self._places.setdefault((threading.get_ident(), _sequence_nr() - 1), place)
            return place
        node = _current_node()
        if node is None:
            return "", _user_line(), ""
        variable = getattr(node, "variable", None)
        if variable is not None:
            return self._owner(variable), None, "AccumulateGrad"
        own_line = _user_line(stop_at_engine=True)
        module, line, forward = self._forward_place(node._sequence_nr())
        return module, own_line or line, forward

    def _forward_place(self, number: int) -> tuple[str, Any, str]:
        for thread in (threading.get_ident(), self._main):
            for nearest in range(number, max(number - 4, -1), -1):
                place = self._places.get((thread, nearest))
                if place is not None:
                    return place
        return "", None, ""

    def _owner(self, parameter: Tensor) -> str:
        storage = self._storages.get(parameter.untyped_storage()._cdata)
        return (storage.name or "").rpartition(".")[0] if storage else ""

    def _storage(self, tensor: Tensor) -> Storage:
        raw = tensor.untyped_storage()
        known = self._storages.get(raw._cdata)
        if known is None:
            known = self._storages[raw._cdata] = Storage(StorageWeakRef(raw), None)
        return known

    def _inputs(self, func: Any, traits: optable.Traits, args: Any, kwargs: Any) -> Iterator[Value]:
        selected = optable.selected_operands(func, args)
        for position, lane, tensor in optable.tensors(args, kwargs):
            if position in traits.overwritten or not is_measurable(tensor):
                continue
            if position in selected:
                yield self._new_value(self._storage(tensor), selected[position], lane)
            else:
                yield self._value(tensor, lane)

    def _outputs(
        self, index: int, traits: optable.Traits, args: Any, kwargs: Any, result: Any
    ) -> Iterator[Value]:
        written = [
            (lane, tensor)
            for position, lane, tensor in optable.tensors(args, kwargs)
            if position in traits.mutated
        ]
        fresh = [(lane, tensor) for _, lane, tensor in optable.tensors(_as_tuple(result), {})]
        seen: set[int] = set()
        for lane, tensor in written + ([] if traits.mutated and written else fresh):
            if id(tensor) in seen or tensor.layout is not torch.strided:
                continue
            seen.add(id(tensor))
            self._storage(tensor).writers.append(index)
            if is_measurable(tensor):
                if traits.uninitialised:
                    yield self._unmeasured(tensor, lane)
                else:
                    yield self._value(tensor, lane)

    def _value(self, tensor: Tensor, lane: int | None) -> Value:
        storage = self._storage(tensor)
        generation = len(storage.writers)
        whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        key: Any = (
            (generation, tensor.dtype)
            if whole
            else (generation, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())
        )
        known = storage.cache.get(key)
        if known is None:
            known = self._new_value(storage, tensor, lane)
            known.covers = whole
            storage.cache[key] = known
        if known.lane != lane or known.shape != tuple(tensor.shape):
            return Value(
                storage, generation, known.slot, tuple(tensor.shape), tensor.dtype, lane, whole
            )
        return known

    def _new_value(self, storage: Storage, tensor: Tensor, lane: int | None) -> Value:
        low, high = optable.extremes(tensor)
        self._low.append(low)
        self._high.append(high)
        return Value(
            storage,
            len(storage.writers),
            len(self._low) - 1,
            tuple(tensor.shape),
            tensor.dtype,
            lane,
        )

    def _unmeasured(self, tensor: Tensor, lane: int | None) -> Value:
        storage = self._storage(tensor)
        return Value(storage, len(storage.writers), -1, tuple(tensor.shape), tensor.dtype, lane)

    def value(self, tensor: Tensor) -> Value:
        """Return the value that a tensor holds now: how the caller names what failed."""
        return self._value(tensor, None)

    def finish(self) -> Trace:
        """Return the trace. Synchronises the device once."""
        return Trace(
            tuple(self._ops), _to_floats(self._low), _to_floats(self._high), self._storages
        )


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _user_line(*, stop_at_engine: bool = False) -> tuple[Any, int] | None:
    """Return (code, line) of the innermost frame that is neither torch's nor a wrapper's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if stop_at_engine and frame.f_code.co_name == "_engine_run_backward":
            return None
        if not any(part in file for part in _NOT_THE_USERS):
            return frame.f_code, frame.f_lineno
        frame = frame.f_back
    return None


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
