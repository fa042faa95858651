"""What ends a training between its micro-batches: a callback that generates, a metric that calls
the model. The call of the model that the exception has left is a step of one call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from types import FrameType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

from nanstop.frozen import frozen
from nanstop.hosts import compat
from nanstop.hosts.trainer.guards.evaluation import ForwardStep
from nanstop.hosts.trainer.watched import WatchedTrainer
from nanstop.numerics.nested import mapped
from nanstop.replay.rng import note_rng
from nanstop.replay.step import Batch


@frozen
class _Call:
    """A method of a model, and what it was called with as far as its variables still hold it."""

    method: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    named: Batch

    def again(self, batch: Batch) -> Any:
        """Make it again, with other tensors where ``batch`` has some."""
        replaced = {id(old): batch[name] for name, old in self.named.items() if name in batch}
        given = mapped((self.args, self.kwargs), lambda one: replaced.get(id(one), one))
        return self.method(*given[0], **given[1])


def step_between(watch: WatchedTrainer, error: Exception) -> ForwardStep | None:
    """Return the outermost call of the trained model that an exception has left, as a step; None
    where it has left none, or other processes may have a part in it.
    """
    root = watch.host.root
    models = {*map(id, root.modules()), *map(id, compat.unwrapped(watch.trainer.model).modules())}
    call = _left_by(error, models) if watch.facts.world_size == 1 else None
    if call is None:
        return None
    return ForwardStep(
        watch.step_id(micro=0),
        watch.view,
        watch.facts,
        (call.named,),
        (None,),
        note_rng(),
        watch.host,
        call.again,
        training=root.training,
        given=SimpleNamespace(args=call.args, kwargs=call.kwargs),
    )


def _left_by(error: Exception, models: Collection[int]) -> _Call | None:
    traceback = error.__traceback__
    while traceback is not None:
        frame, traceback = traceback.tb_frame, traceback.tb_next
        first = frame.f_code.co_varnames[:1] if frame.f_code.co_argcount else ()
        owner = frame.f_locals.get(*first) if first else None
        if isinstance(owner, nn.Module) and id(owner) in models:
            method = getattr(owner, frame.f_code.co_name, None)
            return _call_of(frame, method) if callable(method) else None
    return None  # the exception was raised by something else


def _call_of(frame: FrameType, method: Callable[..., Any]) -> _Call:
    code, held = frame.f_code, frame.f_locals
    names, num = code.co_varnames, code.co_argcount
    end = num + code.co_kwonlyargcount
    rest = iter(names[end:])
    more = held.get(next(rest), ()) if code.co_flags & inspect.CO_VARARGS else ()
    named = held.get(next(rest), {}) if code.co_flags & inspect.CO_VARKEYWORDS else {}
    args = (*(held[name] for name in names[1:num] if name in held), *more)
    kwargs = {**{name: held[name] for name in names[num:end] if name in held}, **named}
    places = (*names[1:num], *(f"args.{place}" for place in range(len(more))))
    given = (*zip(places, args, strict=False), *kwargs.items())
    return _Call(method, args, kwargs, {n: v for n, v in given if isinstance(v, Tensor)})
