"""Lines of a model's own forward and of an optimizer's own update have forms, too."""

import pytest
import torch
from torch import nn

import nanstop
from e2e.forms.spoiled_step import WIDTH, batch, hidden


class Share(nn.Module):
    """A network whose own forward divides by what may be 0."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, count):
        return self.inner(x).square() * (count > 0) / count


def shared_in_the_model(net, b):
    return net(b["x"], b["m"].sum(-1, keepdim=True)).mean()


def shared_in_the_loss(net, b):
    given = net(b["x"], torch.ones(1)) * b["m"]
    return (given.sum(-1) / b["m"].sum(-1)).mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "needs"),
    [(shared_in_the_model, True), (shared_in_the_loss, False)],
)
def test_a_saved_model_needs_what_its_own_forward_needs(loss, needs, capsys):
    torch.manual_seed(0)
    net = Share()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with nanstop.watch(net, optimizer, policy=nanstop.Policy(allow=("form",))) as watch:
        for step in range(3):
            given = batch(step)
            if step == 0:  # what fails at the first step is cured for the rest of the run
                hidden(given)
            watch.step(lambda now: loss(net, now), given)
            watch.update()
    assert watch.incidents[0].audit[-1].action.kind == "adopt"
    assert ("saved of the model" in capsys.readouterr().err) == needs


class WithoutEps(torch.optim.Optimizer):
    """RMSprop as one writes it by hand, and the same with its squares' root taken of too little."""

    def __init__(self, params, lr=1e-3, centred=False):
        super().__init__(params, {"lr": lr, "centred": centred})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["v"] = torch.zeros_like(p)
                state["v"].mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
                if group["centred"]:
                    denom = (state["v"] - 0.1 * (1 + 1e-6) * p.grad**2).sqrt() + 1e-12
                    p -= group["lr"] * p.grad / denom
                else:
                    p -= group["lr"] * p.grad / state["v"].sqrt()


def updated_by_hand(*, centred):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(8, WIDTH), nn.Linear(WIDTH, 1))
    optimizer = WithoutEps(net.parameters(), centred=centred)
    policy = nanstop.Policy(allow=("form",), on_stop="end")
    with nanstop.watch(net, optimizer, policy=policy) as watch:
        for step in range(4):
            ids = torch.arange(4) + step
            watch.step(lambda now: (net(now) - 1).square().mean(), ids)
            watch.update()
    return watch, net


def test_a_line_of_an_own_optimizer_has_a_form(capsys):
    watch, net = updated_by_hand(centred=False)
    (incident,) = watch.incidents
    assert incident.diagnoses[0].code == "NS402"
    (atom,) = incident.proof.minimal
    assert (incident.proof.verdict, atom.remedy) == ("proven", "form")
    said = capsys.readouterr().err
    assert 'p -= group["lr"] * p.grad / state["v"].clamp(min=1.2e-38).sqrt()' in said
    assert "saved of the model" not in said
    assert all(p.isfinite().all() for p in net.parameters())


def test_a_form_under_which_an_update_ruins_what_follows_is_not_proven():
    watch, _ = updated_by_hand(centred=True)
    incident = watch.incidents[0]
    assert incident.diagnoses[0].code == "NS402"
    assert incident.proof.verdict != "proven"


class CountedFrom0(torch.optim.Optimizer):
    """Momentum whose correction divides by 1 - 0.9 ** 0 at its first update."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(t=torch.zeros(()), m=torch.zeros_like(p))
            state["m"].lerp_(p.grad, 0.1)
            p -= 1e-3 * state["m"] / (1 - 0.9 ** state["t"])
            state["t"] += 1


class BySize(CountedFrom0):
    """A step by the length of a gradient, which may be 0."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p -= 1e-3 * p.grad / p.grad.norm()


@pytest.mark.parametrize(("kind", "verdict"), [(CountedFrom0, "plausible"), (BySize, "proven")])
def test_a_number_in_the_place_of_an_infinity_that_moves_weights_is_no_proof(kind, verdict):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with nanstop.watch(net, kind(net.parameters()), policy=nanstop.Policy(on_stop="end")) as watch:
        watch.step(lambda x: (net[1](0 * net[0](x)) - 1).square().mean(), torch.randn(4, WIDTH))
        watch.update()
    (incident,) = watch.incidents
    assert incident.diagnoses[0].code == "NS402"
    assert incident.proof.verdict == verdict


class BySigns(torch.optim.Optimizer):
    """A root of what is negative in some rows, as of eigenvalues that are 0 but for rounding."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            signs = torch.ones_like(p).cumsum(0) - 2
            p -= 1e-3 * p.grad * signs.pow(-0.25)


def test_what_is_typed_for_an_update_moves_the_weights_as_its_form_does(capsys):
    torch.manual_seed(0)
    net = nn.Linear(WIDTH, WIDTH)
    with nanstop.watch(
        net, BySigns(net.parameters()), policy=nanstop.Policy(on_stop="end")
    ) as watch:
        watch.step(lambda x: (net(x) - 1).square().mean(), torch.randn(4, WIDTH))
        watch.update()
    (incident,) = watch.incidents
    assert incident.proof.typed
    text = "signs.masked_fill(signs <= 0, 1).pow(-0.25).masked_fill(signs <= 0, 0)"
    said = capsys.readouterr().err
    assert text in said
    assert "not run on this step" not in said
