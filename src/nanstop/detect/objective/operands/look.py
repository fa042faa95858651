"""What the operations that end an objective read in one run, as far as it is odd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from nanstop.detect.objective.labels import PICKS
from nanstop.detect.objective.operands.numbers import (
    ALIGNMENTS,
    BINARY,
    NORMALISE,
    SCORED,
    SHARES,
    SIGNED,
    SQUASHES,
    SUMS,
    Given,
    are_probabilities,
    first_numbers,
    is_log,
    likelihood,
    reader,
    some_rows,
)
from nanstop.frozen import frozen
from nanstop.records import op_name
from nanstop.tracing.op_patches import LookOfSome

_PARTS = frozenset({"exp", "mul", "sub", "xlogy", BINARY})


class Operands(LookOfSome):
    """Keeps of the ops that end an objective what was odd about their operand, by index.
    ``overflowed``: those of ``asked`` whose operand was not finite. ``between``: some of the
    numbers that are between 0 and 1. ``divergences``: which operand of those that are a part of a
    KL divergence is to be a logarithm.
    """

    ops = _PARTS | NORMALISE | {SHARES} | ALIGNMENTS | SQUASHES | PICKS | {SIGNED} | SUMS

    def __init__(self, asked: Set[int] = frozenset()) -> None:
        self.odd: dict[int, Given] = {}
        self.overflowed: set[int] = set()
        self.between: dict[int, Tensor] = {}
        self._asked = asked
        self.divergences: dict[int, int] = {}
        self._normalised: set[StorageWeakRef] = set()
        self._picked: dict[StorageWeakRef, int] = {}
        self._signed: dict[StorageWeakRef, int] = {}
        self._weighed: _Weighed | None = None
        self._less: tuple[_Weighed, StorageWeakRef] | None = None

    def __call__(
        self, index: int, func: Any, args: Any, _kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        base = op_name(str(func))
        if base in SUMS:
            self.odd.pop(self._signed.pop(StorageWeakRef(args[0].untyped_storage()), -1), None)
            return None
        if base in ("sub", "mul", "xlogy"):
            with torch.no_grad():
                done = self._divergence(index, base, args)
            if done is not None:
                return done
        read = reader(base)
        if read is not None and isinstance(args[0], Tensor) and args[0].is_floating_point():
            with torch.no_grad():
                found = read(args)
                if index in self._asked and not bool(args[0].isfinite().all()):
                    self.overflowed.add(index)
            self._note(index, base, args[0], found)
            if found == "between_0_and_1":
                scores = args[0] if args[0].requires_grad else args[1]
                self.between[index] = first_numbers(scores).clone()
            if base == "mul" and found == "unsigned":
                return lambda made: self._signed.update(
                    {StorageWeakRef(made.untyped_storage()): index}
                )
        return None

    def _divergence(self, index: int, base: str, args: Any) -> Callable[[Any], None] | None:
        """Look at the parts of a KL divergence to a target p: p log(p) - p x, as torch computes
        it, or p (log(p) - x), as its formula is written and torch computes it of logarithms.
        """
        tensors = [one for one in args[:2] if isinstance(one, Tensor) and one.is_floating_point()]
        if len(tensors) < 2 or tensors[0].shape != tensors[1].shape or tensors[0].dim() < 2:
            return None
        if base == "sub" and len(args) == 2 and _is_asked(tensors[1]) and not _is_asked(tensors[0]):
            weighed = _Weighed(index, 1, tensors[1], tensors[0])

            def made(result: Tensor) -> None:
                self._less = weighed, StorageWeakRef(result.untyped_storage())

            return made
        if base == "xlogy" and self._weighed is not None and tensors[0] is tensors[1]:
            target = self._weighed.target
            if StorageWeakRef(tensors[0].untyped_storage()) == StorageWeakRef(
                target.untyped_storage()
            ):
                self._take(self._weighed, target)
        elif base == "mul" and sum(map(_is_asked, tensors)) == 1:
            asked = int(_is_asked(tensors[1]))
            self._weighed = _Weighed(index, asked, tensors[asked], tensors[1 - asked])
            place = StorageWeakRef(tensors[asked].untyped_storage())
            if self._less is not None and self._less[1] == place:
                self._take(self._less[0], tensors[1 - asked])
                self._exponentiated(self._less[0], tensors[1 - asked])
        return None

    def _take(self, weighed: _Weighed, target: Tensor) -> None:
        """Keep what is odd about what is taken for a logarithm beside a target of probabilities."""
        dims = [dim for dim in (-1, 1) if are_probabilities(some_rows(target, dim))]
        given = likelihood(weighed.logs, dims[0]) if dims else None
        if given is None or (weighed.target is not target and not is_log(weighed.target, target)):
            return
        place = StorageWeakRef(weighed.logs.untyped_storage())
        if place not in self._normalised:
            self.odd[weighed.index], self._picked[place] = given, weighed.index
            self.divergences[weighed.index] = weighed.place

    def _exponentiated(self, less: _Weighed, weight: Tensor) -> None:
        """Keep a target of which the exponential is taken, exp(t) (t - x), and that is one of
        probabilities.
        """
        if are_probabilities(some_rows(less.target, -1)) and is_log(less.target, weight):
            self.odd[less.index], self.divergences[less.index] = "probabilities", 0

    def _note(self, index: int, base: str, operand: Tensor, given: Given | None) -> None:
        """Keep what is odd; scores that are normalised as well are the logits of a cross entropy
        that is spelled by hand.
        """
        # It keeps the address from being given to another storage.
        place = StorageWeakRef(operand.untyped_storage())
        if base in NORMALISE:
            self._normalised.add(place)
            self.odd.pop(self._picked.pop(place, -1), None)
        if given is None or (base in SCORED and place in self._normalised):
            return
        self.odd[index] = given
        if base in SCORED:
            self._picked[place] = index


@frozen
class _Weighed:
    """``logs``, which the op ``index`` reads at ``place`` beside ``target``, or its logarithm."""

    index: int
    place: int
    logs: Tensor
    target: Tensor


def _is_asked(values: Tensor) -> bool:
    return values.requires_grad
