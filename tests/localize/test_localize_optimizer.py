"""Updates that break weights: which parameter, which op, or which state was bad before."""

import pytest
import torch
from torch import nn, optim

from planted import INF, NAN, Net, called, located, op_of, text_batch
from versions import needs

KINDS = {
    "loop": ({"foreach": False}, "sqrt"),
    "foreach": ({"foreach": True}, "_foreach_sqrt"),
    "fused": ({"fused": True}, "_fused_adamw_"),
}


def updated(model, optimizer, batch=None, loss=called):
    return located(model, loss, batch, optimizer=optimizer, update=True)


def stepped(options):
    model = Net(lambda x: x)
    optimizer = optim.AdamW(model.parameters(), 1e-3, **options)
    called(model, text_batch()).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_healthy_update_is_silent(kind):
    model, optimizer = stepped(KINDS[kind][0])
    assert updated(model, optimizer) is None


@pytest.mark.parametrize("kind", KINDS)
def test_negative_second_moment(kind):
    options, op = KINDS[kind]
    model, optimizer = stepped(options)
    optimizer.state[model.proj.weight]["exp_avg_sq"].fill_(-1.0)
    found = updated(model, optimizer)
    assert (found.origin, found.culprit, op_of(found)) == ("born_here", "proj.weight", op)
    assert (found.key.phase, found.reaches) == ("optimizer", ("proj.weight",))


@pytest.mark.parametrize("kind", KINDS)
def test_state_was_bad_before(kind):
    model, optimizer = stepped(KINDS[kind][0])
    optimizer.state[model.head.bias]["exp_avg"][3] = NAN
    found = updated(model, optimizer)
    assert (found.origin, found.culprit) == ("from_state", "state exp_avg of head.bias")
    assert found.reaches == ("head.bias",)


@pytest.mark.parametrize("foreach", [False, True])
def test_epsilon_that_vanishes_in_half(foreach):
    """Rows of the table that the batch does not use have gradient 0:
    0 / (0 + eps), and eps 1e-8 is 0.
    """
    model = Net(lambda x: x, torch.float16)
    found = updated(model, optim.AdamW(model.parameters(), 1e-3, foreach=foreach))
    assert (found.origin, found.culprit) == ("born_here", "embed.weight")
    assert op_of(found) == ("_foreach_addcdiv_" if foreach else "addcdiv_")
    assert "embed.weight" in found.reaches
    assert found.vanished.name == ("_foreach_add" if foreach else "add")
    assert 1e-8 in found.vanished.scalars


class Squares(optim.Optimizer):
    """Has an eps that it does not use, and squares gradients."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1.0, "eps": 1e-8})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad * parameter.grad)


def test_a_square_that_leaves_its_format_is_of_no_epsilon():
    model = Net(lambda x: x, torch.float16)
    found = updated(model, Squares(model.parameters()), loss=lambda m, b: called(m, b) * 6e4)
    assert found.first_bad.wider == "finite"
    assert found.vanished is None


@pytest.mark.parametrize("fused", [False, True])
def test_infinite_learning_rate(fused):
    model = Net(lambda x: x)
    found = updated(model, optim.SGD(model.parameters(), lr=INF, fused=fused))
    assert op_of(found) == ("_fused_sgd_" if fused else "add_")
    assert (found.origin, found.culprit) == ("born_here", "embed.weight")


def test_gradient_was_bad_before_the_update():
    model = Net(lambda x: x)
    found = updated(model, optim.SGD(model.parameters(), 0.1), loss=lambda m, b: called(m, b) * INF)
    assert (found.origin, found.culprit) == ("from_state", "state gradient of embed.weight")


def test_weights_were_bad_before_the_update():
    model = Net(lambda x: x)
    model.spare = nn.Parameter(torch.full((2,), NAN), requires_grad=False)
    found = updated(model, optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1))
    assert (found.origin, found.culprit) == ("from_param", "spare")


@needs("bitsandbytes", "0.50", "8-bit optimizers on the CPU")
@pytest.mark.filterwarnings("ignore")
def test_eight_bit_optimizer():
    import bitsandbytes as bnb

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128))
    optimizer = bnb.optim.AdamW8bit(model.parameters(), lr=INF)
    found = updated(
        model, optimizer, {"x": torch.randn(4, 128)}, lambda m, b: m(b["x"]).square().mean()
    )
    assert found.key.op == "bitsandbytes.optimizer_update_8bit_blockwise.default"
    assert (found.culprit, found.key.phase) == ("0.weight", "optimizer")
