"""What lies between two updates of an unchanged loop, and the modules that it calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanstop.detect.sentinel import norm_of_gradients
from nanstop.hosts.fabric import inside_fabric
from nanstop.hosts.loop.micro import Micro
from nanstop.hosts.patch_table import Table
from nanstop.hosts.sharded.engine import inside_engine
from nanstop.hosts.tape.tape_calls import Constant
from nanstop.hosts.tape.taped_micro import TapedMicro
from nanstop.measure.loss_graph import LEAST_SCALE
from nanstop.numerics.tensors import by_torch_alone, nonfinite, version
from nanstop.numerics.trained import gradients_held
from nanstop.records.facts import BY_HAND
from nanstop.replay.copies.buffers import BufferNotes
from nanstop.replay.step import ModelView
from nanstop.tracing.places import Line, user_line


class BufferGroup:
    """Buffers of several modules, noted and restored together.

    See ``replay.copies.snapshot.BufferNotes``.
    """

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[nn.Module, BufferNotes] = WeakKeyDictionary()
        self._weights: WeakKeyDictionary[nn.Module, list[int]] = WeakKeyDictionary()
        """Versions of modules' weights when they were followed first."""

    def add(self, module: nn.Module) -> Any:
        """Follow a module's buffers from now on; return their first note."""
        if module not in self._known:
            self._known[module] = BufferNotes(module)
            self._weights[module] = [version(p) for p in module.parameters()]
        return self._known[module], self._known[module].note()

    def note(self) -> list[Any]:
        return [(notes, notes.note()) for notes in self._known.values()]

    def restore(self, noted: Sequence[Any]) -> None:
        for notes, values in noted:
            notes.restore(values)

    def written_weights(self) -> list[Tensor]:
        """Return the weights that were written since their modules were followed first. No device
        work.
        """
        return [
            p
            for module, before in self._weights.items()
            for p, at in zip(module.parameters(), before, strict=False)
            if version(p) != at
        ]

    def tensors(self) -> list[Tensor]:
        return [one for notes in self._known.values() for one in notes.tensors()]

    def spoilt(self, noted: Sequence[Any]) -> bool:
        return any(notes.spoilt(values) for notes, values in noted)

    def kept(self, *noted: Sequence[Any]) -> AbstractContextManager[None]:
        return self._within(BufferNotes.kept, noted)

    def rewritten(self, *noted: Sequence[Any]) -> AbstractContextManager[None]:
        return self._within(BufferNotes.rewritten, noted)

    @contextmanager
    def _within(self, context: Callable[..., Any], noted: Sequence[Any]) -> Iterator[None]:
        with ExitStack() as scope:
            for notes in list(self._known.values()):
                own = [values for each in noted for known, values in each if known is notes]
                scope.enter_context(context(notes, *own))
            yield


class RootSearch:
    """Looks at every model call until it ends: those that the loop itself makes are roots.

    ``stand_in`` looks. ``num_inside``: updates that were made inside of a call of something;
    ``loops``: modules whose own call is a training, by their ids: what that calls are the roots.
    """

    def __init__(self, table: Table) -> None:
        self.stand_in: Callable[..., Any]
        self._table = table
        self.goes_on = False
        self.num_inside = 0
        self.loops: dict[int, ref[nn.Module]] = {}

    def update_inside(self) -> None:
        """Note an update that is made inside of a call."""
        if not torch.compiler.is_compiling():  # a number that moves is compiled anew each time
            self.num_inside += 1

    def hold_loop(self, module: nn.Module) -> None:
        """Have the calls that a module makes be looked at, and no longer its own."""
        key, loops = id(module), self.loops
        loops[key] = ref(module, lambda _: loops.pop(key, None))
        self.begin()

    def begin(self) -> None:
        if not self.goes_on:
            self.goes_on = True
            self._table.replace(nn.Module, "__call__", self.stand_in)

    def end(self) -> None:
        if self.goes_on:
            self.goes_on = False
            self._table.restore(nn.Module, "__call__")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Have modules' own ``__call__`` inside a root: compiled code must not see another one."""
        goes_on = self.goes_on
        self.end()
        try:
            yield
        finally:
            if goes_on:
                self.begin()


