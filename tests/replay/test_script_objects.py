"""Whatever the script's own code remembers is what it was, once a forward has been run again."""

import itertools
import random
import weakref
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial, wraps

import numpy as np
import pytest
import torch
from torch import nn

from nanstop.replay.script_objects import reaches_iterator, script_objects_kept

seen = []
scores = torch.ones(2)
with torch.inference_mode():
    finished = torch.ones(2)


@dataclass
class Meter:
    total: int = 0
    last: deque = field(default_factory=partial(deque, maxlen=2))

    def add(self):
        self.total += 1
        self.last.append(self.total)


class Slotted:
    __slots__ = ("__hidden", "__weakref__", "count")

    def __init__(self):
        self.count = self.__hidden = 0

    def add(self):
        self.count += 1
        self.__hidden += 1

    @property
    def counts(self):
        return self.count, self.__hidden


class Extending(Slotted):
    """Has a dict beside the slots."""

    def add(self):
        super().add()
        self.known = weakref.ref(self)


class Shared:
    count = 0
    by_kind = Counter()  # noqa: RUF012 - as scripts do it

    def add(self):
        Shared.count += 1
        type(self).by_kind["forward"] += 1

    @property
    def known(self):
        return len(seen)

    @staticmethod
    def appended():
        seen.append(len(seen))


class Drawing:
    def __init__(self):
        self.python, self.numpy = random.Random(1), np.random.default_rng(1)
        self.old = np.random.RandomState(1)

    def add(self):
        self.python.random(), self.numpy.random(), self.old.rand()


class Holding:
    """Holds another model that no module knows of."""

    def __init__(self):
        self.models = [nn.Sequential(nn.Linear(1, 1))]

    def add(self):
        self.models[0][0].calls = getattr(self.models[0][0], "calls", 0) + 1


def counted(state={"n": 0}):  # noqa: B006 - as scripts do it
    state["n"] += 1


def wrapped(function):
    count = 0

    @wraps(function)
    def inner(*args):
        nonlocal count
        count += 1
        return function(*args)

    inner.count = lambda: count
    return inner


PLACES = {
    "object": (Meter(), lambda m: (m.total, list(m.last))),
    "slots": (Slotted(), lambda s: s.counts),
    "slots and a dict": (Extending(), lambda s: (s.counts, "known" in vars(s))),
    "class": (Shared(), lambda s: (Shared.count, dict(Shared.by_kind))),
    "generators": (
        Drawing(),
        lambda d: (d.python.getstate(), str(d.numpy.bit_generator.state), d.old.get_state()[2]),
    ),
    "model in a list": (Holding(), lambda h: getattr(h.models[0][0], "calls", 0)),
}


class Forward(nn.Module):
    def __init__(self, called):
        super().__init__()
        self.register_forward_pre_hook(lambda *_: called())

    def forward(self, x):
        return x


@pytest.mark.parametrize("place", PLACES)
def test_objects_behind_a_hook(place):
    one, shown = PLACES[place]
    model = Forward(one.add)
    model(1)
    before = shown(one)
    with script_objects_kept(model.modules()):
        model(1)
        assert shown(one) != before
    assert shown(one) == before
    model(1)
    assert shown(one) != before


FUNCTIONS = {
    "variable of the file": (Shared.appended, lambda: list(seen)),
    "default": (counted, lambda: dict(counted.__defaults__[0])),
    "closure": (add := wrapped(lambda: None), add.count),
    "through a partial": (partial(Shared.appended), lambda: list(seen)),
    "tensor of the file": (lambda: scores.add_(1), lambda: scores.tolist()),
}


@pytest.mark.parametrize("place", FUNCTIONS)
def test_what_a_function_remembers(place):
    function, shown = FUNCTIONS[place]
    model = Forward(function)
    model(1)
    before = shown()
    with script_objects_kept(model.modules()):
        model(1)
        assert shown() != before
    assert shown() == before


def test_what_is_only_read_is_the_same_object():
    """A tensor of inference mode has no version; a container that did not change stays itself."""
    held = {"names": ["a"], "limit": finished}
    model = Forward(lambda: held["names"][0] and finished.sum())
    names = held["names"]
    with script_objects_kept(model.modules()):
        model(1)
    assert held["names"] is names
    assert held["limit"] is finished


def test_a_walk_ends():
    """Things that hold each other, and one that holds a million."""
    meter = Meter()
    meter.itself, meter.data = [meter], list(range(10**6))
    meter.numbers = itertools.count()
    model = Forward(meter.add)
    with script_objects_kept(model.modules()):
        model(1)
    assert meter.total == 0


steps = itertools.count()


class Scheduled(nn.Module):
    """Takes what comes next of iterators: of its own, of its file and of a closure."""

    def __init__(self):
        super().__init__()
        self.weights, given = iter([1.0, 0.5, 0.25]), iter(range(9))
        self.register_forward_hook(lambda *_: seen.append(next(given)))
        self.given = given

    def forward(self, x):
        return x * next(self.weights) * next(steps)


def test_what_iterators_give_next_is_what_they_would_have_given():
    model = Scheduled()
    outputs = [model(8.0)]
    with script_objects_kept(model.modules()):
        assert [model(8.0), model(8.0)] == [4.0, 4.0]
    outputs += [model(8.0), model(8.0)]
    assert outputs == [0.0, 4.0, 4.0]
    assert (next(steps), next(model.given), list(model.weights)) == (3, 3, [])


def test_an_iterator_that_cannot_be_copied_is_known():
    drawn = (one for one in range(3))
    assert not reaches_iterator([Scheduled()])
    assert reaches_iterator([Forward(lambda: next(drawn))])
    assert list(drawn) == [0, 1, 2]
