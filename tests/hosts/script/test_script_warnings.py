"""A warning of a module is shown once, whether it is called with hooks of nanstop or without."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.modules import module as hooks

from nanstop.hosts.script import script_warnings


def entered(_module, _args):
    """A hook as nanstop has them: files of its own are told by where they lie."""


class Speaks(nn.Module):
    def __init__(self, text):
        super().__init__()
        self.text = text

    def forward(self, x):
        warnings.warn(self.text, UserWarning, stacklevel=2)
        return x


@pytest.mark.parametrize(("own", "times"), [(True, 1), (False, 2)])
def test_a_module_that_warns_is_heard_once(monkeypatch, own, times):
    shown = []
    monkeypatch.setattr(script_warnings, "is_own", lambda file: own and file == __file__)
    show = partial(script_warnings.show_at_script, lambda *given, **_: shown.append(str(given[0])))
    net = Speaks(f"called with hooks of nanstop: {own}")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = show
        net(torch.ones(1))
        handle = hooks.register_module_forward_pre_hook(entered)
        net(torch.ones(1))
        handle.remove()
    assert len(shown) == times
