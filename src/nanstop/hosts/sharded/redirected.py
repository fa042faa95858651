"""Calls of a wrapped model that come to something else than its forward: Lightning's Trainer puts a
whole step of training in its place, for the time of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from nanstop.numerics.tensors import tensors
from nanstop.replay import state_diff
from nanstop.replay.undo import NOTHING, exchanged

_STEPS = {
    "train": "training_step",
    "sanity_check": "validation_step",
    "validate": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}
"""By the stage that Lightning's Trainer is in."""
_EVALUATING = frozenset({"validation_step", "test_step"})
_OF_MODULES = frozenset(vars(nn.Module()))


@contextmanager
def redirected(model: nn.Module) -> Iterator[None]:
    """Have calls of a ``model``, inside of what wraps it, come inside to what calls of the wrapper
    come to. A step of Lightning's logs nothing then, and leaves nothing in attributes of the model.
    One of an evaluation returns what it would log of the weights, too: a loss, but no accuracy.
    """
    name = _step_of(model)
    if not name:
        yield
        return
    own = vars(model)
    forward = own.get("forward", NOTHING)  # which a step may call itself

    def step(*args: Any, **kwargs: Any) -> Any:
        logged: list[Any] = []
        inside = {"forward": forward, **_logs_into(logged)}
        with state_diff.kept((own,), but=_OF_MODULES), exchanged(own, inside):
            if name not in _EVALUATING:
                return getattr(model, name)(*args, **kwargs)
            with torch.inference_mode(mode=False), torch.enable_grad():
                made = getattr(model, name)(*args, **kwargs)
            return made, [one.detach() for one in logged if one.requires_grad]

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


def _logs_into(logged: list[Any]) -> dict[str, Callable[..., None]]:
    """Return what stands in for the methods by which a step logs: tensors are kept."""

    def log(_name: Any, value: Any = None, *_args: Any, **_kwargs: Any) -> None:
        logged.extend(tensors(value))

    def log_dict(dictionary: Any, *_args: Any, **_kwargs: Any) -> None:
        logged.extend(tensors(dictionary))

    return {"log": log, "log_dict": log_dict}
