"""A number, or a line, that a narrow format does not hold."""

from contextlib import suppress

import pytest
import torch
from torch import nn

import nanstop
from e2e.forms.spoiled_step import ROWS, WIDTH, batch
from nanstop.records.remedies import not_of_the_model
from nanstop.report.text.terminal import render


class Masked(nn.Module):
    """Scores under autocast with a mask's number that float16 does not hold."""

    def __init__(self, *, as_weights, in_place=False):
        super().__init__()
        self.inner, self.as_weights = nn.Linear(WIDTH, WIDTH), as_weights
        self.in_place = in_place

    def forward(self, x, mask):
        with torch.autocast("cpu", dtype=torch.float16):
            scores = self.inner(x)
            if self.in_place:
                scores.masked_fill_(~mask, -1e9)
            else:
                scores = scores.masked_fill(~mask, -1e9)
        return scores.float().softmax(-1) if self.as_weights else 1e-3 * scores.float()


@pytest.mark.parametrize(("as_weights", "in_place"), [(True, False), (False, False), (True, True)])
def test_a_fill_beyond_its_format_is_a_fill_with_what_that_holds(as_weights, in_place):
    """Where the number itself is used, another one is another function."""
    torch.manual_seed(0)
    net = Masked(as_weights=as_weights, in_place=in_place)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    given = batch(0)
    given["m"][:, :2] = False
    with suppress(RuntimeError), nanstop.watch(net, optimizer) as watch:
        watch.step(lambda now: (net(now["x"], now["m"]) * now["t"]).sum(), given)
    (incident,) = watch.incidents
    (atom,) = incident.proof.minimal
    assert (atom.remedy == "held_fill") == as_weights
    assert incident.proof.verdict == "proven"
    made = "scores.masked_fill_(" if in_place else "scores = scores.masked_fill("
    new, text = f"+ {made}~mask, torch.finfo(scores.dtype).min)", render(incident)
    assert (new in text) == as_weights
    assert "not run" not in text


def energy(scores):
    return scores.pow(2).sum() / 1024


@pytest.mark.slow
def test_a_line_not_of_the_model_that_overflows_in_half_is_computed_in_float32():
    """The line alone is what a person would change: no module holds it."""
    torch.manual_seed(0)
    net = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    rows = 300 * torch.randn(32, WIDTH)

    def loss(x):
        with torch.autocast("cpu", dtype=torch.float16):
            scores = net(x)
        return energy(scores)

    with nanstop.watch(net, optimizer) as watch:
        watch.step(loss, rows)
        assert watch.update()
    (incident,) = watch.incidents
    assert [atom.remedy for atom in incident.proof.minimal] == ["fp32_line"]
    assert incident.proof.verdict == "proven"
    assert incident.audit[-1].action.kind == "adopt"
    assert "+ return scores.float().pow(2).sum() / 1024" in render(incident)


class Spread(nn.Module):
    """A variance as a difference of squares, which float16 rounds below 0."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        nn.init.constant_(self.inner.bias, 20.0)

    def forward(self, x):
        x = self.inner(x)
        mean = x.mean(-1, keepdim=True)
        return (x - mean) / torch.sqrt((x * x).mean(-1, keepdim=True) - mean * mean + 1e-5)


def test_what_only_a_half_format_rounds_away_is_computed_in_float32():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Spread()).half()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    given = batch(0)
    with nanstop.watch(net, optimizer) as watch:
        watch.step(lambda now: (net(now["x"].half()) * now["t"]).sum(), given)
        assert watch.update()
    (incident,) = watch.incidents
    assert incident.diagnoses[0].code == "NS204"
    assert (incident.proof.verdict, incident.proof.safety) == ("proven", "safe")
    assert {atom.remedy for atom in incident.proof.minimal} == {"island"}


def incident_of(net, loss, rows, *, lr=1e-3):
    """The only incident of one step, which an update follows, and the norm of its gradients."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    with nanstop.watch(net, optimizer) as watch:
        watch.step(loss, rows)
        norm = watch.update()
    assert norm is not None
    (incident,) = watch.incidents
    return incident, norm


def share(scores):
    left = 1.0 - torch.cos(scores * 0.02)
    return (scores / left).mean()


def agreement(a, b):
    return nn.functional.cross_entropy(
        a @ b.T / 1e4,
        torch.arange(len(a)),
    )


def test_what_a_line_before_has_rounded_is_computed_in_float32_there():
    """The quotient in float32 is still one by 0."""
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    nn.init.zeros_(net[0].weight)
    nn.init.ones_(net[0].bias)
    net.half()
    incident, norm = incident_of(net, lambda x: share(net(x)), batch(0)["x"].half())
    assert norm
    assert [atom.remedy for atom in incident.proof.minimal] == ["fp32_line"]
    assert incident.proof.verdict == "proven"
    assert "+ left = 1.0 - torch.cos(scores.float() * 0.02)" in render(incident)
    of_loss = not_of_the_model(incident.proof.minimal, [incident.localization.first_bad])
    assert of_loss == incident.proof.minimal  # whoever loads the model has no such line


def standardised(rewards):
    rewards = rewards.half()
    return (rewards - rewards.mean()) / (rewards.std() + 1e-8)


def energies(scores):
    kept = scores.square().sum(-1).half()
    return kept.mean() / 1000


