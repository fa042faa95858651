"""What scripts spell by hand and no call of a library tells: a loss scale that is left on, a number
in the place of a part of the loss, a layer that no optimizer has, squares and moments of an update
of one's own, a rate, weights that were copied under other names. Each beside what looks like it
and is meant.
"""

import textwrap

import pytest
import torch

from loop_scripts import with_findings

torch.set_num_threads(1)

HEAD = """
import math
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.more = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 1)

    def forward(self, x):
        h = self.body(x).tanh()
        return self.head(h), self.more(h).squeeze(-1)


def plain():
    inner = nn.Linear(16, 16)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), inner, nn.Tanh(), nn.Linear(16, 4))


net = plain()
data = [(torch.randn(12, 8), torch.randint(4, (12,))) for _ in range(24)]


def move(lr=0.05):
    with torch.no_grad():
        for p in net.parameters():
            if p.grad is not None:
                p -= lr * p.grad
                p.grad = None
"""


def loop(body, *, before="opt = torch.optim.SGD(net.parameters(), lr=0.05)", after=""):
    body = textwrap.indent(textwrap.dedent(body).strip("\n"), "    ")
    begin = "for step, (x, y) in enumerate(data):"
    parts = (HEAD, textwrap.dedent(before), begin, body, textwrap.dedent(after))
    return "\n".join(parts) + "\n"


SCALED = """
loss = F.cross_entropy(net(x), y)
{backward}
opt.step()  # here
opt.zero_grad()
"""

ADAM = "opt = torch.optim.Adam(net.parameters(), lr=1e-3)"
PARTLY = """
opt = torch.optim.SGD({parameters}, lr=0.05)  # here
"""
TRAINED = """
opt.zero_grad()
F.cross_entropy(net(x), y).backward()
opt.step()
"""
TWO = """
scores, length = net(x)
error = (length - x.norm(dim=-1)).square().mean()
loss = {loss}  # here
loss.backward()
move()
"""
MOMENTS = """
first = {{p: torch.zeros_like(p) for p in net.parameters()}}
second = {{p: torch.zeros_like(p, dtype={kept}) for p in net.parameters()}}
"""
ADAPTIVE = """
({size} * F.cross_entropy(net(x), y)).backward()
{swap}
with torch.no_grad():
    for p in net.parameters():
        first[p].mul_(0.9).add_(p.grad, alpha=0.1)
        second[p].mul_(0.9).add_(p.grad.to(second[p].dtype).square(), alpha=0.1)  # here
        p -= 1e-3 * first[p] / (second[p].float().sqrt() + 1e-7)
        p.grad = None
"""
SWAP = """
if step == 6:
    one, _, other, *_ = first
    first = {**first, one: first[other], other: first[one]}  # here
"""
RATES = """
for group in opt.param_groups:
    group["lr"] = {rate}  # here
opt.zero_grad()
F.cross_entropy(net(x), y).backward()
opt.step()
"""
OF_A_FUNCTION = """
opt = torch.optim.SGD(net.parameters(), lr=0.1)


def rate_of(count, warm_up=250_000):
    share = min(1.0, (count + 1) / warm_up)
    if count < 0:
        return 0.0
    return 0.1 * share  # no line of the loop
"""
COPIED = """
saved = {{name: value.clone() for name, value in plain().state_dict().items()}}
{renamed}
with torch.no_grad():
    for name, p in net.named_parameters():
        if name in saved:
            p.copy_(saved[name])  # here
opt = torch.optim.SGD(net.parameters(), lr=0.05)
"""
RENAMED = 'saved = {name.replace("4.", "fc."): value for name, value in saved.items()}'

UNSCALED = """
for p in net.parameters():
    p.grad /= 1024
"""
SLOW = """
slow = [p.detach().clone() for p in net.parameters()]
opt = torch.optim.SGD(net.parameters(), lr=0.05)
"""
AVERAGED = """
with torch.no_grad():
    for mean, p in zip(slow, net.parameters()):
        mean.lerp_(p, 1e-4)
    for mean, p in zip(slow, net.parameters()):
        p.copy_(mean)  # here
"""
WRITTEN = "    for mean, p in zip(slow, net.parameters()):\n        p.c"
LAST_BY_HAND = """
with torch.no_grad():
    for p in net[4].parameters():
        p -= 0.01 * p.grad
        p.grad = None
"""

FAULTS = {
    "a scale that is left on": (
        "NS112", loop(SCALED.format(backward="(loss * 1024).backward()")),
    ),
    "a scale, divided by a window": (
        "NS112", loop(SCALED.format(backward="(loss * 1024.0 / 2).backward()")),
    ),
    "a scale that is held": (
        "NS112", loop(SCALED.format(backward="scaled = loss * 4096\nscaled.backward()")),
    ),
    "a slow average copied over the weights": ("NS307", loop(TRAINED + AVERAGED, before=SLOW)),
    "a warm-up of a table": (
        "NS113",
        loop(
            RATES.format(rate="float(table[min(step + 1, len(table) - 1)])"),
            before="import numpy\ntable = numpy.linspace(0.0, 0.1, 300_000)\n"
            "opt = torch.optim.SGD(net.parameters(), lr=0.1)",
        ),
    ),
    "a last layer that is left out": (
        "NS114", loop(TRAINED, before=PARTLY.format(parameters="net[:4].parameters()")),
    ),
    "a part that is a number": (
        "NS114",
        loop(TWO.format(loss="F.cross_entropy(scores, y) + error.item()"), before="net = Net()"),
    ),
    "a part that is a number, with an optimizer": (
        "NS114",
        loop(
            TWO.format(loss="F.cross_entropy(scores, y) + error.item()").replace(
                "move()", "opt.step()\nopt.zero_grad()"
            ),
            before="net = Net()\nopt = torch.optim.SGD(net.parameters(), lr=0.05)",
        ),
    ),
    "squares in half": (
        "NS110",
        loop(ADAPTIVE.format(size=1e-4, swap=""), before=MOMENTS.format(kept="torch.float16")),
    ),
    "moments of another": (
        "NS115",
        loop(
            ADAPTIVE.format(size=1.0, swap=SWAP).replace("alpha=0.1)  # here", "alpha=0.1)"),
            before="net[0], net[2], net[4] = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)\n"
            + MOMENTS.format(kept="torch.float32"),
        ),
    ),
    "a warm-up by hand": ("NS113", loop(RATES.format(rate="0.1 * min(1.0, (step + 1) / 250_000)"))),
    "a warm-up of a function": (
        "NS113", loop(RATES.format(rate="rate_of(step)"), before=OF_A_FUNCTION),
    ),
    "weights under other names": ("NS105", loop(TRAINED, before=COPIED.format(renamed=RENAMED))),
}  # fmt: skip

