"""Callbacks of transformers and TRL.

The classes that others build on, which of them only report, what is added to the reports, and which
of them write to weights between an update and the next forward.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import compress, repeat
from operator import attrgetter, methodcaller
from typing import Any, cast

from torch import Tensor, nn
from transformers import integrations
from transformers.trainer_callback import (
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
)

from nanstop.frozen import frozen
from nanstop.hosts.patching import Patches
from nanstop.hosts.trackers import (
    Send,
    to_mlflow,
    to_tensorboard,
    to_trackio,
    to_wandb,
)
from nanstop.numerics.tensors import by_torch_alone
from nanstop.own_code import is_class_of
from nanstop.records import SourceLine
from nanstop.replay.conditions import is_compiling
from nanstop.session.watched_run import Writers
from nanstop.tracebacks import passes_through
from nanstop.tracing.places import source_line

__all__ = [
    "CallbackWrites",
    "Trackers",
    "TrainerCallback",
    "is_reporting",
    "is_tracker",
    "is_users",
]
__tracebackhide__ = passes_through

_log = logging.getLogger("nanstop")
_DATA: Any = Tensor.data
_VERSION, _ADDRESS = attrgetter("_version"), methodcaller("data_ptr")
_Marks = tuple[list[Any], list[Any], list[Any]]
_AMID_WINDOW = frozenset({"on_substep_end", "on_pre_optimizer_step"})
"""Events that find gradients which an update is still to take."""

_SHOWN_ELSEWHERE = ("NotebookProgressCallback", "RichProgressCallback")
"""Progress by means that need a notebook or `rich`: importing their modules would need them,
too.
"""


def is_reporting(callback: Any) -> bool:
    """Return whether a callback does nothing but show what a run logs, or send it to a service."""
    kind = type(callback)
    return (
        isinstance(callback, (PrinterCallback, ProgressCallback))
        or (kind.__name__ in _SHOWN_ELSEWHERE and is_class_of(kind, "transformers", "trl"))
        or is_tracker(callback)
    )


def is_tracker(callback: Any) -> bool:
    """Return whether a callback sends what a run logs to a service, or into its files."""
    return is_class_of(type(callback), integrations.__name__)


class Trackers:
    """Adds ``numbers`` to the training logs that a trainer's trackers are given, and to nothing
    else: the trainer's own logs, its table and its console stay as they are.
    """

    def __init__(self, numbers: Callable[[], Mapping[str, float]]) -> None:
        self._numbers = numbers
        self._trainer: Any = None
        self._patches = Patches()

    def begin(self, trainer: Any) -> None:
        """Have the trackers of a training get the numbers with each log, and no more those of an
        earlier training.
        """
        self.end()
        self._trainer = trainer
        for callback in self._trackers():
            sent = partial(self._sent, callback.on_log)
            self._patches.set(callback, "on_log", sent)

    def end(self) -> None:
        """Leave every tracker as it was."""
        self._patches.undo()

    def sends(self) -> Iterator[tuple[str, Send]]:
        """Yield what gives an incident to each tracker that has a run now, with its name."""
        if not self._trainer.is_world_process_zero():
            return
        for callback in self._trackers():
            for kind, sending in _SENDS.items():
                if isinstance(callback, getattr(integrations, kind, ())):
                    send = sending(callback)
                    if send is not None:
                        yield kind, send

    def _trackers(self) -> Iterator[Any]:
        return filter(is_tracker, self._trainer.callback_handler.callbacks)

    def _sent(
        self, on_log: Callable[..., Any], args: Any, state: Any, control: Any, **about: Any
    ) -> Any:
        logs = about.get("logs")
        if logs and "loss" in logs:
            about["logs"] = {**logs, **self._numbers()}
        return on_log(args, state, control, **about)


def _of_mlflow(callback: Any) -> Send | None:
    run = callback._ml_flow.active_run()
    return to_mlflow(callback._ml_flow.MlflowClient(), run.info.run_id) if run else None


_SENDS: Mapping[str, Callable[[Any], Send | None]] = {
    "WandbCallback": lambda one: to_wandb(one._wandb.run) if one._wandb.run else None,
    "TensorBoardCallback": lambda one: to_tensorboard(one.tb_writer) if one.tb_writer else None,
    "MLflowCallback": _of_mlflow,
    "TrackioCallback": lambda one: to_trackio(one._trackio),
}
"""How each of transformers' own integrations is given an incident, None while it has no run."""


