"""The learning rate against the weights that there are: real scripts, told (NS113) or not."""

import math
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

import hf_cases
import nanstop
from loop_scripts import run_script
from nanstop.decide.policy import Policy
from nanstop.hosts.model.optimizer_facts import optimizer_facts
from nanstop.numerics.weights import longest_step, taken_step
from nanstop.records import StepPerRate
from nanstop.session.factory import opener
from nanstop.store.incidents import Store
from noticed import noticed

torch.set_num_threads(1)

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
X = torch.randn(64, 16)
Y = X @ torch.randn(16, 1)


def mlp(width):
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 1))

"""
TRAIN = """
for step in range(3):
    optimizer.zero_grad()
    F.mse_loss(net(X), Y).backward()
    optimizer.step()
"""

FAR = {
    "a slip": "net = mlp(512); optimizer = torch.optim.Adam(net.parameters(), 1.0)",
    "of one group": """
net = mlp(512)
first, last = net[0].parameters(), net[2].parameters()
optimizer = torch.optim.AdamW([{"params": first}, {"params": last, "lr": 2.0}], 1e-3)
""",
    "under another name": """
class Descent(torch.optim.Adam):
    pass

net = mlp(512); optimizer = Descent(net.parameters(), 1.0)
""",
    "written by hand": """