@dataclass(slots=True)
class ScriptWindow:
    """``judged``: ids of parameters whose gradients were looked at.

    ``closed``: an update has ended it. ``called``: the roots as the script calls them, wrapped.

    ``no_veto``: why that update cannot be left out. ``by_hand``: it is made by the script, without
    an optimizer; ``is_asked``: of gradients that it has asked for; ``by_engine``: by DeepSpeed's
    engine, as a whole. ``clips``: what clips the gradients as the script did, in turn. ``sinks``,
    ``loss_factor``: see ``RunFacts``; ``sink_at``: the line of the first; ``updated_at``: that asks
    for the update, of the first window. ``applied_scale``: the loss scale that was on the gradients
    of an update. ``gradients``: marks of them as the last backward or sink left them;
    ``is_rewritten``: whether the script itself has written to them since then, or before that in
    this window. ``is_written``: no backward has made them, the script has. ``made_by``: optimizers
    that have made an update of them, in turn; ``rates_of``: the learning rates that each was judged
    with.
    """

    micros: list[Micro] = field(default_factory=list)
    roots: dict[int, nn.Module] = field(default_factory=dict)
    called: dict[int, nn.Module] = field(default_factory=dict)
    start: list[Any] = field(default_factory=list)
    judged: set[int] = field(default_factory=set)
    scaler: Any = None
    clip: float | None = None
    clips: list[Callable[[], object]] = field(default_factory=list)
    failed: bool = False
    vetoed: bool = False
    closed: bool = False
    no_veto: str = ""
    by_hand: bool = False
    is_asked: bool = False
    by_engine: bool = False
    sinks: list[str] = field(default_factory=list)
    sink_at: Line = None
    loss_factor: float | None = None
    updated_at: Line = None
    applied_scale: float | None = None
    is_past: bool = False
    gradients: list[Any] | None = None
    is_rewritten: bool = False
    is_written: bool = False
    made_by: list[Optimizer] = field(default_factory=list)
    rates_of: dict[Optimizer, tuple[Any, ...]] = field(default_factory=dict)

    def add(self, module: nn.Module, buffers: BufferGroup) -> None:
        """Have a model be one that is called in it, and follow its buffers."""
        inner = inner_module(module)
        if module is not inner or id(inner) not in self.called:
            self.called[id(inner)] = module  # a call of what is wrapped does not undo the wrapper's
        if id(inner) not in self.roots:
            self.roots[id(inner)] = inner
            self.follow(inner, buffers)

    def follow(self, module: nn.Module, buffers: BufferGroup) -> None:
        """Follow the buffers of a module that is called in it."""
        noted = buffers.add(module)
        if all(notes is not noted[0] for notes, _ in self.start):
            self.start.append(noted)

    def is_bad(self, norm: Tensor | None, parameters: Sequence[Tensor]) -> bool:
        """Return whether a loss or a gradient of ``parameters`` is not finite: the norm of finite
        ones may be infinite. Synchronises the device.
        """
        values = (norm, *(micro.loss for micro in self.micros))
        bad = nonfinite({str(at): value for at, value in enumerate(values)})
        if bad != ("0",):
            return bool(bad)
        return bool(nonfinite({str(at): p.grad for at, p in enumerate(parameters)}))

    def is_still_scaled(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether the gradients of ``parameters`` are as the backward of a scaled loss has
        left them.
        """
        if self.scaler is None or "unscale" in self.sinks or self.is_rewritten:
            return False
        return bool(self.gradients) and any(p.grad is not None for p in parameters)

    def let_go_of_scaler(self, parameters: Sequence[Tensor]) -> bool:
        """Forget the scaler where an update takes gradients that are still scaled; return whether
        it does.

        It has no part in that.

        It leaves out none, and a replay must not go through it. What a clip has looked at before is
        to be judged anew: an overflow was left to the scaler.
        """
        if not self.is_still_scaled(parameters):
            return False
        self.note("update")
        self.applied_scale, self.scaler = float(self.scaler.get_scale()), None
        return True

    def forget_cleared(self) -> None:
        """Forget the backwards of the open window where a call has thrown all their gradients away:
        they belong to no update. A script that sets them to None itself may have added them up.
        """
        if not self.micros or self.closed or self.judged:
            return
        held = (p for root in self.roots.values() for p in root.parameters())
        if any(p.grad is not None for p in held):
            return
        self.micros, self.clips = [], []
        self.gradients, self.is_rewritten = None, False

    def updated_by_hand(self) -> None:
        """Note that the script makes the update itself: it cannot be left out."""
        self.by_hand, self.no_veto = True, BY_HAND

    def note_clip(self, parameters: Sequence[Tensor], clip: Callable[[], object]) -> None:
        """Note that gradients are clipped, and as a sink unless the script had unscaled them by
        hand.
        """
        self.clips.append(clip)
        if self.scaler is None or self.sinks or self.is_still_scaled(parameters):
            self.note("clip")

    def note_scale(self, losses: Sequence[Tensor]) -> None:
        """Note a loss that the script has multiplied itself. No device work."""
        factor = scale_by_hand(losses)
        if factor is not None:
            self.loss_factor = factor
            self.note("scale")

    def note(self, sink: str) -> None:
        """Add a sink that the gradients have come to, each once, and note the line of the first."""
        if sink not in self.sinks:
            self.sink_at = self.sink_at or user_line()
            self.sinks.append(sink)


def scale_by_hand(losses: Sequence[Tensor]) -> float | None:
    """Return the large number that a loss was multiplied by last of all, None where it was not.

    Asked before its backward; no device work.
    """
    for loss in losses:
        node = loss.grad_fn
        if node is None or node.name() != "MulBackward0":
            continue
        factor = getattr(node, "_saved_other", None)
        if not isinstance(factor, Tensor) or factor.requires_grad:  # no setting of a script
            continue
        if factor.dim() == 0 and factor.device.type == "cpu":
            return float(factor) if abs(float(factor)) >= LEAST_SCALE else None
    return None


def beside(window: ScriptWindow, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return what is trained and no part of the models that were called: all of it where none was,
    else what a loop without an optimizer asks for gradients of, and weights that are given to a
    model for its own. An input that has a gradient as well is none.
    """
    if not window.roots:
        return parameters
    taped = [micro for micro in window.micros if isinstance(micro, TapedMicro)]
    given = {id(one) for micro in taped if micro.gives_weights for one in micro.given_weights()}
    if not given and not window.is_asked:
        return ()
    own = {id(p) for root in window.roots.values() for p in root.parameters()}
    return [p for p in parameters if id(p) not in own and (window.is_asked or id(p) in given)]


def on_one_rank(module: nn.Module) -> nn.Module:
    """Return the module inside DDP or DeepSpeed's engine: a replay on one rank must not wait for
    the others.
    """
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return module.module
    return inside_engine(module)


def inner_module(module: nn.Module) -> nn.Module:
    """Return the module that the script wrote, inside DDP, an engine, Fabric's wrapper and
    ``torch.compile``: findings name its parts.
    """
    module = inside_fabric(on_one_rank(module))
    compiled = module._modules.items()  # TorchScript holds them in no dict
    return next(
        (part for name, part in compiled if name == "_orig_mod" and part is not None), module
    )


def is_trainable(module: nn.Module) -> bool:
    """Return whether a module has weights to train. One that a script has given what it computed
    of other weights in their place has none: it is a function of those.
    """
    with by_torch_alone():
        return any(p.requires_grad and p.is_leaf for p in module.parameters())


def has_parameters(module: nn.Module) -> bool:
    # A model's own ``parameters`` may return a list, which is iterated over as well.
    return next(iter(module.parameters()), None) is not None


def has_buffers(module: nn.Module) -> bool:
    return next(module.buffers(), None) is not None


def device_of(module: nn.Module) -> str:
    return next(p.device.type for p in module.parameters())


def norm_of(
    parameters: Sequence[Tensor], norm_type: float = 2.0, foreach: bool | None = None
) -> Tensor | None:
    """Return the norm as ``clip_grad_norm_`` computes it, or None without gradients."""
    gradients = gradients_held(parameters)
    return norm_of_gradients(gradients, norm_type, foreach) if gradients else None


def clip_norm(
    parameters: Sequence[Tensor], max_norm: float, norm_type: float, foreach: bool | None
) -> None:
    """Clip gradients as ``clip_grad_norm_`` does, whoever has replaced that."""
    norm = norm_of(parameters, norm_type, foreach)
    if norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach)


