"""Gradients of parameters as autograd computed them, ahead of the hooks that may change them.

A probe stands before and behind each hook of a parameter for one backward. It gives nothing back
and changes nothing; parameters without hooks are left alone, and so is every other backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanstop.numerics.tensors import by_torch_alone, is_measurable, version
from nanstop.records import SourceLine
from nanstop.tracing.source.hook_lines import hook_lines, stays
from nanstop.tracing.source.written import is_fixed_hook

Take = Callable[[Tensor], Tensor]
OnTensor = Callable[[Tensor], None]
Hooks = dict[Any, Callable[..., Any]]


class HookStations:
    """The hooks of some parameters during one backward. ``take``: what is copied of a gradient."""

    def __init__(self, parameters: Sequence[Tensor], take: Take) -> None:
        self._stations = [_Station(p, take) for p in parameters if any(_hooks(p))]
        self.are_fixed = True
        """Whether those that changed a gradient make the same of each, once that was asked."""

    def detach(self) -> dict[int, Tensor]:
        """Take the probes away. Return, by its id, the sum that would be a parameter's gradient
        had no hook changed it, on its device.

        One whose weights a hook has moved, or whose gradient it has taken away, is left out.
        """
        computed = {id(one.parameter): one.detach() for one in self._stations}
        return {key: value for key, value in computed.items() if value is not None}

    def changed_at(self) -> tuple[SourceLine, ...] | None:
        """Return the known lines of the hooks that changed a gradient, None where none did.

        Synchronises the device where there were hooks.
        """
        passed = [each for one in self._stations for each in one.passed]
        if not passed:
            return None
        told = torch.stack([same.cpu() for *_, same in passed]).tolist()
        changing = [one for one, same in zip(passed, told, strict=True) if not same]
        self.are_fixed = all(stays(key) and is_fixed_hook(hook) for _, hook, key, _ in changing)
        lines = [line for line, *_ in changing]
        return tuple(dict.fromkeys(each for line in lines for each in line)) if lines else None


class _Station:
    """One parameter. ``passed``: of each hook its lines, itself, the key under which torch holds
    it, and whether it left the gradient as it was.
    """

    def __init__(self, parameter: Tensor, take: Take) -> None:
        self.parameter = parameter
        self.passed: list[tuple[tuple[SourceLine, ...], Any, int, Tensor]] = []
        self._take = take
        self._version = version(parameter)
        self._last: Tensor | None = None
        self._is_lost = False
        ahead, behind = _hooks(parameter)
        gradient = parameter.grad
        self._computed = take(gradient).clone() if ahead and gradient is not None else None
        _fill(ahead, self._probed(ahead, self._arrives, lambda gradient: gradient))
        comes = self._passes if ahead else self._stands
        _fill(behind, self._probed(behind, comes, lambda parameter: parameter.grad))

    def detach(self) -> Tensor | None:
        for hooks in _hooks(self.parameter):
            _fill(hooks, {key: hook for key, hook in hooks.items() if not _is_probe(hook)})
        is_moved = version(self.parameter) != self._version
        return None if self._is_lost or is_moved else self._computed

    def _probed(self, hooks: Hooks, first: OnTensor, gradient_of: Callable[[Tensor], Any]) -> Hooks:
        probed: Hooks = {object(): partial(self._probe, first, gradient_of)} if hooks else {}
        for key, hook in hooks.items():
            probed[key] = hook
            leaves = partial(self._leaves, hook_lines(hook, key), hook, key)
            probed[object()] = partial(self._probe, leaves, gradient_of)
        return probed

    def _probe(self, look: OnTensor, gradient_of: Callable[[Tensor], Any], given: Tensor) -> None:
        """Have nothing that a look fails at reach the backward."""
        try:
            with torch.no_grad(), by_torch_alone():
                gradient = gradient_of(given)
                if gradient is None or not is_measurable(gradient):
                    self._is_lost = True
                else:
                    look(self._take(gradient).clone())
        except Exception:  # nanstop is never the reason a run dies
            self._is_lost = True

    def _arrives(self, now: Tensor) -> None:
        """Note what a backward adds, each time that it reaches the parameter."""
        self._last = now
        self._computed = now if self._computed is None else self._computed + now

    def _stands(self, now: Tensor) -> None:
        self._last = self._computed = now

    def _passes(self, now: Tensor) -> None:
        self._last = now

    def _leaves(self, lines: tuple[SourceLine, ...], hook: Any, key: int, now: Tensor) -> None:
        if self._last is not None:
            same = (now == self._last) | (now.isnan() & self._last.isnan())
            self.passed.append((lines, hook, key, same.all()))
        self._last = now


def _hooks(parameter: Tensor) -> tuple[Hooks, Hooks]:
    """Return the hooks ahead of a parameter's gradient and those behind it, as torch holds them."""
    held: Any = parameter
    return held._backward_hooks or {}, getattr(held, "_post_accumulate_grad_hooks", None) or {}


def _fill(hooks: Hooks, wanted: Hooks) -> None:
    """Have the very dictionary that torch reads hold these hooks, in this order."""
    hooks.clear()
    hooks.update(wanted)


def _is_probe(hook: Any) -> bool:
    return isinstance(hook, partial) and getattr(hook.func, "__func__", None) is _Station._probe
