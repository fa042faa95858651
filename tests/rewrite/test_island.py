"""An island in plain PyTorch gives the numbers of the remedy."""

import pytest
import torch
from torch import nn

from nanstop.records import Atom
from nanstop.remedies.apply import applied
from nanstop.rewrite.island import island_lines, with_islands
from nanstop.rewrite.source import Source, edited
from remedies.views import View

SCRIPT = """\
import torch
from torch import nn

class Net(nn.Module):
    pass

net = Net()  # a model
optimizer = make(net)
"""


def atom(value):
    return Atom(remedy="island", target="1", value=value)


@pytest.mark.parametrize("value", ["float32", "float32->input"])
def test_the_same_numbers_as_the_remedy(value):
    torch.manual_seed(0)
    last = nn.Linear(4, 2, dtype=torch.float32 if value == "float32" else torch.bfloat16)
    model = nn.Sequential(
        nn.Linear(4, 4, dtype=torch.bfloat16), nn.LayerNorm(4, dtype=torch.bfloat16), last
    )
    x = torch.randn(8, 4, dtype=torch.bfloat16)

    def outcome():
        model.zero_grad()
        result = model(x)
        result.float().square().sum().backward()
        return [result.detach().clone(), *(p.grad.clone() for p in model.parameters())]

    with applied(View(model), (atom(value),)):
        wanted = outcome()
    exec("\n".join(island_lines((atom(value),), "model", "cpu")), {"torch": torch, "model": model})
    found = outcome()
    assert [one.dtype for one in found] == [one.dtype for one in wanted]
    assert all(map(torch.equal, found, wanted))
    assert list(model.state_dict()) == [f"{i}.{n}" for i in "012" for n in ("weight", "bias")]


def test_it_is_put_after_the_model():
    source = Source(SCRIPT)
    after = edited(SCRIPT, with_islands(source, (atom("float32->input"),), "cpu"))
    assert after.startswith(SCRIPT[: SCRIPT.index("optimizer")])
    assert after.endswith('in_float32(net.get_submodule("1"))\noptimizer = make(net)\n')
    compile(after, "x.py", "exec")


def test_not_where_it_is_unclear_which_model_is_meant():
    text = SCRIPT + "teacher = Net()\n"
    assert with_islands(Source(text), (atom("float32"),), "cpu") == []
