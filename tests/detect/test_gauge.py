"""A range that grows is announced by the watch in time, and healthy ones are passed over in
silence.
"""

import math
from collections import Counter, defaultdict

import pytest
import torch
from torch import nn

import nanstop
import tiny
from nanstop.detect import gauge
from nanstop.session import looks
from nanstop.store.incidents import load_series

SECONDS_A_STEP, SECONDS_A_GLANCE = 0.1, 2e-5


@pytest.fixture(autouse=True)
def nothing_was_compiled(monkeypatch):
    """The gauge leaves a process alone in which something was compiled, and another test may
    have done so.
    """
    monkeypatch.setattr("torch._dynamo.utils.counters", defaultdict(Counter))


class Boosted(nn.Module):
    """A module whose output is scaled, as if a weight of it grew; ``bits``: of the scale."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.bits = 0.0
        self.largest = 0.0

    def forward(self, x):
        root = 2.0 ** (self.bits / 2)
        out = self.inner(x) * root * root
        self.largest = float(out.detach().abs().max())
        return out


class Block(nn.Module):
    """A residual block under a norm: what it adds may grow without a trace in the loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 16)
        self.mlp = Boosted(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 64)

    def forward(self, ids):
        x = self.embed(ids)
        logits = self.head(self.norm(x + self.mlp(x)))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


class Llama(nn.Module):
    """A real one, the MLP of whose second layer is boosted."""

    def __init__(self):
        super().__init__()
        self.inner = tiny.llama()
        layer = self.inner.model.layers[1]
        self.mlp = layer.mlp = Boosted(layer.mlp)

    def forward(self, ids):
        return self.inner(input_ids=ids, labels=ids).loss


class Run:
    """A training in float16, by autocast or with half weights, that is watched in the
    background.
    """

    def __init__(self, model, folder, monkeypatch, *, half=False):
        self.model = model.half() if half else model
        self.autocast = not half
        self.folder = folder
        self.step = self.num_glances = 0
        self.gauges = []
        monkeypatch.setattr(looks, "Gauge", self._gauge)

    def _gauge(self, view, _clock):
        """A gauge for which every step takes the same time, and every glance at the clock:
        when it looks is not the machine's affair.
        """
        self.gauges.append(gauge.Gauge(view, self._clock))
        return self.gauges[-1]

    def _clock(self):
        self.num_glances += 1
        return self.step * SECONDS_A_STEP + self.num_glances * SECONDS_A_GLANCE

    def headroom(self):
        """Bits by which the boosted output may grow."""
        with torch.no_grad():
            self.model(torch.arange(3, 19).reshape(2, 8))
        return math.log2(65504 / self.model.mlp.largest)

    def train(self, bits, num_steps=240):
        """NS101 and the step it was said at, or None, and the step at which the output
        overflowed, or None.
        """
        generator = torch.Generator().manual_seed(3)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        said = None

        def loss_of(ids):
            with torch.autocast("cpu", dtype=torch.float16, enabled=self.autocast):
                return self.model(ids)

        with nanstop.watch(self.model, optimizer, policy="observe", out=self.folder) as watch:
            for self.step in range(num_steps):
                self.model.mlp.bits = bits(self.step)
                watch.step(loss_of, torch.randint(3, 64, (2, 8), generator=generator))
                if not math.isfinite(self.model.mlp.largest):
                    return said, self.step
                watch.update(clip=1.0)
                found = [one for one in watch.findings if one.code == "NS101"]
                if said is None and found:
                    said = found[0], self.step
        return said, None


def holds(said, overflow, run):
    """Whether an announcement came 20 steps ahead, with an interval that holds, within the
    gauge's budget.
    """
    finding, step = said
    earliest, latest = (int(word) for word in finding.lines[0].split() if word.isdigit())
    assert overflow - step >= 20
    assert earliest <= overflow <= latest
    assert run.gauges[0]._spent <= gauge.SHARE * run.step * SECONDS_A_STEP
    return finding