def rounded(scores):
    kept = scores.half().float()
    return (scores + (kept - scores).detach()).square().mean() / 1e10


@pytest.mark.parametrize(
    ("loss", "factor", "new"),
    [
        (rounded, 1e6, "+ kept = scores.float()"),
        (energies, 300.0, "+ kept = scores.square().sum(-1).float()"),
        (
            lambda scores: (scores.mean(-1) * standardised(torch.ones(ROWS)).float()).mean(),
            1.0,
            "+ return (rewards.float() - rewards.float().mean()) / (rewards.float().std() + 1e-8)",
        ),
    ],
)
def test_a_line_in_float32_is_typed_as_a_person_would(loss, factor, new):
    torch.manual_seed(0)
    net = nn.Linear(WIDTH, WIDTH)
    incident, _ = incident_of(
        net, lambda x: loss(net(x) * factor), batch(0)["x"].abs() + 1, lr=1e-9
    )
    assert [atom.remedy for atom in incident.proof.minimal] == ["fp32_line"]
    assert incident.proof.verdict == "proven"
    text = render(incident)
    assert new in text
    assert "another form" not in text


def test_a_line_that_autocast_rounds_is_typed_in_a_block_without_it():
    torch.manual_seed(0)
    net = nn.Linear(WIDTH, WIDTH)
    rows = 300 * torch.randn(ROWS, WIDTH)

    def loss(x):
        with torch.autocast("cpu", dtype=torch.float16):
            return agreement(net(x), x)

    incident, norm = incident_of(net, loss, rows, lr=1e-4)
    assert norm
    assert [atom.remedy for atom in incident.proof.minimal] == ["fp32_line"]
    assert incident.proof.verdict == "proven"
    text = render(incident)
    assert '+ with torch.autocast("cpu", enabled=False):' in text
    assert "+         a.float() @ b.T.float() / 1e4," in text
    assert "another form" not in text


class Scores(nn.Module):
    """Products that float16 does not hold, of weights that are large."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        scores = q @ k.T
        return scores / 1e5


def test_a_module_of_the_scripts_own_is_typed_as_its_line():
    """The module is kept in float32 meanwhile: that costs no call of Python for each function."""
    torch.manual_seed(0)
    net = nn.Sequential(Scores())
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(600.0)

    def loss(x):
        with torch.autocast("cpu", dtype=torch.float16):
            return nn.functional.cross_entropy(net(x), torch.arange(ROWS))

    incident, _ = incident_of(net, loss, batch(0)["x"], lr=1e-9)
    assert incident.proof.verdict == "proven"
    assert [atom.remedy for atom in incident.proof.minimal] == ["island"]
    assert [atom.remedy for atom in incident.proof.typed] == ["fp32_line"]
    text = render(incident)
    assert "help: keep layer `0` in float32" in text
    assert "+     scores = q.float() @ k.T.float()" in text
    assert "another form" not in text


class RootMeanSquare(nn.Module):
    """A norm whose eps float16 rounds to 0."""

    def __init__(self, eps=1e-8):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(WIDTH)), eps

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def test_a_norm_of_the_scripts_own_is_typed_in_float32_and_back():
    """Weights in half precision want its result as narrow as it was."""
    torch.manual_seed(0)
    net = nn.Sequential(RootMeanSquare(), nn.Linear(WIDTH, WIDTH)).half()
    rows = batch(0)["x"].half()
    rows[1] = 0.0
    incident, _ = incident_of(net, lambda x: net(x).float().square().mean(), rows)
    assert [atom.remedy for atom in incident.proof.minimal] == ["island"]
    text = render(incident)
    assert "torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)" in text


class Decay(nn.Module):
    """What an earlier row leaves to the later ones, by differences of sums."""

    def __init__(self):
        super().__init__()
        self.rate, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        passed = nn.functional.softplus(self.rate(x) + 8.0).cumsum(0)
        kept = (x * torch.exp(passed)).cumsum(0) * torch.exp(-passed)
        return self.out(kept)


def test_a_line_of_the_whole_models_own_forward_is_narrow_again_for_weights_in_half():
    torch.manual_seed(0)
    net = Decay().half()
    incident, _ = incident_of(net, lambda x: net(x).float().square().mean(), batch(0)["x"].half())
    assert incident.proof.verdict == "proven"
    assert [atom.remedy for atom in incident.proof.minimal] == ["fp32_line"]
    assert "torch.exp(-passed.float())).to(passed.dtype)" in render(incident)


class Unit(nn.Module):
    """Rows of norm one, in a format that has no 1e-12."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        rows = self.inner(x).half()
        length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        return (rows / length.clamp_min(1e-12)).float()


def test_a_guard_is_held_against_healthy_rows_where_float32_is_without_a_cast():
    """There the derivative is 1e12 in the row of zeros, which no cure has to have."""
    torch.manual_seed(0)
    net = nn.Sequential(Unit(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with nanstop.watch(net, optimizer) as watch:
        for step in range(3):
            given = batch(step)
            if step == 2:
                given["x"][1] = 0.0
            watch.step(lambda now: (net(now["x"]) * now["t"]).sum(), given)
            watch.update()
    (incident,) = watch.incidents
    (atom,) = incident.proof.minimal
    assert incident.proof.reference.without_casts
    assert (incident.proof.verdict, atom.remedy) == ("proven", "form")