def is_users(callback: Any) -> bool:
    """Return whether a callback may change a training: the user's own, or early stopping."""
    library = is_class_of(type(callback), "transformers", "trl", "nanstop")
    return isinstance(callback, EarlyStoppingCallback) or not library


@frozen
class _Write:
    names: frozenset[str]
    by: SourceLine


class _Aliases:
    """Notes what a script reads as ``tensor.data`` while it is on: the same memory, whose writes
    the tensor counts no version of, but the alias and its views do.

    The class has the attribute of its own then. A function mode would hear of it, too, but torch
    has other kernels in evaluation where one is on (``nn.TransformerEncoderLayer``).
    """

    def __init__(self) -> None:
        self.is_on = False
        self._read: list[tuple[Tensor, Tensor]] = []
        self._kept: list[tuple[weakref.ref[Tensor], weakref.ref[Tensor], int]] = []

    @property
    def are_any(self) -> bool:
        """Whether there is an alias to ask about."""
        return bool(self._read or self._kept)

    def forget(self) -> None:
        """Know of no alias any more."""
        self._read, self._kept = [], []

    def start(self) -> None:
        """Note what is read from now on."""
        if "data" not in vars(Tensor):
            cast("Any", Tensor).data = property(self._seen, _DATA.__set__)
            self.is_on = True

    def stop(self) -> None:
        """Note nothing any more."""
        if self.is_on:
            del Tensor.data
            self.is_on = False

    def _seen(self, tensor: Tensor) -> Tensor:
        alias = _DATA.__get__(tensor)
        self._read.append((tensor, alias))
        return alias

    def written(self) -> set[int]:
        """Return the ids of tensors that were written to by an alias since this was asked last;
        aliases that are held elsewhere stay known. No device work.
        """
        kept = [(tensor(), alias(), seen) for tensor, alias, seen in self._kept]
        known = [*kept, *((tensor, alias, 0) for tensor, alias in self._read)]
        self._read, self._kept, found = [], [], set[int]()
        with by_torch_alone():
            for tensor, alias, seen in known:
                if tensor is None or alias is None:
                    continue
                now = _VERSION(alias)
                self._kept.append((weakref.ref(tensor), weakref.ref(alias), now))
                if now != seen:
                    found.add(id(tensor))
        return found


