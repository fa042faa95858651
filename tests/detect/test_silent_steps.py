"""What the first steps show of a loss that no weight can change, of factors that are both zero, of
differences that are rounding alone, and of weights that autocast keeps; and of what looks like it.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from loop_scripts import findings_of

torch.set_num_threads(1)


class Adapted(nn.Module):
    """A frozen layer with two factors beside it."""

    def __init__(self, first, second):
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        for layer, scale in ((self.down, first), (self.up, second)):
            layer.weight.data.mul_(scale)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Scaled(nn.Module):
    """A frozen layer beside two frozen matrices, whose inner and outer scales alone are trained."""

    def __init__(self, inner, outer):
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("down", torch.randn(4, 8))
        self.register_buffer("up", torch.randn(8, 4))
        self.inner = nn.ParameterDict({"default": torch.full((4,), inner)})
        self.outer = nn.ParameterDict({"default": torch.full((8,), outer)})

    def forward(self, x):
        inner = F.linear(x, self.down) * self.inner["default"]
        return self.base(x) + F.linear(inner, self.up) * self.outer["default"]


class Dead(nn.Module):
    """A layer that no row is above 0 in, though some are nearly, between two vectors of zeros."""

    def __init__(self, batch):
        super().__init__()
        torch.manual_seed(0)
        self.moved = nn.Parameter(torch.zeros(8))
        self.layer, self.last = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.layer.bias.data.zero_()
        self.least = float(self.layer(batch).max().detach()) + 1e-3

    def forward(self, x):
        return self.last(F.relu(self.layer(x + self.moved) - self.least))


class Normalised(nn.Module):
    """A norm whose variance is a difference of large numbers, or a mean of small ones."""

    def __init__(self, *, cancels):
        super().__init__()
        torch.manual_seed(0)
        self.head, self.cancels = nn.Linear(24, 4), cancels

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        apart = x.pow(2).mean(-1, keepdim=True) - mean.pow(2)
        true = (x - mean).pow(2).mean(-1, keepdim=True)
        return self.head(
            (x - mean) * torch.rsqrt((apart if self.cancels else true).clamp(0) + 1e-5)
        )


def watched(folder, model, loss_fn, *, steps=6, lr=1e-2):
    torch.manual_seed(1)
    batch = {"x": torch.randn(8, 8), "y": torch.randint(0, 4, (8,))}
    trained = [p for p in model.parameters() if p.requires_grad]

    def train():
        optimizer = torch.optim.AdamW(trained, lr=lr)
        for _ in range(steps):
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()

    return findings_of(folder, train)


def classified(model, batch):
    return F.cross_entropy(model(batch["x"])[:, :4], batch["y"])


def large(model, batch):
    x = batch["x"].repeat(1, 3) + 4000.0
    return F.cross_entropy(model(x), batch["y"])


def contrast(size):
    def loss_fn(model, batch):
        rows = model(batch["x"][:size])
        return F.cross_entropy(rows @ rows.T, torch.arange(size))

    return loss_fn


def test_two_factors_of_zeros_never_move(tmp_path):
    finding = watched(tmp_path, Adapted(0.0, 0.0), classified)["NS114"]
    assert finding.title == "gradients are exactly 0, and will be"
    assert "`down.weight`, `up.weight`" in finding.cause
    assert finding.seen.step == 3


def test_two_scales_of_zeros_never_move(tmp_path):
    finding = watched(tmp_path / "both", nn.Sequential(Scaled(0.0, 0.0)), classified)["NS114"]
    assert finding.title == "gradients are exactly 0, and will be"
    assert "`0.inner.default`, `0.outer.default`" in finding.cause
    assert not watched(tmp_path / "one", nn.Sequential(Scaled(0.1, 0.0)), classified)


def begun(value):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    for weight in (model[0].weight, model[2].weight):
        nn.init.constant_(weight, value)
    nn.init.zeros_(model[0].bias)
    return model


def test_two_layers_of_zeros_never_move_beside_a_bias_that_does(tmp_path):
    finding = watched(tmp_path / "both", begun(0.0), classified, steps=12)["NS114"]
    assert finding.title == "gradients are exactly 0, and will be"
    assert "`0.weight`, `0.bias`, `2.weight`" in finding.cause
    one = begun(0.0)
    nn.init.normal_(one[2].weight, std=0.1)
    assert not watched(tmp_path / "one", one, classified, steps=12)


class Scans(nn.Module):
    """A state space whose rates are the same in each channel at first, and tell channels apart."""

    def __init__(self):
        super().__init__()
        self.mix, self.rates = nn.Linear(8, 8), nn.Parameter(torch.arange(1.0, 5.0).repeat(8, 1))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head((self.mix(x)[..., None] * (-self.rates).exp()).sum(-1))


def test_units_that_begin_alike_and_get_one_gradient_are_told(tmp_path):
    finding = watched(tmp_path / "alike", begun(0.1), classified, steps=12)["NS114"]
    assert finding.title == "units of a layer are copies of each other"
    assert "all rows of `0.weight` hold the same numbers" in finding.cause
    assert finding.seen.step == 8
    one = begun(0.1)
    nn.init.normal_(one[2].weight, std=0.1)
    assert not watched(tmp_path / "told apart", one, classified, steps=12)
    assert not watched(tmp_path / "channels", Scans(), classified, steps=12)


class Spread(nn.Module):
    """A layer whose weights have means that are drawn, and spreads that all begin alike."""

    def __init__(self):
        super().__init__()
        self.means = nn.Parameter(0.3 * torch.randn(4, 8))
        self.spreads = nn.Parameter(torch.full((4, 8), -30.0))

    def forward(self, x):
        noise = torch.ones_like(self.means)
        return F.linear(x, self.means + F.softplus(self.spreads) * noise)


def test_units_whose_means_are_drawn_are_no_copies(tmp_path):
    def of_divergence(model, batch):
        return classified(model, batch) + 1e-3 * model.spreads.square().mean()

    torch.manual_seed(0)
    assert not watched(tmp_path, Spread(), of_divergence, steps=12)


class TwoHeads(nn.Module):
    """A head that learns, and one of zeros, the values of what has had no reward yet."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.value = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        for p in self.value.parameters():
            nn.init.zeros_(p)

    def forward(self, x):
        hidden = self.body(x).tanh()
        return self.head(hidden), self.value(hidden)


