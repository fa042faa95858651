"""Calls of a wrapped model that come to something else than its forward: Lightning's Trainer puts a
whole step of training in its place, for the time of a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from nanstop.hosts import state_diff
from nanstop.replay.undo import NOTHING, exchanged

_STEPS = {
    "train": "training_step",
    "sanity_check": "validation_step",
    "validate": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}
"""By the stage that Lightning's Trainer is in."""
_LOGS = ("log", "log_dict")
_OF_MODULES = frozenset(vars(nn.Module()))


@contextmanager
def redirected(model: nn.Module) -> Iterator[None]:
    """Have calls of a ``model``, inside of what wraps it, come inside to what calls of the wrapper
    come to. A step of Lightning's logs nothing then, and leaves nothing in attributes of the model.
    """
    name = _step_of(model)
    if not name:
        yield
        return
    own = vars(model)
    forward = own.get("forward", NOTHING)  # which a step may call itself

    def step(*args: Any, **kwargs: Any) -> Any:
        inside = {"forward": forward, **dict.fromkeys(_LOGS, _logs_nothing)}
        with state_diff.kept((own,), but=_OF_MODULES), exchanged(own, inside):
            return getattr(model, name)(*args, **kwargs)

    with exchanged(own, {"forward": step}):
        yield


def _step_of(model: nn.Module) -> str:
    """Return the name of the method that Lightning calls a model for through its wrapper, or ""."""
    trainer: Any = getattr(model, "_trainer", None)
    strategy: Any = getattr(trainer, "strategy", None)
    redirects = hasattr(strategy, "_forward_redirection")
    # One that updates by itself would do so whenever it is run again.
    if not redirects or strategy.model is model or not getattr(model, "automatic_optimization", 0):
        return ""
    return _STEPS.get(getattr(trainer.state.stage, "value", ""), "")


def _logs_nothing(*_args: Any, **_kwargs: Any) -> None:
    pass
