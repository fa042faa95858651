"""Compiled code that is wrong where eager code is right, however a script compiles."""

import pytest
import torch
from torch import nn

import nanstop
from loop_scripts import investigated
from nanstop.records import Atom, Report, RunFacts
from nanstop.rewrite.arguments import cured
from nanstop.rewrite.source import Source, edited

STRIKES, STEPS, LARGE = 3, 6, 200.0


class Compiler:
    """A backend whose code is not finite for large operands. ``calls``: how often it ran."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, graph, _):
        def code(*args):
            self.calls += 1
            given = [one for one in args if isinstance(one, torch.Tensor)]
            spoilt = any(bool((one.abs() >= LARGE).any()) for one in given)
            outputs = graph(*args)
            return tuple(out * float("nan") for out in outputs) if spoilt else outputs

        return code


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x) * 0.5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scaled, self.head = Scaled(), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.scaled(x))


def called(how, net, compiler):
    """Return what the loss calls: a net that was compiled, as ``how`` says."""
    if how == "part":
        net.scaled.compile(backend=compiler, dynamic=False)
        return net
    if how == "itself":
        net.compile(backend=compiler, dynamic=False)
        return net
    if how == "function":

        @torch.compile(backend=compiler, dynamic=False)
        def run(x):
            return net(x)

        return run
    return torch.compile(net, backend=compiler, dynamic=False)


def trained(how, folder=None):
    """Return the losses of a training, and what a watch has reported where there is a folder."""
    torch.manual_seed(0)
    torch.compiler.reset()
    net, compiler = Net(), Compiler()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    run, counts = called(how, net, compiler) if how else net, []
    losses = []
    with nanstop.watch(net, optimizer, out=folder) as watch:
        for step in range(STEPS):
            x = torch.randn(4, 8)
            if step == STRIKES:
                x[0] = LARGE
            losses.append(float(watch.step(lambda x: run(x).square().mean(), x)))
            watch.update()
            counts.append(compiler.calls)
    return losses, watch.incidents, counts


@pytest.mark.parametrize("how", ["beside", "itself", "part", "function"])
def test_it_is_told_from_the_models_own_numbers_and_the_step_is_made_without_it(
    tmp_path, how, capsys
):
    plain, incidents, _ = trained("", tmp_path / "plain")
    assert incidents == ()
    losses, (report,), counts = trained(how, tmp_path / "compiled")
    assert report.diagnoses[0].code == "NS602"
    assert (
        "replayed 3 times: the same failure; no number of it is finite" in capsys.readouterr().err
    )
    assert (report.replay.num_failed, report.replay.runs) == (3, 3)
    assert report.replay.eager == "finite"
    assert report.proof.verdict == "proven"
    assert report.proof.minimal == (Atom(remedy="eager"),)
    assert report.audit[-1].action.kind == "redo"
    assert losses[STRIKES] != losses[STRIKES]
    assert losses[:STRIKES] + losses[STRIKES + 1 :] == plain[:STRIKES] + plain[STRIKES + 1 :]
    assert counts[-1] - counts[-2] == 1  # compiled code is what the run goes on with


CODE = {
    "net = torch.compile(net, mode='max-autotune')\n": "net = net\n",
    "@torch.compile(dynamic=False)\ndef f(x):\n    return x\n": (
        "@torch.compiler.disable\ndef f(x):\n    return x\n"
    ),
    "@torch.compile\ndef f(x):\n    return x\n": (
        "@torch.compiler.disable\ndef f(x):\n    return x\n"
    ),
    "net = make()\nnet.head.compile()\n": 'net = make()\nnet.head.compile(backend="eager")\n',
    "args = TrainingArguments(out, torch_compile=True)\n": (
        "args = TrainingArguments(out, torch_compile=False)\n"
    ),
    "import re\nre.compile('a')\n": "import re\nre.compile('a')\n",
}


@pytest.mark.parametrize("before", CODE)
def test_it_is_written_into_the_script(before):
    text = f"import torch\n{before}"
    edits = cured(Source(text), Atom(remedy="eager"), RunFacts())
    assert edited(text, edits) == f"import torch\n{CODE[before]}"


OFF = """
import torch
from torch import nn
torch.manual_seed(0)
@torch.compile(disable=True, fullgraph=True)
def halved(x):
    return x / 2
net = nn.Linear(6, 3)
optimizer = torch.optim.SGD(net.parameters(), 1e-2)
for step in range(4):
    p = net(torch.randn(8, 6))
    loss = halved(p.norm())
    optimizer.zero_grad()
    (loss * (p * (step != 2)).square().mean().log()).backward()
    optimizer.step()
"""


def test_a_script_whose_compiling_is_switched_off_compiles_nothing(tmp_path):
    _, news = investigated(tmp_path / "script.py", OFF)
    report = next(one for one in news if isinstance(one, Report))
    assert report.replay is not None
    assert report.localization is not None
