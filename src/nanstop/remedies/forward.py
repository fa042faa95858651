"""Another format for a module's forward:
callables that stand in for ``module.forward`` on the instance.

They stay behind when their module is copied or pickled, keep the signature of what they wrap, leave
parameters, state_dict and optimizer untouched, and are entered again when gradient checkpointing
recomputes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nanstop.numerics.tensors import HALF
from nanstop.replay.function_modes import FunctionMode
from nanstop.replay.held import awake, round_into
from nanstop.replay.stand_in import standing_in
from nanstop.replay.undo import attributes_kept
from nanstop.tracebacks import passes_through

__tracebackhide__ = passes_through

Forward = Callable[..., Any]
FORMATS_CLASH = re.compile(
    r"same dtype|expected scalar type|dtype mismatch|must match.*dtype", re.IGNORECASE
)
"""What torch says of an operation whose operands are of two formats."""


@contextmanager
def forward_replaced(module: nn.Module, wrapper: Wrapper) -> Iterator[None]:
    """Let ``wrapper`` be called in place of ``module.forward``; what stood on the instance is
    put back on exit.
    """
    wrapper.bind(module, module.forward)
    with standing_in(module, "forward", _method_for(wrapper)):
        yield


def wrapper_of(forward: Any) -> Wrapper | None:
    """Return the wrapper that is called in place of a module's forward, the outermost, if there
    is one.
    """
    return getattr(forward, "wrapper", None)


def lies_in_island(module: nn.Module, *, below: bool = False) -> bool:
    """Return whether a module computes in float32 and emits that, by a remedy that is in force.

    ``below``: whether it is enough that a module around it does.
    """
    wrapper = wrapper_of(module.forward)
    while wrapper is not None:
        if isinstance(wrapper, Float32Forward) and not wrapper.narrow:
            return below or not isinstance(wrapper, Float32Recompute)
        wrapper = wrapper_of(wrapper.inner)
    return False


def _method_for(wrapper: Wrapper) -> Forward:
    """Return what calls the wrapper: a method, or a function where one stands on the instance.

    It looks like what it stands for to those who take methods apart: ``inspect`` follows
    ``__wrapped__`` (Trainer reads column names so), ``torch.jit.script`` reads that source and
    looks names up in the globals.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # the globals of this frame are the script's
        return wrapper(*args, **kwargs)

    def method(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # the globals of this frame are the script's
        return wrapper(*args, **kwargs)

    inner: Any = wrapper.inner
    bound = getattr(inner, "__self__", None) is wrapper.module
    made, stood_for = (method, inner.__func__) if bound else (forward, inner)
    known = getattr(stood_for, "__globals__", made.__globals__)
    function = FunctionType(made.__code__, known, "forward", None, made.__closure__)
    functools.update_wrapper(function, stood_for)
    vars(function).update(wrapper=wrapper)
    return MethodType(function, wrapper.module) if bound else function


def callable_modules(root: nn.Module) -> Iterator[nn.Module]:
    """Yield ``root`` and the modules below it, without the containers that have no forward."""
    return filter(is_callable, root.modules())


def is_callable(module: nn.Module) -> bool:
    """Return whether a module has a forward of Python's: a container has none, and that of
    TorchScript is compiled.
    """
    is_compiled = isinstance(module, torch.jit.ScriptModule)
    return not is_compiled and type(module).forward is not nn.Module.forward


_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", bool)
"""Whether ``torch.export`` is looking (torch 2.7 and later can say so)."""


class Wrapper:
    """Calls the forward that it wraps, with what is held awake;
    subclasses say in what further circumstances.

    What is traced or exported is the script's own forward, where its tensors are at rest: the graph
    leaves the process. ``is_compiled``: whether ``torch.compile`` has made the circumstances part
    of its code.
    """

    module: nn.Module
    inner: Forward
    is_compiled = False

    def bind(self, module: nn.Module, inner: Forward) -> None:
        """Take the module and the forward that this one stands in front of."""
        self.module = module
        self.inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch._C._get_tracing_state() is not None or _is_exporting():
            run = self.call if self.is_wide() else self.inner
            return run(*args, **kwargs)
        if torch.compiler.is_compiling():
            self.is_compiled = True
            return self.call(*args, **kwargs)
        with awake(self.module):
            return self.call(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward that it wraps in the circumstances of this wrapper:
        what is held is awake.
        """
        return self.inner(*args, **kwargs)

    def is_wide(self) -> bool:
        """Return whether the wrapped forward cannot do without:
        what it computes with is in another format now.
        """
        return False


class Float32Forward(Wrapper):
    """Float32 inside: inputs, parameters and buffers are cast on call, autocast is off.

    ``narrow``: emit floating outputs in the format of the first floating input (of the parameters
    where the inputs are ids). Else they stay as they come, float32.
    """

    def __init__(self, device_type: str, *, narrow: bool) -> None:
        self.device_type = device_type
        self.narrow = narrow

    def call(self, *args: Any, **kwargs: Any) -> Any:
        emitted = entry_format(args, kwargs) or parameter_format(self.module)
        args, kwargs = pytree.tree_map(widened, (args, kwargs))
        with torch.autocast(self.device_type, enabled=False), float32_inside(self.module):
            outputs = self.inner(*args, **kwargs)
        return cast_floats(outputs, emitted) if self.narrow and emitted else outputs


class Float32Recompute(Float32Forward):
    """For modules below an island:
    float32 when checkpointing re-enters them in backward, past the island's own call.
    """

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:
            return self.inner(*args, **kwargs)
        return super().call(*args, **kwargs)


class WideOwnerForward(Wrapper):
    """For a module some of whose parameters became float32:
    inputs and its other own parameters follow.

    Emits what it emitted before: the format of its input, or for ids ``emitted``; float32 where
    an island of its own was in force. Under an autocast to another format than the weights had,
    what was emitted depended on the operation: float32 weights are left to that autocast.
    """

    def __init__(self, device_type: str, stored: torch.dtype) -> None:
        self.device_type = device_type
        self.stored = self.emitted = stored
        self.is_island = False

    def bind(self, module: nn.Module, inner: Forward) -> None:
        self.is_island = lies_in_island(module)
        if lies_in_island(module, below=True):
            self.emitted = torch.float32
        super().bind(module, inner)

    def is_wide(self) -> bool:
        return any(p is not None and p.dtype not in HALF for p in self.module._parameters.values())

    @contextmanager
    def emitting(self, dtype: torch.dtype) -> Iterator[None]:
        """Emit ``dtype`` for ids meanwhile: inside an island nothing is narrow."""
        with attributes_kept([(self, "emitted")]):
            self.emitted = dtype
            yield

    def call(self, *args: Any, **kwargs: Any) -> Any:
        device = self.device_type
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != self.stored:
            return self.inner(*args, **kwargs)
        entry = entry_format(args, kwargs) or self.emitted
        args, kwargs = pytree.tree_map(widened, (args, kwargs))
        with float32_inside(self.module, recurse=False):
            outputs = self.inner(*args, **kwargs)
        wide = self.is_island or entry == torch.float32
        return outputs if wide else cast_floats(outputs, entry)


class MeetsWide(Wrapper):
    """For a module of half weights that an island's float32 may come to: what would raise for that
    is computed as an autocast has it, in the format of the weights. Nothing else is touched.
    """

    def call(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.inner(*args, **kwargs)
        except RuntimeError as error:
            dtype = parameter_format(self.module)
            if dtype is None or not FORMATS_CLASH.search(str(error)):
                raise
        return self.inner(*cast_floats(args, dtype), **cast_floats(kwargs, dtype))


class AutocastForward(Wrapper):
    """Runs under an autocast of its own."""

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self.device_type = device_type
        self.dtype = dtype

    def call(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device_type, dtype=self.dtype):
            return self.inner(*args, **kwargs)


class AutocastOverride(Wrapper):
    """Where the host's autocast to ``replaced`` is on, autocasts to ``dtype`` (None: not at all).

    Meant for every module: the host may enter its autocast inside of the root's forward. The weight
    cache is off, because it would hand out copies in the host's format.
    """

    def __init__(
        self, device_type: str, replaced: frozenset[torch.dtype], dtype: torch.dtype | None
    ) -> None:
        self.device_type = device_type
        self.replaced = replaced
        self.dtype = dtype

    def call(self, *args: Any, **kwargs: Any) -> Any:
        device = self.device_type
        if not torch.is_autocast_enabled(device):
            return self.inner(*args, **kwargs)
        if torch.get_autocast_dtype(device) not in self.replaced:
            return self.inner(*args, **kwargs)
        enabled = self.dtype is not None
        with torch.autocast(device, dtype=self.dtype, enabled=enabled, cache_enabled=False):
            return self.inner(*args, **kwargs)


class WithoutAutocast(FunctionMode):
    """Calls torch's functions without an autocast to ``replaced`` formats, whoever is in one: a
    forward of its own, the loss, a call that is played again.
    """

    def __init__(self, device_type: str, replaced: frozenset[torch.dtype]) -> None:
        super().__init__()
        self._device_type = device_type
        self._replaced = replaced

    def handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        device = self._device_type
        on = torch.is_autocast_enabled(device)
        if not on or torch.get_autocast_dtype(device) not in self._replaced:
            return func(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return func(*args, **kwargs)


class InputCast(Wrapper):
    """Casts inputs of the formats ``replaced`` to ``dtype``."""

    def __init__(self, replaced: frozenset[torch.dtype], dtype: torch.dtype) -> None:
        self.replaced = replaced
        self.dtype = dtype

    def is_wide(self) -> bool:
        return not any(p.dtype in self.replaced for p in self.module.parameters())

    def call(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map(self.cast, (args, kwargs))
        return self.inner(*args, **kwargs)

    def cast(self, value: Any) -> Any:
        """Return a tensor of a replaced format in ``dtype``, anything else as it is."""
        chosen = isinstance(value, Tensor) and value.dtype in self.replaced
        return value.to(self.dtype) if chosen else value


@contextmanager
def float32_inside(module: nn.Module, *, recurse: bool = True) -> Iterator[None]:
    """Let a module (and those below it) see its half-precision parameters and buffers as float32
    casts.

    Gradients flow through the casts to the parameters. A buffer changed in place is written back
    (this synchronises the device). Quantized layers keep their packed weight and compute in
    float32.
    """
    casts: dict[int, Tensor] = {}
    with ExitStack() as undo:
        for part in module.modules() if recurse else (module,):
            packed = computing_in(part, undo)
            held: tuple[Any, ...] = (part._parameters, part._buffers)
            for slots in held:
                for name, value in slots.items():
                    if value is None or value.dtype not in HALF or (packed and name == "weight"):
                        continue
                    cast = casts.setdefault(id(value), value.float())
                    undo.callback(_put_back, slots, name, value, cast)
                    slots[name] = cast
        yield


def computing_in(layer: nn.Module, undo: ExitStack, dtype: torch.dtype = torch.float32) -> bool:
    """Let a bitsandbytes 4-bit layer compute in ``dtype`` until ``undo`` closes;
    False for any other module.
    """
    attributes = vars(layer)
    if not attributes.keys() >= {"compute_dtype", "compute_type_is_set"}:
        return False
    before = {name: attributes[name] for name in ("compute_dtype", "compute_type_is_set")}
    undo.callback(attributes.update, before)
    attributes.update(compute_dtype=dtype, compute_type_is_set=True)
    return True


def _put_back(slots: dict[str, Any], name: str, value: Tensor, cast: Tensor) -> None:
    if slots[name] is cast:
        slots[name] = value
        if not isinstance(value, nn.Parameter):
            round_into(
                value, cast
            )  # running statistics; kernels that write them move no version counter


def widened(value: Any) -> Any:
    """Return half-precision tensors as float32, anything else as it is."""
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF else value


def cast_floats(outputs: Any, dtype: torch.dtype) -> Any:
    """Return ``outputs`` with every floating tensor in ``dtype``."""
    return pytree.tree_map(
        lambda value: (
            value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        ),
        outputs,
    )


def entry_format(args: Any, kwargs: Any) -> torch.dtype | None:
    """Return the format of the first floating tensor among the inputs, or None."""
    leaves = pytree.tree_leaves((args, kwargs))
    return next(
        (leaf.dtype for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()),
        None,
    )


def parameter_format(module: nn.Module) -> torch.dtype | None:
    """Return the format of the first half-precision parameter, or None."""
    return next((p.dtype for p in module.parameters() if p.dtype in HALF), None)