def test_a_value_head_of_zeros_beside_a_policy_is_at_its_least(tmp_path):
    def loss_fn(model, batch):
        logits, value = model(batch["x"])
        return F.cross_entropy(logits, batch["y"] % 4) + value.square().mean()

    assert not watched(tmp_path, TwoHeads(), loss_fn, steps=12)


def test_zeros_beside_units_that_are_never_above_0_are_not_why(tmp_path):
    torch.manual_seed(1)
    model = Dead(torch.randn(8, 8))
    assert [*watched(tmp_path, model, classified, steps=20)] == ["NS701"]


@pytest.mark.parametrize(("first", "second"), [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0)])
def test_one_factor_of_zeros_is_how_adapters_begin(first, second, tmp_path):
    assert not watched(tmp_path, Adapted(first, second), classified)


def test_a_value_network_of_zeros_before_its_first_reward_is_at_its_least(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    for p in model.parameters():
        nn.init.zeros_(p)
    assert not watched(tmp_path, model, lambda m, b: m(b["x"]).square().mean(), steps=20)


def test_a_contrast_within_one_row_is_constant(tmp_path):
    finding = watched(tmp_path / "one", nn.Linear(8, 8), contrast(1))["NS701"]
    assert finding.title == "each row is compared with itself alone"
    assert not watched(tmp_path / "eight", nn.Linear(8, 8), contrast(8))


class Attends(nn.Module):
    """Attention to as many tokens as there are keys."""

    def __init__(self, keys):
        super().__init__()
        self.keys, self.value = nn.Linear(8, keys), nn.Linear(8, 1)

    def forward(self, x):
        return self.keys(x).softmax(-1).mean(-1, keepdim=True) * self.value(x).sigmoid()


def test_a_softmax_over_one_output_is_constant_and_attention_to_one_token_is_none(tmp_path):
    def shares(model, batch):
        return (model(batch["x"]).softmax(1) - 0.3 * batch["y"][:, None]).square().mean()

    def content(model, batch):
        return F.relu(-1.0 - model(batch["x"])).mean()

    finding = watched(tmp_path / "one", nn.Linear(8, 1), shares)["NS701"]
    assert finding.title == "each row is compared with itself alone"
    assert not watched(tmp_path / "two", nn.Linear(8, 2), shares)
    finding = watched(tmp_path / "attention", Attends(1), content)["NS701"]
    assert finding.title == "the objective has no gradient"
    assert "relu is sent a gradient that is not 0, and passes on none" in finding.lines


def test_a_variance_of_roundings_is_told(tmp_path):
    finding = watched(tmp_path / "one", Normalised(cancels=True), large)["NS208"]
    assert "made of rounding errors" in finding.cause
    assert not watched(tmp_path / "two", Normalised(cancels=False), large)


def straight_through(model, batch):
    kept = model(batch["x"])
    return F.cross_entropy((kept + (kept.round() - kept).detach())[:, :4], batch["y"])


def policy(model, batch):
    logp = model(batch["x"]).log_softmax(-1)[:, 0]
    with torch.no_grad():
        old = model(batch["x"].clone()).log_softmax(-1)[:, 0] * (1.0 + 1e-7)
    return -((logp - old).exp() * (batch["y"].float() + 1.0)).mean()


@pytest.mark.parametrize("loss_fn", [straight_through, policy])
def test_differences_that_are_meant_to_vanish_do_no_harm(loss_fn, tmp_path):
    assert "NS208" not in watched(tmp_path, nn.Linear(8, 8), loss_fn)


@pytest.mark.parametrize(
    ("around", "cache", "told"),
    [("loop", True, True), ("loop", False, False), ("step", True, False)],
)
def test_weights_that_autocast_keeps_over_an_update_are_told(around, cache, told, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    batch = {"x": torch.randn(8, 8), "y": torch.randint(0, 4, (8,))}

    def cast(where):
        on = torch.autocast("cpu", torch.bfloat16, cache_enabled=cache)
        return on if where == around else nullcontext()

    def train():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with cast("loop"):
            for _ in range(4):
                optimizer.zero_grad()
                with cast("step"):
                    loss = classified(model, batch)
                loss.backward()
                optimizer.step()

    assert ("NS208" in findings_of(tmp_path, train)) == told
