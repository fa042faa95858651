"""nanstop's modes on the stack of torch's function modes."""

import threading
import weakref
from contextlib import ExitStack

import pytest
import torch
from torch.nn import functional as F

from nanstop.replay.function_modes import FunctionMode, OwnMode, put_on


class Silent(OwnMode):
    pass


class Noting(FunctionMode):
    def __init__(self):
        super().__init__()
        self.called = []

    def handle(self, func, args, kwargs):
        self.called.append(func)
        return super().handle(func, args, kwargs)


@pytest.mark.parametrize("num_modes", [1, 2])
def test_a_function_that_stands_for_one_of_torchs_is_applied_once(monkeypatch, num_modes):
    """To a mode, torch names a function by what has its name now."""
    places = (F, "layer_norm"), (torch.Tensor, "norm"), (torch.Tensor, "softmax")
    own = [getattr(*place) for place in places]
    scaled = [lambda *args, inner=inner, **named: 2 * inner(*args, **named) for inner in own]
    for place, function in zip(places, scaled, strict=True):
        monkeypatch.setattr(*place, function)
    x = torch.arange(6.0).view(2, 3)
    expected = torch.layer_norm(x, (3,)), torch.linalg.vector_norm(x), torch.softmax(x, -1)
    modes = [Noting() for _ in range(num_modes)]
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        found = F.layer_norm(x, (3,)), x.norm(), x.softmax(-1)
    assert all(torch.equal(one, 2 * other) for one, other in zip(found, expected, strict=True))
    for mode in modes:
        names = [one.__name__ for one in mode.called]
        assert {"layer_norm", "norm", "softmax"} <= set(names)
        assert not set(scaled) & set(mode.called)


def test_a_function_of_a_script_that_asks_modes_itself_is_called_as_it_is():
    def public(x):
        if torch.overrides.has_torch_function_unary(x):
            return torch.overrides.handle_torch_function(public, (x,), x)
        return x + 1

    with Noting() as mode:
        assert torch.equal(public(torch.ones(2)), torch.full((2,), 2.0))
    assert public in mode.called


def test_a_thread_that_ends_leaves_no_mode_to_torch():
    """What torch still held would be let go of after the thread has been joined, when the process
    may be ending: it would be aborted.
    """
    modes = []

    def train():
        for _ in range(3):
            mode = Silent()
            put_on(mode)
            modes.append(weakref.ref(mode))
            torch.ones(2).add(1)

    for _ in range(20):
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        assert [mode() for mode in modes] == [None] * len(modes)
