"""Work that is counted, not timed:
what operations read and write, and what a look at records visits.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Elements(TorchDispatchMode):
    """Counts the elements that operations read and those that they make, while it is entered;
    views are free.
    """

    def __init__(self):
        super().__init__()
        self.num_read = self.num_made = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.num_read += _number((args, kwargs))
            self.num_made += _number(made)
        return made


def _number(tree):
    return sum(leaf.numel() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


class Visited(Sequence):
    """A sequence that counts in ``visits`` how often an entry is looked at."""

    def __init__(self, entries, visits):
        self.entries, self.visits = entries, visits

    def __len__(self):
        return len(self.entries)

    def __getitem__(self, place):
        found = self.entries[place]
        self.visits[0] += len(found) if isinstance(place, slice) else 1
        return found

    def __iter__(self):
        for entry in self.entries:
            self.visits[0] += 1
            yield entry
