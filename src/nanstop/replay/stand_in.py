"""Attributes that stand in on a module and that none of its copies has.

A pickle, ``copy.deepcopy`` and ``copy.copy`` of a module ask the instance for ``__getstate__``, and
for ``__reduce_ex__`` and ``__deepcopy__`` where its class has its own: those show the module as it
is without what stands in on it. So a copy is of the script's own classes, and is loaded where there
is no nanstop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from nanstop.replay.undo import NOTHING, exchanged

_ASKED = ("__getstate__", "__reduce_ex__", "__deepcopy__")


@contextmanager
def standing_in(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Have ``value`` as an attribute of the instance;
    what was there, or nothing, is back on exit.
    """
    plain = _Plain.of(module)
    plain.earlier.setdefault(name, []).append(vars(module).get(name, NOTHING))
    try:
        with exchanged(vars(module), {name: value}):
            yield
    finally:
        plain.earlier[name].pop()
        plain.leave()


class _Plain:
    """A module as it is without what stands in on it.
    ``earlier``: by attribute, what each stand-in found there.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.earlier: dict[str, list[Any]] = {}
        self.asked = {name: self._answer(name) for name in _ASKED if _is_asked(type(module), name)}
        vars(module).update(self.asked)

    @classmethod
    def of(cls, module: nn.Module) -> _Plain:
        """Return the stand-in of a module; the first call makes it."""
        answer = vars(module).get("__getstate__")
        return answer.plain if isinstance(answer, _Answer) else cls(module)

    def leave(self) -> None:
        """Take the answers away where nothing stands in any more."""
        if not any(self.earlier.values()):
            for name in self.asked:
                vars(self.module).pop(name, None)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Have the module inside as it would be without nanstop."""
        first = {name: found[0] for name, found in self.earlier.items() if found}
        with exchanged(vars(self.module), first | dict.fromkeys(self.asked, NOTHING)):
            yield

    def _answer(self, name: str) -> _Answer:
        return _Answer(self, getattr(type(self.module), name))


class _Answer:
    """What a copying protocol calls in place of the class's method."""

    def __init__(self, plain: _Plain, method: Callable[..., Any]) -> None:
        self.plain = plain
        self.method = method

    def __call__(self, *args: Any) -> Any:
        with self.plain.shown():
            found = self.method(self.plain.module, *args)
            return dict(found) if found is vars(self.plain.module) else found


def _is_asked(kind: type, name: str) -> bool:
    """Return whether a class answers by a method of its own;
    ``nn.Module`` leads all others to ``__getstate__``.
    """
    own = getattr(kind, name, None)
    return own is not None and (name == "__getstate__" or own is not getattr(nn.Module, name, None))