HEALTHY = {
    "a temperature": loop(
        SCALED.format(backward="soft = loss * 16\nsoft.backward()")
    ),
    "a slow average beside the weights": loop(
        TRAINED + AVERAGED.partition(WRITTEN)[0],
        before=SLOW,
    ),
    "a slow average that is half way": loop(
        TRAINED + AVERAGED.replace("1e-4", "0.5"), before=SLOW
    ),
    "some rows of which the rest was copied under its own name": loop(
        TRAINED,
        before=COPIED.format(renamed=RENAMED) + "net[4].weight.data.copy_(saved['fc.weight'])",
    ),
    "a sum over rows": loop(SCALED.format(backward="(loss * 12).backward()")),
    "a sum over more rows": loop(
        SCALED.format(backward="(loss * 8).backward()").replace("net(x), y", "net(x[:8]), y[:8]")
    ),
    "a weight that is kept": loop(
        SCALED.format(backward="loss = loss * 64\nlosses = float(loss.detach())\nloss.backward()")
    ),
    "a weight that is no power of two": loop(SCALED.format(backward="(loss * 10).backward()")),
    "a scale under Adam": loop(SCALED.format(backward="(loss * 1024).backward()"), before=ADAM),
    "a scale that is taken off": loop(
        SCALED.format(backward=f"(loss * 1024).backward()\n{UNSCALED}")
    ),
    "a probe": loop(TRAINED, before=PARTLY.format(parameters="net[4].parameters()")),
    "layers in between": loop(
        TRAINED, before=PARTLY.format(parameters="[*net[0].parameters(), *net[4].parameters()]")
    ),
    "a last layer of another optimizer": loop(
        TRAINED + "\nlast.step()\nlast.zero_grad()",
        before=PARTLY.format(parameters="net[:4].parameters()")
        + "last = torch.optim.SGD(net[4].parameters(), lr=0.01)",
    ),
    "a last layer by hand": loop(
        TRAINED + LAST_BY_HAND,
        before=PARTLY.format(parameters="net[:4].parameters()"),
    ),
    "a number beside the loss": loop(
        TWO.format(loss="F.cross_entropy(scores, y) + error\n    mean = float(loss.detach())")
        .replace("    mean", "mean"), before="net = Net()\nmean = 0.0",
    ),
    "a weight by a number": loop(
        TWO.format(loss="F.cross_entropy(scores, y) + error / float(error.detach())"),
        before="net = Net()",
    ),
    "squares in half, large enough": loop(
        ADAPTIVE.format(size=10.0, swap=""), before=MOMENTS.format(kept="torch.float16")
    ),
    "squares in float32": loop(
        ADAPTIVE.format(size=1e-4, swap=""), before=MOMENTS.format(kept="torch.float32")
    ),
    "moments that begin anew": loop(
        ADAPTIVE.format(
            size=1.0, swap="if step == 6:\n    first = {p: torch.zeros_like(p) for p in first}\n"
        ),
        before=MOMENTS.format(kept="torch.float32"),
    ),
    "a short warm-up by hand": loop(RATES.format(rate="0.1 * min(1.0, (step + 1) / 40)")),
    "a search for the rate": loop(RATES.format(rate="1e-5 * 1.2**step")),
    "a rate that rises with the loop": loop(RATES.format(rate="0.1 * (step + 1) / 24")),
    "a rate that rises and falls": loop(
        RATES.format(rate="0.1 * min((step + 1) ** -0.5, (step + 1) * 4000**-1.5)")
    ),
    "weights of the same names": loop(TRAINED, before=COPIED.format(renamed="")),
    "a copy of the start": loop(
        TRAINED,
        before="start = {name: value.clone() for name, value in net.state_dict().items()}\n"
        "opt = torch.optim.SGD(net.parameters(), lr=0.05)",
    ),
    "a body alone, with a head of another width": loop(
        TRAINED,
        before=COPIED.format(
            renamed='saved = {k: v for k, v in saved.items() if not k.startswith("4.")}\n'
            'saved["fc.weight"] = torch.randn(7, 16)'
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("code", "source"), FAULTS.values(), ids=FAULTS)
def test_what_is_wrong_is_told_with_its_line(tmp_path, code, source):
    found = {one.code: one for one in with_findings(tmp_path, source)[1]}
    assert [*found] == [code]
    (here,) = (n for n, line in enumerate(source.splitlines(), 1) if line.endswith("# here"))
    said = " ".join((found[code].where, found[code].cause, *found[code].lines))
    assert f"script.py:{here}" in said


@pytest.mark.parametrize("source", HEALTHY.values(), ids=HEALTHY)
def test_what_is_meant_is_left_in_peace(tmp_path, source):
    assert [(one.code, one.cause) for one in with_findings(tmp_path, source)[1]] == []
