"""A loop without an optimizer is run again from its very first step on."""

import pytest
from torch.overrides import _get_current_function_mode_stack

from e2e.scripts import HEAD
from loop_scripts import assert_left_alone, investigated, run_script
from nanstop.hosts.loop.first_use import MOST_CALLS
from nanstop.hosts.script import autowatch
from nanstop.report.text.run_end import RunEnd

HEAD = HEAD.replace('BAD = "bad" in sys.argv\n', "")
BARE = """
MAKE
losses = []
for step in range(4):
    x = torch.randn(6, 4)
    x[1] *= 0.0 if BAD else 1.0
    LENGTH
    loss = (length - 1.0).square().mean()
    loss.backward()
    UPDATE
    losses.append(loss.item())
PARAMETERS = [*parameters]
"""
BY_HAND = "with torch.no_grad(): [p.sub_(p.grad, alpha=0.1) for p in parameters]"
CASES = {
    "asked for": (
        "W = torch.randn(4, 3, requires_grad=True); parameters = [W]",
        "length = (x @ W).abs().sum(1).pow(0.5)",
        BY_HAND + "; W.grad = None",
    ),
    "asked for later": (
        "W = torch.randn(4, 3); W.requires_grad_(); parameters = [W]",
        "length = (x @ W).square().sum(1).sqrt()",
        BY_HAND + "; W.grad.zero_()",
    ),
    "parameters": (
        "parameters = [nn.Parameter(torch.randn(4, 3)) for _ in range(2)]",
        "length = (x @ sum(parameters)).square().sum(1).sqrt()",
        "for p in parameters: p.data -= 0.1 * p.grad; p.grad = None",
    ),
    "a module": (
        "net = nn.Linear(4, 3, bias=False); parameters = list(net.parameters())",
        "length = net(x).square().sum(1).sqrt()",
        BY_HAND + "; net.zero_grad()",
    ),
    "a module that was called before": (
        "net = nn.Linear(4, 3, bias=False); parameters = list(net.parameters()); CALLED",
        "length = net(x).square().sum(1).sqrt()",
        BY_HAND + "; net.zero_grad()",
    ),
}  # fmt: skip


def script(make, length, update):
    called = "net(torch.zeros(1, 4)); net.eval(); net(torch.ones(1, 4)); net.train()"
    source = BARE.replace("MAKE", make).replace("CALLED", called)
    return HEAD + source.replace("LENGTH", length).replace("UPDATE", update)


@pytest.mark.parametrize("name", CASES)
def test_the_first_step_of_a_loop_by_hand(tmp_path, name):
    source = script(*CASES[name])
    assert_left_alone(tmp_path, source)
    _, news = investigated(tmp_path / "bad.py", source, BAD=True)
    report = news[0]
    assert report.diagnoses[0].code in ("NS304", "NS206")
    assert (report.incident.at.step, report.localization.key.phase) == (0, "backward")
    assert report.localization.first_bad.source.text.startswith("length = ")
    assert report.replay.num_failed == report.replay.runs


MODES = """
from torch.overrides import _get_current_function_mode_stack as modes
seen = []
"""


@pytest.mark.parametrize(
    "use",
    [
        "nn.Linear(2, 2)(torch.ones(1, 2))",
        'torch.compile(lambda x: x, backend="eager")',
        "torch.optim.SGD([nn.Parameter(torch.ones(1))], 1e-2)",
        "torch.ones(1, requires_grad=True).sum().backward()",
    ],
)
def test_nothing_is_looked_for_after_the_first_use(tmp_path, use, monkeypatch):
    monkeypatch.setattr(autowatch, "_compiles_functions", False)  # and as it was afterwards
    source = HEAD + MODES + f"{use}\n"
    source += "seen = [type(one).__name__ for one in modes()]\nLEFT = nn.Module.__call__\n"
    found, _ = investigated(tmp_path / "script.py", source)
    assert "FirstUse" not in found["seen"]
    assert "_first_call" not in found["LEFT"].__qualname__


def test_a_script_that_trains_nothing_has_its_own_results(tmp_path):
    source = HEAD + f"results = [float(torch.randn(3).sum()) for _ in range({MOST_CALLS})]\n"
    plain = run_script(tmp_path / "plain.py", source)
    found, news = investigated(tmp_path / "script.py", source)
    assert found["results"] == plain["results"]
    assert all(isinstance(one, RunEnd) for one in news)
    assert _get_current_function_mode_stack() == []
