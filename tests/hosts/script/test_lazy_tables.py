"""Tables of a script that load what they are asked for, as transformers' tables of its models do:
looking at a healthy step asks them for nothing.
"""

import pytest
import torch

from loop_scripts import investigated
from nanstop.numerics.tensors import tensors
from nanstop.replay.script_objects import reached

SCRIPT = """
import collections
import torch

ASKED = []

class Lazy(collections.OrderedDict):
    def asked(self, *args):
        ASKED.append(args)
        return []

    __len__ = lambda self: ASKED.append("len") or 0
    __bool__ = lambda self: ASKED.append("bool") or False
    __iter__ = lambda self: iter(self.asked())
    __getitem__ = __contains__ = get = keys = values = items = asked

LAZY = Lazy()

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.table = torch.nn.Linear(4, 1), LAZY

    def forward(self, x):
        return self.layer(x), LAZY

def error(given):
    return given[0].pow(2).mean() if LAZY is not None else None

def train():
    torch.manual_seed(0)
    inner, model = LAZY, Net()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(8):
        loss = error(model(torch.randn(3, 4)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

train()
"""


def test_a_healthy_run_asks_tables_that_load_for_nothing(tmp_path):
    script, _ = investigated(tmp_path / "script.py", SCRIPT)
    assert not script["ASKED"]


class Loads(dict):
    def _ask(self, *_):
        raise AssertionError("was asked")

    __len__ = __iter__ = __getitem__ = keys = values = items = _ask


@pytest.mark.parametrize("look", [tensors, lambda one: reached(one)[1]])
def test_what_such_a_table_holds_itself_is_seen(look):
    table = Loads()
    dict.__setitem__(table, "x", [torch.zeros(2)])
    assert len(look(table)) == 1
