"""Whether what a script raises is its own answer to a bad number: a guard, an assertion."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from nanstop.errors import NanstopError
from nanstop.numerics.host_memory import lacks_memory
from nanstop.numerics.tensors import has_bad, is_inexact, is_measurable, is_plain, tensors
from nanstop.replay.conditions import eager
from nanstop.replay.rerun import attempt
from nanstop.replay.step import Step
from nanstop.tracing import operators

_READS = ("_local_scalar_dense", "item", "is_nonzero")


def answers_a_bad_number(step: Step, error: BaseException) -> bool:
    """Return whether the last micro-batch of a step raises ``error`` because of a NaN or an
    infinity: ``if torch.isnan(loss)``, ``assert h.isfinite().all()``, ``loss.item()``.

    What decides is not what it is called nor what it says: it is raised again, and no more where
    all that is asked of values is answered as if they were finite, but for infinities that nothing
    has computed. Runs the micro-batch twice, undone; False where it cannot be run again, or other
    processes would have to take part. Synchronises the device.
    """
    if lacks_memory(error) or isinstance(error, NanstopError) or not step.is_local:
        return False
    try:
        batch = filter(_has_high, tensors(list(step.batches[-1].values())))
        answers = _Answers((*batch, *step.view.root.parameters()))
        plain = attempt(step, len(step.batches) - 1, under=eager)
        if type(plain.error) is not type(error):
            return False
        again = attempt(step, len(step.batches) - 1, under=answers.of_finite_values)
    except Exception:  # what cannot be run again tells nothing
        return False
    return answers.were_others and type(again.error) is not type(error)


def asks_of_a_bad_number(step: Step) -> bool:
    """Return whether what a script has asked of a micro-batch, the last of a step, whose answer
    is its loss, is answered otherwise where the values are finite: see ``answers_a_bad_number``.

    Runs the micro-batch twice, undone. Synchronises the device.
    """
    if not step.is_local:
        return False
    last = len(step.batches) - 1
    try:
        batch = filter(_has_high, tensors(list(step.batches[last].values())))
        answers = _Answers((*batch, *step.view.root.parameters()))
        plain = attempt(step, last, under=eager)
        again = attempt(step, last, under=answers.of_finite_values)
    except Exception:  # what cannot be run again tells nothing
        return False
    if plain.error is not None or again.error is not None:
        return False
    return answers.were_others and again.loss != plain.loss


def is_computed(step: Step) -> bool:
    """Return whether the infinity that is the loss of a step's last micro-batch is of something
    that was computed, and not of one that the script has brought in, as a mask does.

    Runs the micro-batch once, undone; True where it cannot be run again.
    """
    if not step.is_local:
        return True
    try:
        last = len(step.batches) - 1
        batch = filter(_has_high, tensors(list(step.batches[last].values())))
        answers = _Answers((*batch, *step.view.root.parameters()))
        with step.isolated(), answers.of_finite_values():
            return answers.counts(step.run(last))
    except Exception:  # what cannot be run again tells nothing
        return True


def _has_high(tensor: Tensor) -> bool:
    """Return whether a tensor holds +Inf: -Inf in a batch is what masks are made of."""
    is_real = tensor.is_floating_point() and is_plain(tensor)
    return is_real and bool((tensor == math.inf).any())


class _Answers(TorchDispatchMode):
    """Has each number that is read, and all that is made of numbers without being one (what they
    are compared to, whether they are finite, where they are largest), be that of finite values.
    ``were_others``: whether anything was asked of others.

    An infinity that nothing has computed is the script's own (where a search for the least begins,
    what masks are filled with) and stays what it is, unless it was ``given`` to the step.
    """

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.were_others = False
        memories = (one.untyped_storage() for one in given if is_plain(one))
        self._computed = {memory._cdata: memory for memory in memories}
        """Memory whose infinities count, held so that no other gets its place."""

    @contextmanager
    def of_finite_values(self) -> Iterator[None]:
        with eager(), self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ not in _READS:
            counts = self._makes(func, args, kwargs)
            result = func(*args, **kwargs)
            made = tensors(result)
            for one in made if counts else ():
                if is_measurable(one) and has_bad(one):
                    memory = one.untyped_storage()
                    self._computed[memory._cdata] = memory
            if not made or any(map(is_inexact, made)) or func._schema.is_mutable:
                return result
        given = tree_map_only(Tensor, self._finite, (args, kwargs))
        return func(*given[0], **given[1])

    def _makes(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Return whether infinities that an operation will have made count: it reads some that do,
        or none and is given none.
        """
        bad = [one for one in tensors((args, kwargs)) if is_measurable(one) and has_bad(one)]
        if bad:
            return any(map(self.counts, bad))
        numbers = (one for one in tree_leaves((args, kwargs)) if isinstance(one, float))
        return not operators.traits(func).uninitialised and all(map(math.isfinite, numbers))

    def counts(self, tensor: Tensor) -> bool:
        """Return whether what is not finite in a tensor counts."""
        known = tensor.untyped_storage()._cdata in self._computed
        return known or bool(tensor.isnan().any())

    def _finite(self, tensor: Tensor) -> Tensor:
        if not (tensor.is_floating_point() and is_plain(tensor) and has_bad(tensor)):
            return tensor
        if not self.counts(tensor):
            return tensor
        self.were_others = True
        if tensor.dtype.itemsize > 1:
            return tensor.nan_to_num()
        ends = torch.finfo(tensor.dtype)
        return tensor.float().nan_to_num(0.0, ends.max, ends.min).to(tensor.dtype)
