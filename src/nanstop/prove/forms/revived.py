"""Whether what a program hides by -Inf is hidden no more once a finite number stands there.

A hidden score that is multiplied by 0 (a dropout of scores, say) is NaN while it is -Inf, and 0, a
score like any other, once it is finite: the step passes, and chooses what was hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from nanstop.prove.failing_step import FailingStep
from nanstop.prove.reference.agreement import agree
from nanstop.prove.reference.exact import ExactRuns
from nanstop.records import Atom
from nanstop.replay.conditions import eager
from nanstop.replay.rerun import Attempt

NOT_HIDDEN = "what is multiplied by 0 is hidden no more"
_FAR = (-1e4, -2e4)
"""Numbers that hide as -Inf does; a sum that counts them has another value with each."""


class _Kept(TorchDispatchMode):
    """Has products of 0 and -Inf be ``number`` inside. ``met``: whether there was one."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number, self.met = number, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = [one for one in tree_leaves((args, kwargs or {})) if isinstance(one, Tensor)]
        hides = [one for one in read if _hides(one)]
        result = func(*args, **(kwargs or {}))
        if not hides:
            return result
        beside = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        return tree_map(partial(self._kept, hides, [*read, *beside]), result)

    def _kept(self, hides: list[Tensor], known: list[Tensor], result: Any) -> Any:
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        lost = result.isnan()
        if not bool(lost.any()):
            return result
        lost = lost & _anywhere(hides, result, torch.isneginf)
        lost = lost & _anywhere(known, result, partial(torch.eq, other=0))
        self.met = self.met or bool(lost.any())
        return result.masked_fill_(lost, self.number)


def _hides(tensor: Tensor) -> bool:
    """Return whether -Inf stands beside scores in a tensor: one of nothing else hides nothing."""
    if not tensor.is_floating_point() or tensor.numel() < 2:
        return False
    hidden = tensor.isneginf()
    return bool(hidden.any()) and not bool(hidden.all())


def _anywhere(tensors: list[Tensor], like: Tensor, asked: Any) -> Tensor:
    """Return where one of the tensors, in the shape of ``like``, is what is asked for."""
    found = torch.zeros_like(like, dtype=torch.bool)
    for one in tensors:
        if _fits(one, like):
            found |= asked(one)
    return found


def _fits(tensor: Tensor, like: Tensor) -> bool:
    """Return whether a tensor has a value, its own or one for many, for each place of another."""
    sizes = zip(reversed(tensor.shape), reversed(like.shape), strict=False)
    return tensor.dim() <= like.dim() and all(own in (1, size) for own, size in sizes)


def hides_no_more(
    failing: FailingStep, exact: ExactRuns, atoms: tuple[Atom, ...], run: Attempt
) -> bool:
    """Return whether a finite number in the place of -Inf, under which the failing micro-batch ends
    as ``run``, is multiplied by 0 where a number as far off as it hides something.

    It does where any number so far off gives the product's place the same loss. What is counted
    there (a probability of 0 times its logarithm) has another loss with each.
    """
    if not any(atom.remedy == "finite_fill" for atom in atoms) or run.failed:
        return False
    met: list[_Kept] = []

    @contextmanager
    def kept(number: float) -> Iterator[None]:
        met.append(_Kept(number))
        with eager(), met[-1]:  # compiled code would be compiled anew to see a mode
            yield

    runs = [exact.attempt(failing.micro, under=partial(kept, number)) for number in _FAR]
    if not all(one.met for one in met) or any(one.loss is None for one in runs):
        return False
    same = [one for one in runs if not one.failed]
    return len(same) == len(_FAR) and agree(*same) and not agree(same[0], run)
