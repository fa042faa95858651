"""Modules that a step calls beside its model: a teacher, a reward model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from nanstop.replay.step import ModelView


@contextmanager
def met_beside(view: ModelView) -> Iterator[None]:
    """Tell a view of every module that is called inside and that it does not know."""
    known = {id(m) for root in (view.root, *view.beside) for m in root.modules()}

    def note(module: nn.Module, _args: Any) -> None:
        if id(module) not in known:
            known.update(id(part) for part in module.modules())
            view.met(module)

    handle = register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()
