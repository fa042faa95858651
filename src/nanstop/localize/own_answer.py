"""Whether what a script raises is its own answer to a bad number: a guard, an assertion."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from nanstop.errors import NanstopError
from nanstop.numerics.host_memory import lacks_memory
from nanstop.numerics.tensors import has_bad, is_inexact, is_plain, tensors
from nanstop.replay.conditions import eager
from nanstop.replay.rerun import attempt
from nanstop.replay.step import Step

_READS = ("_local_scalar_dense", "item", "is_nonzero")


def answers_a_bad_number(step: Step, error: BaseException) -> bool:
    """Return whether the last micro-batch of a step raises ``error`` because of a NaN or an
    infinity: ``if torch.isnan(loss)``, ``assert h.isfinite().all()``, ``loss.item()``.

    What decides is not what it is called nor what it says: it is raised again, and no more where
    all that is asked of values is answered as if they were finite. Runs the micro-batch twice,
    undone; False where it cannot be run again, or other processes would have to take part.
    Synchronises the device.
    """
    if lacks_memory(error) or isinstance(error, NanstopError) or not step.is_local:
        return False
    answers = _Answers()
    try:
        plain = attempt(step, len(step.batches) - 1, under=eager)
        if type(plain.error) is not type(error):
            return False
        again = attempt(step, len(step.batches) - 1, under=answers.of_finite_values)
    except Exception:  # what cannot be run again tells nothing
        return False
    return answers.were_others and type(again.error) is not type(error)


class _Answers(TorchDispatchMode):
    """Has each number that is read, and all that is made of numbers without being one (what they
    are compared to, whether they are finite, where they are largest), be that of finite values.
    ``were_others``: whether anything was asked of others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.were_others = False

    @contextmanager
    def of_finite_values(self) -> Iterator[None]:
        with eager(), self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ not in _READS:
            result = func(*args, **kwargs)
            made = tensors(result)
            if not made or any(map(is_inexact, made)) or func._schema.is_mutable:
                return result
        given = tree_map_only(Tensor, self._finite, (args, kwargs))
        return func(*given[0], **given[1])

    def _finite(self, tensor: Tensor) -> Tensor:
        if not (tensor.is_floating_point() and is_plain(tensor) and has_bad(tensor)):
            return tensor
        self.were_others = True
        return tensor.nan_to_num()