class Signs(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad.sign()

net = mlp(512); optimizer = Signs(net.parameters(), 1.0)
""",
    "beside zeros": """
net = mlp(512)
nn.init.zeros_(net[2].weight)
optimizer = torch.optim.NAdam(net.parameters(), 1.0)
""",
}

USUAL = {
    "regression": "net = nn.Linear(16, 1); optimizer = torch.optim.Adam(net.parameters(), 0.1)",
    "zeros": """
net = nn.Linear(16, 1)
nn.init.zeros_(net.weight)
optimizer = torch.optim.Adam(net.parameters(), 0.1)
""",
    "small network": "net = mlp(64); optimizer = torch.optim.AdamW(net.parameters(), 0.1)",
    "grid of features": """
class Grid(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.mlp = nn.Embedding(4096, 2), nn.Linear(2 * 16, 1)
        nn.init.uniform_(self.table.weight, -1e-4, 1e-4)

    def forward(self, x):
        return self.mlp(self.table((x * 1000).long() % 4096).flatten(1))

net = Grid(); optimizer = torch.optim.Adam(net.parameters(), 1e-2)
""",
    "a warm-up that multiplies": """
net = mlp(512); optimizer = torch.optim.Adam(net.parameters(), 1.0)
torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 512**-0.5 * step * 4000**-1.5)
""",
    "relative": "net = mlp(512); optimizer = torch.optim.Adafactor(net.parameters(), 0.1)",
    "relative under another name": """
class Factors(torch.optim.Adafactor):
    pass

net = mlp(512); optimizer = Factors(net.parameters(), 0.1)
""",
    "not by the rate, whatever it is called": """
class Adamant(torch.optim.SGD):
    pass

net = mlp(512); optimizer = Adamant(net.parameters(), 1.5)
""",
    "not by the rate": "net = mlp(512); optimizer = torch.optim.SGD(net.parameters(), 0.5)",
}


def told(folder, setup):
    """What is said of NS113 in a script."""
    said = []
    opened = opener(Policy(), Store(folder / "out"), said.append)
    run_script(folder / "train.py", f"{HEAD}{setup}\n{TRAIN}", opened)
    return [one for one in said if isinstance(one, str) or getattr(one, "code", "") == "NS113"]


@pytest.mark.parametrize("setup", FAR.values(), ids=FAR)
def test_a_step_that_is_much_longer_than_the_weights_is_told(tmp_path, setup):
    (finding,) = told(tmp_path, setup)
    assert (finding.code, finding.confidence) == ("NS113", "likely")
    assert "typical weights here are 0." in finding.cause


@pytest.mark.parametrize("setup", USUAL.values(), ids=USUAL)
def test_what_trains_as_it_stands_is_not_told(tmp_path, setup):
    assert told(tmp_path, setup) == []


@pytest.mark.parametrize(("rate", "told"), [(1e-3, False), (0.0, True)])
def test_a_warm_up_that_begins_at_0_is_none_that_stays_there(tmp_path, rate, told):
    options = {"max_steps": 3, "warmup_steps": 2, "learning_rate": rate}
    trainer = hf_cases.build("trainer", tmp_path, **options)
    watch = nanstop.watch(trainer, out=tmp_path / "out", policy="observe")
    trainer.train()
    watch.close()
    codes = {finding.code for finding in noticed(watch.findings, watch.incidents)}
    assert ("NS113" in codes) is told


def test_the_rate_of_a_trainer_is_the_one_that_it_warms_up_to(tmp_path):
    trainer = hf_cases.build("trainer", tmp_path, max_steps=3, warmup_steps=2, learning_rate=0.5)
    watch = nanstop.watch(trainer, out=tmp_path / "out", policy="observe")
    trainer.train()
    watch.close()
    finding = next(one for one in watch.findings if one.code == "NS113")
    assert (finding.title, finding.confidence) == ("out of range: learning rate 0.5", "likely")


@contextmanager
def as_before(weights, before):
    now = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        for weight, old in zip(weights, before, strict=True):
            weight.copy_(old)
        yield
        for weight, new in zip(weights, now, strict=True):
            weight.copy_(new)


def test_what_updates_have_moved_is_measured():
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(64, 32)) for _ in range(3)]
    before = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        for weight in weights[:2]:
            weight += 8.0
        weights[0][0, 0] = torch.nan
    now = [weight.detach().clone() for weight in weights]
    found = taken_step(weights, 0.5, 4, lambda: as_before(weights, before))
    assert (found.lr, found.length) == (0.5, pytest.approx(2.0, rel=1e-2))
    assert found.weight == pytest.approx(1.0, rel=0.1)
    torch.testing.assert_close(weights, now, rtol=0.0, atol=0.0, equal_nan=True)
    assert taken_step([], 0.5, 4, nullcontext) is None


def test_weights_are_looked_at_in_a_sample():
    torch.manual_seed(0)
    layers = [nn.Linear(4096, 512, bias=False) for _ in range(2)]
    layers[0].weight.data[:] = 0.0
    groups = [{"params": [layer.weight for layer in layers], "lr": 0.1}]
    found = longest_step(StepPerRate(length=1.0), groups)
    assert found.lr == 0.1
    assert found.weight == pytest.approx(float(layers[1].weight.detach().std()), rel=0.1)
    assert (
        longest_step(StepPerRate(length=1.0), [{"params": [layers[0].weight], "lr": 0.1}]) is None
    )
    assert (
        longest_step(
            StepPerRate(length=1.0), [{"params": [nn.Parameter(torch.ones(4))], "lr": 0.1}]
        )
        is None
    )
    assert longest_step(StepPerRate(length=1.0), [{"params": [layers[1].weight]}]) is None
    assert longest_step(StepPerRate(length=1.0), []) is None
    meta = nn.Parameter(torch.empty(4, 4, device="meta"))
    assert longest_step(StepPerRate(length=1.0), [{"params": [meta], "lr": 0.1}]) is None


LETS_GO = """
class LetsGo(torch.optim.Optimizer):
    def step(self, closure=None):
        taken = [(p, p.grad) for p in net.parameters()]
        for p, _ in taken:
            p.grad = None
        with torch.no_grad():
            for p, gradient in taken:
                if gradient is not None:
                    p.sub_(0.01 * gradient)


net = mlp(8)
optimizer = LetsGo([{"params": [p]} for p in net.parameters()], {})
"""


def test_gradients_of_each_group_are_what_they_were(tmp_path):
    source = HEAD + LETS_GO + TRAIN
    plain = run_script(tmp_path / "plain.py", source)
    session = opener(Policy(), Store(tmp_path / "out"), lambda _: None)
    watched = run_script(tmp_path / "watched.py", source, session)
    assert all(map(torch.equal, plain["net"].parameters(), watched["net"].parameters()))


def rated(*rates):
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in rates))
    groups = [{"params": p.parameters(), "lr": r} for p, r in zip(net, rates, strict=True)]
    facts = optimizer_facts(torch.optim.AdamW(groups), net)
    return facts.lr, facts.highest, facts.rate


def test_the_highest_rate_of_several_groups():
    assert rated(1e-3, 1e-3) == (1e-3, None, 1e-3)
    assert rated(1e-3, 16.0, 1e-2) == (1e-3, 16.0, 16.0)
    assert math.isnan(rated(1e-3, math.nan, math.inf)[2])
