"""A window of a raw loop as a step that can be run again, and the session that it is the first
to open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanstop.hosts.loop.bare_weights import one_root
from nanstop.hosts.loop.controller import LoopController
from nanstop.hosts.loop.micro import Micro, UnseenMicro
from nanstop.hosts.loop.step import LoopStep
from nanstop.hosts.model.loaded_weights import LOADED, copied_by_hand
from nanstop.hosts.model.view import PlainView
from nanstop.hosts.replicas import OneCopy, Replicas
from nanstop.hosts.script.resumed import Restored
from nanstop.hosts.script.updates.joint import JointUpdates
from nanstop.hosts.script.window import (
    BufferGroup,
    ScriptWindow,
    beside,
    inner_module,
    update_again,
)
from nanstop.hosts.sharded.engine import NEEDS_OTHERS, is_engine
from nanstop.hosts.sharded.models import SharedModels, is_late
from nanstop.hosts.tape.pieces import accumulation_in
from nanstop.hosts.tape.taped_micro import TapedMicro
from nanstop.hosts.tape.tensors import total
from nanstop.living import living
from nanstop.measure.accounts.weight_writes import WeightWrites
from nanstop.numerics.modules import outermost
from nanstop.numerics.tensors import by_torch_alone, format_name, shape_of
from nanstop.numerics.trained import held_by
from nanstop.records import LoadFacts, SourceLine
from nanstop.session.watched_run import Writers
from nanstop.tracebacks import passes_through
from nanstop.tracing.places import Line, source_line

__tracebackhide__ = passes_through

NO_MODEL = "no model call was seen before this backward"
_PAST = "failed: the update had moved the weights before, and there was no room for a copy of them"


class Steps:
    """Makes the steps of all windows. ``updates``: how many each optimizer has made."""

    def __init__(
        self,
        controller: LoopController,
        updates: WeakKeyDictionary[Optimizer, int],
        restored: Restored,
        buffers: BufferGroup,
    ) -> None:
        self.controller = controller
        self.updates = updates
        self._restored = restored
        self._buffers = buffers
        self._shared = SharedModels("script")
        self.without_graph: WeakKeyDictionary[nn.Module, tuple[int, Line]] = WeakKeyDictionary()
        """How often a module with what could be trained was called without one, and where."""
        self.put_in_eval: WeakKeyDictionary[nn.Module, tuple[Line, bool, int]] = WeakKeyDictionary()
        """Which line put a module in evaluation mode last, whether it was called without a graph
        since, and how often that came to be so.
        """
        self._asked: WeakSet[nn.Module] = WeakSet()
        """Models of which it is known how they were loaded."""
        self.written_at: Callable[[], tuple[SourceLine, ...]] = tuple
        """Returns the lines that are known to write to gradients."""
        self.weight_writes = WeightWrites()
        self.lines_of: Callable[[Optimizer | None], dict[str, SourceLine | None]] = lambda _: {}
        """Returns the lines that made an optimizer and its schedule."""
        self._views: dict[tuple[int, ...], PlainView] = {}
        self.joint = JointUpdates(updates)

    def called_without_graph(self, module: nn.Module, line: Line) -> None:
        """Note a model call of the script that no backward can come to."""
        num, first = self.without_graph.get(module, (0, line))
        self.without_graph[module] = num + 1, first
        inner = inner_module(module)
        if inner in self.put_in_eval:
            put_at, was_called, times = self.put_in_eval[inner]
            self.put_in_eval[inner] = put_at, True, times + (not was_called)

    def put_into_eval(self, module: nn.Module, line: Line) -> None:
        """Note that the script puts a module in evaluation mode."""
        inner = inner_module(module)
        times = self.put_in_eval[inner][2] if inner in self.put_in_eval else 0
        self.put_in_eval[inner] = line, False, times

    def step(
        self, window: ScriptWindow, optimizer: Optimizer | None, parameters: Sequence[Tensor]
    ) -> LoopStep:
        optimizer = optimizer or self.optimizer_of(window, parameters)
        if optimizer is not None and not window.by_hand:
            self.controller.num_updates = self.updates.get(optimizer, 0)
        view = self._view(window, optimizer, parameters)
        self.open(window, view)
        replicas = self._shared.of_window(window.micros, window.called.values(), optimizer)
        # Of an engine's update this process has a part: none is made again.
        rates = () if window.by_engine else self.controller.note_rates(optimizer)
        if optimizer is not None:
            window.rates_of[optimizer] = rates
            if self.joint.are_any:
                for one in self.joint.of(optimizer):
                    self.controller.note_rates(one)
        return LoopStep(
            id=self.controller.step_id(),
            view=view,
            facts=self.controller.facts,
            micros=_micros(window, replicas),
            buffers=self._buffers,
            start=window.start,
            apply=partial(update_again, window),
            rates=rates,
            usual=self.controller.usual_rates,
            rates_of=window.rates_of,
            made_by=partial(self._made_by, window),
            past=_PAST if window.is_past else "",
            rewritten_at=lambda: self.written_at() if window.is_rewritten else None,
            without_graph=self.without_graph,
            put_in_eval=self.put_in_eval,
            replicas=replicas,
        )

    def _made_by(self, window: ScriptWindow, optimizer: Optimizer) -> Sequence[Optimizer]:
        """Return the optimizers that make updates of a window, as far as it is known."""
        return window.made_by if optimizer in window.made_by else self.joint.of(optimizer)

    def compare(self, window: ScriptWindow) -> None:
        """Compare the copies of its models that several ranks keep alike, after a backward."""
        at, session = self.controller.step_id(), self.controller.session
        self._shared.compare(window.called.values(), at, session, window.micros[-1].batch)

    def joined(self, original: Any, join: Any, kind: Any, *args: Any) -> Any:
        """Stand in for the end of torch's ``Join``, at which this rank waits for those that have
        batches left.
        """
        waits = kind is None and getattr(join, "_enable", True)
        with self._shared.away() if waits else nullcontext():
            return original(join, kind, *args)

    def leave(self, reason: str) -> None:
        """Have other ranks not wait for this one any more."""
        self._shared.leave(reason)

    def updating(self, window: ScriptWindow, optimizer: Optimizer) -> None:
        """Note that an optimizer is about to make the update of a window."""
        micros, called = window.micros, window.called.values()
        lines = self.written_at() if window.is_rewritten else ()
        if is_late(micros):
            lines += _made_at(micros[-1])
        self._shared.updating(called, optimizer, micros, lines)
        if self.controller.facts.world_size > 1 and not any(micro.reduced for micro in micros):
            at, session = self.controller.step_id(), self.controller.session
            self._shared.updating_past_wrapper(called, at, session, _made_at(*micros[-1:]))

    def open(self, window: ScriptWindow, view: PlainView) -> None:
        restored = self._restored.take(view)
        if view.root not in self._asked:
            self._asked.add(view.root)
            loaded = LOADED.facts(view.root) or _copied(view.root)
            restored |= {"loaded": loaded} if loaded is not None else {}
        if self.controller.session is not None:
            if restored:
                self.controller.session.learned(**restored)
            return
        first = next((m for m in window.micros if isinstance(m, TapedMicro)), None)
        autocast, inputs = None, []
        if first is not None:
            _, is_on, dtype = first.autocast
            autocast, inputs = format_name(dtype) if is_on else None, list(first.batch.values())
        written = set(map(id, self._buffers.written_weights()))
        self.controller.open(
            view,
            {name for name, p in view.root.named_parameters() if id(p) in written},
            autocast=autocast,
            clip=window.clip,
            num_micro=max(1, len(window.micros)),
            accumulation=accumulation_in(
                [m for m in window.micros if isinstance(m, TapedMicro)],
                held_by(view.optimizer),
            ),
            batch_shape=shape_of(inputs[0]) if inputs else None,
            sinks=tuple(window.sinks),
            sink_at=source_line(window.sink_at),
            loss_factor=window.loss_factor,
            updated_at=source_line(window.updated_at),
            ranks_agree=self._shared.agree(window.called.values()),
            **self.lines_of(view.optimizer),
            **restored,
            **({"veto": window.no_veto} if window.no_veto else {}),
            **_scale_to_come(window),
        )
        if self.controller.session is not None:
            self.controller.session.written_by = self._written_by

    def _written_by(self, names: Sequence[str]) -> Writers:
        """Return the lines of the script that were seen to write to each of some weights of the
        last window; those that write to gradients are found in their own step.
        """
        named = {n: p for view in self._views.values() for n, p in view.root.named_parameters()}
        if not named.keys() >= set(names):
            return ()
        return self.weight_writes.to_each([named[name] for name in names])

    def add_sinks(self, window: ScriptWindow) -> None:
        """Add to the facts what the gradients of the first window have come to after their clip."""
        is_first = self.controller.session is not None and self.controller.facts.sinks == ("clip",)
        if is_first and window.sinks[:1] == ["clip"]:
            scaled = {} if window.applied_scale is None else {"scaler": window.applied_scale}
            self.controller.learned(sinks=tuple(window.sinks), **scaled)

    def optimizer_of(self, window: ScriptWindow, parameters: Sequence[Tensor]) -> Optimizer | None:
        """Return the optimizer that updates some parameters, as far as is known."""
        called = parameters or [p for root in window.roots.values() for p in root.parameters()]
        wanted = set(map(id, called))
        for optimizer in self.updates:
            if not wanted.isdisjoint(map(id, held_by(optimizer))):
                return optimizer
        # The only one there is updates something else: that it does is a finding of its own.
        return next(iter(self.updates)) if len(self.updates) == 1 else None

    def forget(self) -> None:
        """Hold nothing of the model that was trained last."""
        self._views.clear()

    def _view(
        self, window: ScriptWindow, optimizer: Optimizer | None, parameters: Sequence[Tensor]
    ) -> PlainView:
        roots = list(window.roots.values())
        bare = beside(window, parameters)
        key = (*window.roots, *map(id, bare), id(optimizer), id(window.scaler))
        if key not in self._views:
            root, others = one_root(outermost(roots), bare), self.joint.others
            self._views = {key: PlainView(root, optimizer, window.scaler, others, self.lines_of)}
        return self._views[key]


def is_of_weights(step: LoopStep, micro: Micro) -> bool:
    """Return whether what a script has computed without gradients is of a model's weights as a loss
    is. Undone; runs forward once more.
    """
    if not isinstance(micro, TapedMicro):
        return True
    with step.isolated():
        return not micro.obstacle() and micro.is_loss()


def _micros(window: ScriptWindow, replicas: Replicas) -> Sequence[Micro]:
    """Return what of a window can be run again: nothing of an engine that the ranks cannot have
    alone.
    """
    if not isinstance(replicas, OneCopy) or not any(map(is_engine, window.called.values())):
        return window.micros or (UnseenMicro(NO_MODEL),)
    return (
        UnseenMicro(NEEDS_OTHERS, total([m.loss for m in window.micros if m.loss is not None])),
    )


def _copied(root: nn.Module) -> LoadFacts | None:
    """Return what a model lacks of weights that the script copied by itself, None without."""
    try:
        with by_torch_alone():
            return copied_by_hand(root)
    except Exception:  # objects of the script: looking at one may raise anything
        return None


def _made_at(*micros: Any) -> tuple[SourceLine, ...]:
    """Return the lines that made the losses of some micro-batches, as far as they were seen."""
    lines = (source_line(one.made_at) for one in micros if isinstance(one, TapedMicro))
    return tuple(line for line in lines if line is not None)


def _scale_to_come(window: ScriptWindow) -> dict[str, float]:
    """Return the fact of a loss scale that is not in the view: one that was left on gradients, or
    of a scaler that no loss has come to yet, for the first forward has failed.
    """
    if window.applied_scale is not None:
        return {"scaler": window.applied_scale}
    taped = [micro.loss for micro in window.micros if isinstance(micro, TapedMicro)]
    if window.scaler is not None or not taped or any(loss is not None for loss in taped):
        return {}
    made = living(torch.amp.GradScaler)
    scales = {float(one.get_scale()) for one in made if one.is_enabled()}
    return {"scaler": scales.pop()} if len(scales) == 1 else {}