class CallbackWrites:
    """Marks the trained weights before and after each method of a callback that is not
    transformers' own: a write counts their versions up, or puts other memory in their place; what
    is written through ``weight.data`` is known by the version of that, unless the process compiles
    code, which is to have torch's own attribute. Nothing is read of what they hold.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._weights: list[Tensor] = []
        self._writes: list[_Write] = []
        self._before: dict[SourceLine, frozenset[str]] = {}
        self.rewritten_at: Writers = ()
        """What has written to the gradients of the present window, in order and each once."""
        self._aliases = _Aliases()

    def begin(self, root: nn.Module) -> None:
        """Watch the weights of a training that begins. No device work."""
        trained = [(n, p) for n, p in root.named_parameters() if type(p) is nn.Parameter]
        self._names = [name for name, p in trained if p.requires_grad]
        self._weights = [p for _, p in trained if p.requires_grad]
        self._writes, self._before = [], {}

    def end(self) -> None:
        """Hold nothing of the training any more."""
        self._names, self._weights, self._writes = [], [], []
        self._before, self.rewritten_at = {}, ()
        self._aliases.forget()

    def updating(self) -> None:
        """Keep of what was written before an update who has written to which weights."""
        for write in self._writes:
            self._before[write.by] = self._before.get(write.by, frozenset()) | write.names
        self._writes.clear()

    def to_each(self, names: Sequence[str]) -> Writers:
        """Return the methods that have written since the last update to any of some weights, in
        order and each once, or where these have not written to each of them, those that ever have:
        what no batch reads is found late. () where one was written by none of them.
        """
        earlier = [_Write(those, by) for by, those in self._before.items()]
        for writes in (self._writes, [*earlier, *self._writes]):
            found = [write for write in writes if not write.names.isdisjoint(names)]
            if set(names) <= {name for write in found for name in write.names}:
                return tuple(dict.fromkeys(write.by for write in found))
        return ()

    def heard(self, handler: Any, call: Any, event: str, *args: Any, **kwargs: Any) -> Any:
        """Have a callback handler ``call`` an ``event`` of its callbacks, one marked after the
        other.
        """
        plain = handler.callbacks
        is_watched = self._weights or event == "on_train_begin"
        if not is_watched or not any(map(_own_method, map(type, plain), repeat(event))):
            return call(event, *args, **kwargs)
        handler.callbacks = marked = _Marked(plain, event, self)
        try:
            return call(event, *args, **kwargs)
        finally:
            if self._aliases.is_on:  # a method has raised
                self._aliases.stop()
            plain[:] = list.__iter__(marked)  # one may have been added, or taken out
            handler.callbacks = plain

    def marks(self, event: str) -> _Marks | None:
        """Return what differs once a weight was written, or in the midst of a window a gradient;
        None where that cannot be told.
        """
        weights = self._weights
        try:
            with by_torch_alone():
                gradients = map(_mark, weights) if event in _AMID_WINDOW else ()
                versions, addresses = map(_VERSION, weights), map(_ADDRESS, weights)
                return list(versions), list(addresses), list(gradients)
        except Exception as error:  # a tensor of another make
            _log.debug("writes of callbacks are not seen: %s", error)
            self.end()
            return None

    def calling(self, event: str) -> _Marks | None:
        """Return the marks before a method of a callback, which is about to be called."""
        if not is_compiling():
            self._aliases.start()
        return self.marks(event)

    def called(self, callback: Any, event: str, before: _Marks | None) -> None:
        """Note what a method of a callback has written: what is marked otherwise ``before`` it."""
        self._aliases.stop()
        now = self.marks(event)
        written = self._aliases.written() if self._aliases.are_any else set[int]()
        found = _method_of(callback, event) if written or now != before else None
        if before is None or now is None or found is None:
            return
        weights = zip(self._weights, *before[:2], *now[:2], strict=True)
        is_written = [
            id(p) in written or (version, address) != (new, there)
            for p, version, address, new, there in weights
        ]
        if any(is_written):
            names = frozenset(compress(self._names, is_written))
            self._writes.append(_Write(names, found))
        is_regraded = now[2] != before[2] or any(m is not None and m[0] in written for m in now[2])
        if is_regraded and found not in self.rewritten_at:
            self.rewritten_at += (found,)


def _mark(weight: Tensor) -> tuple[int, int] | None:
    """Return what differs of a weight's gradient once it was written."""
    grad = weight.grad
    return None if grad is None else (id(grad), _VERSION(grad))


class _Marked(list[Any]):
    """The callbacks of a handler, which calls each as it goes through them."""

    def __init__(self, callbacks: Sequence[Any], event: str, writes: CallbackWrites) -> None:
        super().__init__(callbacks)
        self._event, self._writes = event, writes

    def __iter__(self) -> Iterator[Any]:
        for callback in super().__iter__():
            if _own_method(type(callback), self._event) is None:
                yield callback
                continue
            before = self._writes.calling(self._event)
            yield callback
            self._writes.called(callback, self._event, before)


def _method_of(callback: Any, event: str) -> SourceLine | None:
    """Return where a callback's own method for an event stands, under its name."""
    line = _own_method(type(callback), event)
    found = source_line((line, line.co_firstlineno))
    return found and replace(found, function=f"{type(callback).__name__}.{event}")


@lru_cache(maxsize=1024)  # asked of each callback at each event of a step
def _own_method(kind: type, event: str) -> Any:
    """Return the code of a callback class's method for an event, None where it has none of its own
    or is of transformers.
    """
    if is_class_of(kind, "transformers", "nanstop"):
        return None
    method: Callable[..., Any] | None = getattr(kind, event, None)
    code = getattr(method, "__code__", None)
    nothing = getattr(getattr(TrainerCallback, event, None), "__code__", None)
    return None if code is nothing else code