@pytest.mark.parametrize("half", [False, True], ids=["autocast", "half weights"])
@pytest.mark.parametrize("start", [-5.0, pytest.param(-10.0, marks=pytest.mark.slow)])
def test_slow_growth_is_announced_in_time(tmp_path, monkeypatch, start, half):
    run = Run(Block(), tmp_path, monkeypatch, half=half)
    first = run.headroom() + start
    said, overflow = run.train(lambda step: first + step / 40, 500)
    assert said is not None
    assert holds(said, overflow, run).where.startswith("mlp")


def test_what_was_looked_at_on_the_way_is_the_heat_map_of_the_report(tmp_path, monkeypatch):
    run = Run(Block(), tmp_path, monkeypatch)
    first = run.headroom() - 5.0
    _, overflow = run.train(lambda step: first + step / 4)
    assert overflow is not None
    names = {one.name: one for one in load_series(tmp_path / "series.json")}
    (boosted,) = (one for name, one in names.items() if name.endswith(" float16 mlp"))
    assert len(boosted.steps) > 3
    left = [first + 5.0 - (first + step / 4) for step in boosted.steps]
    assert all(abs(bits - known) < 1.0 for bits, known in zip(boosted.values, left, strict=True))
    page = (tmp_path / "report.html").read_text()
    assert "Headroom of the layers" in page
    assert '<th scope="row">mlp</th>' in page


@pytest.mark.slow
def test_slow_growth_in_a_real_llama_is_announced_in_time(tmp_path, monkeypatch):
    run = Run(Llama(), tmp_path, monkeypatch)
    first = run.headroom() - 5.5
    said, overflow = run.train(lambda step: first + step / 40)
    assert said is not None
    assert "layers.1" in holds(said, overflow, run).where


@pytest.mark.parametrize(
    "kind",
    ["warm-up", *(pytest.param(one, marks=pytest.mark.slow) for one in ("plateau", "spike"))],
)
def test_healthy_twins_are_passed_over(tmp_path, monkeypatch, kind):
    run = Run(Block(), tmp_path, monkeypatch)
    top = run.headroom()
    noise = torch.randn(240, generator=torch.Generator().manual_seed(1)).tolist()
    series = {
        "plateau": lambda step: top - 4 + 0.3 * noise[step],
        "warm-up": lambda step: top - 2.5 + math.log2(1.02 - math.exp(-step / 60)),
        "spike": lambda step: top - (1.5 if 120 <= step < 124 else 6),
    }
    assert run.train(series[kind]) == (None, None)
    assert run.gauges[0]._num_looks > 12


def test_a_look_that_cannot_be_taken_is_said_once_and_training_goes_on(
    tmp_path, monkeypatch, capsys
):
    class Unreadable(gauge.ModuleRanges):
        def read(self):
            raise RuntimeError("no reading")

    monkeypatch.setattr(gauge, "ModuleRanges", Unreadable)
    run = Run(Block(), tmp_path, monkeypatch)
    assert run.train(lambda _: 0.0, 6) == (None, None)
    assert capsys.readouterr().err.count("ranges are no longer followed") == 1


class Squared(nn.Module):
    """A norm that squares in ``dtype``: in float16 a large channel is Inf, its inverse root 0,
    and all is finite.
    """

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 1)
        self.dtype = dtype

    def forward(self, x):
        wide = self.up(x) * 1e3
        narrow = wide.to(self.dtype)
        return self.down((narrow * torch.rsqrt(narrow.square().mean(-1, keepdim=True))).float())


@pytest.mark.parametrize(("dtype", "codes"), [(torch.float16, ["NS209"]), (torch.float32, [])])
def test_half_precision_inside_a_module_of_a_float32_run_is_looked_into(tmp_path, dtype, codes):
    model, x = Squared(dtype), torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with nanstop.watch(model, optimizer, policy="observe", out=tmp_path) as watch:
        for _ in range(4):
            watch.step(lambda batch: model(batch).square().mean(), x)
            watch.update(clip=1.0)
    assert [one.code for one in watch.findings] == codes
