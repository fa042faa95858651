"""Regions that grow: with the module where a step fails under them, and to what is around them."""

import pytest
import torch
from torch import nn

import nanstop
from nanstop.prove.regions import around, is_within, with_module
from nanstop.records import Atom, FailureKey


class Experts(nn.ModuleList):
    pass


class Block(nn.Module):
    """What ``up`` gives is large and nearly alike; ``down`` takes differences of it."""

    def __init__(self, *, large: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = Mlp()
        with torch.no_grad():
            self.norm.weight.mul_(large)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8)
        self.experts = Experts([nn.Linear(8, 8), nn.Linear(8, 8)])
        with torch.no_grad():
            self.up.weight.mul_(1e-5)
            self.up.bias.fill_(3e4)
            self.down.weight.copy_(torch.eye(8) - torch.eye(8).roll(1, 0))

    def forward(self, x):
        return self.down(self.up(x))


class Model(nn.Module):
    def __init__(self, *, large: float = 1.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(large=1.0), Block(large=large)])
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def island(target, value="float32"):
    return Atom(remedy="island", target=target, value=value)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["layers.0.mlp.up"], "layers.0.mlp"),
        (["layers.0.mlp.up", "layers.0.mlp.down"], "layers.0.mlp"),
        (["layers.0.norm", "layers.0.mlp.down"], "layers.0"),
        (["layers.0.mlp.experts.0", "layers.0.mlp.experts.1"], "layers.0.mlp"),
        (["layers.0.mlp.experts.0"], "layers.0.mlp"),
        (["layers.0.mlp"], "layers.0"),
        (["layers.0"], None),
        (["layers.0.mlp", "layers.1.mlp"], None),
        (["head"], None),
        ([], None),
    ],
)
def test_what_is_around_regions_ends_at_the_block(targets, expected):
    autocast = Atom(remedy="outer_autocast", value="float16")
    held = (*map(island, targets), autocast)
    grown = around(held, Model())
    assert grown == (None if expected is None else (island(expected), autocast))


def test_a_region_grows_by_the_module_that_fails():
    key = FailureKey(kind="nan", phase="forward", op="aten.mm.default", module="layers.0.mlp.down")
    held = (island("layers.0.mlp.up"),)
    both = (*held, island("layers.0.mlp.down"))
    assert with_module(held, key) == both
    assert (is_within(held, key), is_within(both, key)) == (False, True)
    assert with_module((), key) is None


def test_a_region_that_passes_and_bends_is_grown_until_it_agrees(tmp_path):
    """In float16 the differences of what `up` gives in float32 are gone again."""
    torch.manual_seed(0)
    model = Model(large=5e5)
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)

    def loss(batch):
        with torch.autocast("cpu", torch.float16):
            return model(batch).float().square().mean()

    with nanstop.watch(model, optimizer, out=str(tmp_path)) as watch:
        for _ in range(2):
            watch.step(loss, torch.randn(4, 8))
            watch.update()
    (incident,) = watch.incidents
    assert incident.proof.verdict == "proven"
    assert [(a.remedy, a.target) for a in incident.proof.minimal] == [("island", "layers.1.mlp")]
    outcomes = {tuple(a.target for a in t.atoms): t.outcome for t in incident.proof.tried}
    assert outcomes[("layers.1.mlp.up",)] == "pass"


def test_a_region_whose_own_numbers_do_not_fit_is_grown(tmp_path):
    """Half weights, and no autocast that what is given in float32 could meet them in."""
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        for layer, gain in zip(model.layers, (1.0, 6e4), strict=True):
            layer.mlp.up.bias.fill_(0.0)
            layer.mlp.up.weight.copy_(gain * torch.eye(8))
        model.layers[1].mlp.down.weight.mul_(1e-5)
    model.half()
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    with nanstop.watch(model, optimizer, out=str(tmp_path)) as watch:
        watch.step(lambda batch: model(batch).float().square().mean(), torch.randn(4, 8).half())
        watch.update()
    (incident,) = watch.incidents
    assert incident.proof.verdict == "proven"
    assert [(a.remedy, a.target) for a in incident.proof.minimal] == [("island", "layers.1.mlp")]