def update_again(window: ScriptWindow, view: ModelView) -> None:
    """Unscale and clip the gradients of a window as the script did, and update by them: with the
    optimizers that have done so, or with the one that is to come.
    """
    scaler, optimizer = view.scaler, view.optimizer
    assert optimizer is not None
    made = window.made_by if optimizer in window.made_by else [optimizer]
    if scaler is not None:
        for one in made:
            scaler.unscale_(one)
    for clip in window.clips:
        clip()
    for one in made:
        (one.step if scaler is None else partial(scaler.step, one))()


def window_of(micro: Micro, called: Iterable[nn.Module], buffers: BufferGroup) -> ScriptWindow:
    """Return a window of one micro-batch that has called some models, whose buffers are noted."""
    roots = {id(root): root for root in map(inner_module, called)}
    return ScriptWindow(micros=[micro], roots=roots, start=[*map(buffers.add, roots.values())])


def models_in(micro: TapedMicro) -> list[nn.Module]:
    """Return the models whose calls a micro-batch needs."""
    called = (call.function for call in micro.tape.needed())
    return [one for one in called if isinstance(one, nn.Module)]


def read_by(micro: TapedMicro, models: Iterable[nn.Module]) -> list[nn.Module]:
    """Return those of some models of which a micro-batch reads weights: the script has called what
    is wrapped in what it trains by, or a part of it.
    """
    held = (one.tensor for call in micro.tape.needed() for one in call.held(Constant))
    read = set(map(id, held))
    return [one for one in models if any(id(p) in read for p in one.parameters())]


def clip_by(
    parameters: Sequence[Tensor], max_norm: float, foreach: bool | None, norm: Tensor
) -> None:
    """Clip gradients by the norm that they have, as ``clip_grad_norm_`` does."""
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach)
