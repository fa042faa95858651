"""Hooks of a script on what autograd saves: what they make of it is found where they make it, those
that give back what they were given are no news, and what they remember is left as it was.
"""

import linecache

import pytest
import torch

from e2e.scripts import HEAD
from loop_scripts import investigated, run_script
from nanstop.diagnose.evidence.reading import rounded_at
from nanstop.records import Evidence
from nanstop.report.text.run_end import RunEnd
from versions import needs

HEAD = HEAD.replace('BAD = "bad" in sys.argv\n', "")
LOOP = """
class Packed(torch.autograd.graph.saved_tensors_hooks):
    def __init__(self):
        self.number, self.held = 0, {}
        super().__init__(self.pack, self.unpack)

    def pack(self, saved):
        self.number += 1
        self.held[self.number] = packed(saved)
        return self.number

    def unpack(self, number):
        return unpacked(self.held.pop(number))

net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(net.parameters(), 1e-2)
hooks, losses = Packed(), []
for step in range(5):
    x, y = torch.randn(6, 8), torch.randn(6, 1)
    if step == 3:
        CHANGE
    with hooks:
        error = (net(x) - y).square()
        if step == 3 and SMALL:
            error = error * 1e-16 + 1e-16
        loss = (error + (0 if SMALL else 1e-6)).sqrt().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
PARAMETERS = list(net.parameters())
"""
HALVES = """
def packed(saved):
    return saved.half() if saved.is_floating_point() else saved

def unpacked(kept):
    return kept.float() if kept.dtype == torch.float16 else kept
"""
BYTES = """
def packed(saved):
    if not saved.is_floating_point() or saved.dim() < 2:
        return saved, None
    scale = saved.abs().amax(-1, keepdim=True) / 127
    return (saved / scale).round(), scale

def unpacked(kept):
    return kept[0] if kept[1] is None else kept[0] * kept[1]
"""
EXACT = """
def packed(saved):
    return saved.double().clone() if saved.is_floating_point() else saved

def unpacked(kept):
    return kept.float() if kept.dtype == torch.float64 else kept
"""
READ = needs("torch", "2.8", "says which hooks there are on what autograd saves")
LARGE, EMPTY = "x[1] = 1e5 * torch.rand(8)", "x[1] = 0"


def told(folder, source):
    """Return what is said; what the hooks remember is what they do without nanstop."""
    plain = run_script(folder / "plain.py", source)
    watched, news = investigated(folder / "watched.py", source)
    assert str(watched["losses"]) == str(plain["losses"])
    assert watched["hooks"].number == plain["hooks"].number
    assert watched["hooks"].held == {}
    assert news
    assert all(
        torch.equal(a, b) or not a.isfinite().all()
        for a, b in zip(watched["PARAMETERS"], plain["PARAMETERS"], strict=True)
    )
    return [one for one in news if not isinstance(one, RunEnd)]


@READ
@pytest.mark.parametrize(
    ("hooks", "change", "code", "line"),
    [(HALVES, LARGE, "NS201", "saved.half()"), (BYTES, EMPTY, "NS206", "saved / scale")],
    ids=["halves", "bytes"],
)
def test_what_a_hook_makes_of_a_saved_tensor(tmp_path, hooks, change, code, line):
    source = HEAD + hooks + LOOP.replace("CHANGE", change).replace("SMALL", "False")
    report = told(tmp_path, source)[0]
    best, replay = report.diagnoses[0], report.replay
    assert (best.code, best.confidence, report.incident.at.step) == (code, "certain", 3)
    source = report.localization.first_bad.source
    assert line in linecache.getline(source.file, source.line)
    assert replay.num_failed == replay.runs
    assert replay.note.startswith("only under the script's own hooks on what autograd saves")


@READ
def test_a_hook_that_rounds_to_0_what_a_derivative_divides_by(tmp_path):
    source = HEAD + HALVES + LOOP.replace("CHANGE", "pass").replace("SMALL", "True")
    report = told(tmp_path, source)[0]
    (rounds,) = rounded_at(Evidence(localization=report.localization))
    assert report.diagnoses[0].code == "NS304"
    assert rounds in report.diagnoses[0].lines
    assert report.localization.vanished.source.text.startswith("return saved.half()")
    assert "rounded to 0" in report.diagnoses[0].cause


@pytest.mark.parametrize("change", [LARGE, EMPTY, "pass"])
@pytest.mark.parametrize("small", [True, False])
def test_hooks_that_give_back_what_they_were_given_are_no_news(tmp_path, change, small):
    loop = LOOP.replace("CHANGE", change).replace("SMALL", str(small))
    assert told(tmp_path, HEAD + EXACT + loop) == []


def test_a_failure_that_hooks_have_no_part_in_is_found_without_them(tmp_path):
    loop = LOOP.replace("CHANGE", "y = y / 0").replace("SMALL", "False")
    report = told(tmp_path, HEAD + EXACT + loop)[0]
    assert not report.replay.note
    assert report.replay.num_failed == report.replay.runs
    assert report.diagnoses[0].code != "NS603"


def test_a_cast_that_rounds_to_0_before_a_derivative(tmp_path):
    source = """
hooks = type("Hooks", (), {"number": 0, "held": {}})
net = nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), 1e-2)
losses = []
for step in range(3):
    error = (net(torch.randn(6, 8))).square() * (1e-16 if step == 1 else 1.0) + 1e-16
    stored = error.half() if step == 1 else error
    loss = stored.float().sqrt().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
PARAMETERS = list(net.parameters())
"""
    report = told(tmp_path, HEAD + source)[0]
    assert report.localization.vanished.source.text.startswith("stored = error.half()")
    assert "rounded to 0" in report.diagnoses[0].cause
