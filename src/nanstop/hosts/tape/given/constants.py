"""What the calls of a tape were given from outside, by the memory that it lies in: a write there
looks at those alone, however many calls there are.
"""

from __future__ import annotations

import weakref

from torch import Tensor

from nanstop.hosts.tape.tape_calls import Constant, root_of
from nanstop.numerics.tensors import version


class GivenConstants:
    """Constants, by reference: what a call that is not kept was given is let go with it."""

    def __init__(self) -> None:
        self._by_root: dict[int, tuple[weakref.ref[Tensor], list[weakref.ref[Constant]]]] = {}

    def add(self, constant: Constant) -> None:
        """Note what a call is given."""
        tensor = constant.tensor
        root = tensor if tensor._base is None else tensor._base
        known = self._by_root.get(id(root))
        if known is None or known[0]() is not root:  # an id comes back when its tensor is gone
            known = self._by_root[id(root)] = weakref.ref(root), []
        given = known[1]
        if given and given[-1]() is None:  # of a call that was not kept
            given.pop()
        given.append(weakref.ref(constant))

    def keep(self, written: Tensor) -> None:
        """Have constants hold copies where they are a tensor that is about to be written to, or a
        view of it.
        """
        root, copies = root_of(written), dict[int, Tensor]()
        known = self._by_root.get(id(root))
        if known is None or known[0]() is not root:
            return
        del self._by_root[id(root)]  # before: each is a copy from here on, or has moved
        for reference in known[1]:
            constant = reference()
            if constant is None or constant.moved:
                continue
            given = constant.tensor
            if id(given) not in copies:
                copies[id(given)] = given.detach().clone()
            constant.tensor = copies[id(given)]
            constant.version = version(constant.tensor)

    def take_over(self, earlier: GivenConstants) -> None:
        """Note what calls of an earlier tape were given as well."""
        for _, given in earlier._by_root.values():
            for constant in filter(None, [reference() for reference in given]):
                self.add(constant)
