"""nanstop's modes on the stack of torch's function modes."""

import threading
import weakref

import torch

from nanstop.replay.function_modes import OwnMode, put_on


class Silent(OwnMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


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
