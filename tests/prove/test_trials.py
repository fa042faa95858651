"""What a trial says of a remedy where float32 cannot judge it, of what is left out, and of the
updates that follow.
"""

import pytest
import torch
from torch import nn

from fnstep import FnStep
from nanstop.prove.failing_step import FailingStep
from nanstop.prove.forms.evidence import OTHER_LIMIT
from nanstop.prove.trials import Trials
from nanstop.prove.updates_after import UpdatesAfter
from nanstop.records import Atom, FailureKey


class Attending(nn.Module):
    """A layer whose ``eager`` kernel has no safe softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {"_attn_implementation": "eager"})()
        self.inner = nn.Linear(4, 4)
        self.bend = 0.0

    def set_attn_implementation(self, kernel):
        self.config._attn_implementation = kernel

    def forward(self, x):
        scores = self.inner(x)
        if self.config._attn_implementation == "eager":
            return scores.exp() / scores.exp().sum(-1, keepdim=True)
        return torch.softmax(scores, -1) * (1.0 + self.bend * torch.arange(4))


def trial(bend, batches):
    torch.manual_seed(0)
    model = Attending()
    model.bend = bend
    failing = tuple(n for n, batch in enumerate(batches) if batch["x"].abs().max() > 1e3)
    step = FnStep(model, lambda net, batch: net(batch["x"]).square().sum(), batches)
    failing = FailingStep(step=step, micro=failing[0], micros=failing)
    key = FailureKey(kind="nan", phase="forward", op="aten.div.Tensor", module="")
    return Trials(failing, key).trial((Atom(remedy="attention", value="sdpa"),))


@pytest.mark.parametrize(
    ("module", "outcome", "most"), [("", "same_failure", 2), ("inner", "other_failure", 12)]
)
def test_what_fails_where_it_is_known_to_is_not_localized_again(module, outcome, most):
    """The known place is seen in one recorded run; another one takes as many as it takes."""
    runs = []

    def loss(net, batch):
        runs.append(net)
        return net(batch["x"]).square().sum()

    torch.manual_seed(0)
    step = FnStep(Attending(), loss, [HUGE])
    key = FailureKey(kind="nan", phase="forward", op="aten.exp.default", module=module)
    trials = Trials(FailingStep(step=step, micro=0, micros=(0,)), key)
    trials.reference()
    runs.clear()
    found = trials.trial((Atom(remedy="island", target="inner", value="float32"),))
    assert found.outcome == outcome
    assert found.key.op == "aten.exp.default"
    assert len(runs) <= most
    assert (len(runs) == 2) == (outcome == "same_failure")


SMALL, HUGE = {"x": torch.randn(3, 4)}, {"x": torch.full((3, 4), 1e4)}


@pytest.mark.parametrize(("bend", "unchanged"), [(0.0, True), (0.1, False)])
def test_where_every_sample_fails_a_healthy_micro_batch_of_the_window_judges(bend, unchanged):
    found = trial(bend, [SMALL, HUGE])
    assert found.outcome == "pass"
    assert found.rows_unchanged is unchanged


def test_nothing_judges_a_window_in_which_every_sample_fails():
    assert trial(0.0, [HUGE, HUGE]).rows_unchanged is None


def updating(lr, *, optimizer=torch.optim.SGD):
    """An update that is finite, and the window it is made of."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    batches = [{"x": torch.randn(8, 4)}]
    step = FnStep(
        model,
        lambda net, batch: (net(batch["x"]) - 1.0).square().mean(),
        batches,
        optimizer(model.parameters(), lr=lr),
    )
    return FailingStep(step=step, micro=0, micros=(0,), phase="optimizer", update=True)


KEY = FailureKey(kind="nan", phase="optimizer", op="aten.addcdiv_.default", module="")


@pytest.mark.parametrize(("lr", "outcome"), [(0.1, "pass"), (1.5, "other_failure")])
def test_the_updates_that_follow_under_a_cure_must_not_run_away(lr, outcome):
    failing = updating(lr)
    before = [p.detach().clone() for p in failing.step.view.root.parameters()]
    found = UpdatesAfter(failing).under(())
    assert found.outcome == outcome
    assert ("the loss goes from" in found.message) == (outcome != "pass")
    after = failing.step.view.root.parameters()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(("seconds", "outcome"), [(60.0, "other_failure"), (0.0, "pass")])
def test_where_there_is_time_what_follows_is_twenty_updates(seconds, outcome):
    slowly = updating(0.45)
    found = UpdatesAfter(slowly, seconds=seconds, clock=lambda: 1.0).under(())
    assert found.outcome == outcome, found
    assert found.message.endswith("in 20 updates") == (outcome != "pass")


def test_a_window_without_a_micro_batch_is_run():
    calls = []

    def loss(net, batch):
        calls.append(batch["name"])
        return net(batch["x"]).square().sum()

    batches = [SMALL | {"name": "first"}, HUGE | {"name": "second"}]
    torch.manual_seed(0)
    step = FnStep(Attending(), loss, batches)
    drop = (Atom(remedy="drop_micro", target="1"),)
    failing = FailingStep(step=step, micro=1, micros=(1,))
    assert Trials(failing, KEY).trial(drop).outcome == "pass"
    assert calls[0] == "first"
    batches[0]["x"] = HUGE["x"]
    assert Trials(failing, KEY).trial(drop).outcome == "other_failure"


@pytest.mark.parametrize("before", [0, 2])
def test_what_is_usual_is_learnt_from_the_windows_before(before):
    torch.manual_seed(0)
    model = nn.Linear(4, 4).half()

    def loss(net, batch):
        return (net(batch["x"].half()).float().square() * batch["scale"]).mean()

    steps = [FnStep(model, loss, [SMALL | {"scale": one}]) for one in (1e-6, 1.0, torch.inf)]
    failing = FailingStep(step=steps[2], micro=0, micros=(0,), before=tuple(steps[:before]))
    found = Trials(failing, KEY).reference()
    assert ("the windows before" in found.source) == bool(before)
    assert (found.grad_tolerance > 0.1) == bool(before)


def test_a_window_of_nothing_else_cannot_do_without_its_micro_batch():
    step = FnStep(Attending(), lambda net, batch: net(batch["x"]).sum(), [HUGE])
    failing = FailingStep(step=step, micro=0, micros=(0,))
    found = Trials(failing, KEY).trial((Atom(remedy="drop_micro", target="0"),))
    assert found.outcome == "not_applicable"


def of_opposites(net, batch):
    return (-net(batch["x"]).square() - 1.0).sqrt().mean()


def of_logarithms(net, batch):
    return -torch.log(-torch.softmax(net(batch["x"]), -1)[:, 0]).mean()


def of_some(net, batch):
    return torch.log(net(batch["x"]).square() - 1e-3).mean()


def of_features(net, batch):
    x = torch.log(batch["x"])
    return net(x).square().mean()


@pytest.mark.parametrize(
    ("loss", "unchanged"),
    [(of_opposites, False), (of_logarithms, False), (of_features, False), (of_some, True)],
)
def test_a_function_that_has_no_value_for_much_of_what_it_is_given_is_no_witness(loss, unchanged):
    torch.manual_seed(0)
    step = FnStep(nn.Linear(4, 3), loss, [{"x": torch.randn(64, 4)}])
    found = guarded(step, loss, 1)
    assert found.outcome == "pass"
    assert found.rows_unchanged is unchanged


def guarded(step, loss, line, phase="forward"):
    """What a guard of a line of a loss, counted from its first, comes to."""
    key = FailureKey(kind="nan", phase=phase, op="aten.log.default", module="")
    target = f"{loss.__code__.co_filename}:{loss.__code__.co_firstlineno + line}"
    trials = Trials(FailingStep(step=step, micro=0, micros=(0,)), key)
    return trials.trial((Atom(remedy="form", target=target, value="guarded"),))


def of_pulled(net, batch):
    share = torch.clamp(net(batch["x"]).sigmoid() / batch["mu"], max=1.0)
    return (share * batch["x"]).mean()


def of_targets(net, batch):
    width = torch.log(batch["mu"])
    return (net(batch["x"]) - width).abs().mean()


def of_weighed(net, batch):
    width = torch.log(batch["mu"]) * (batch["mu"] > 0.0)
    return (net(batch["x"]) - width).abs().mean()


def of_variance(net, batch):
    x = net(batch["x"]) + 3000.0
    var = x.square().mean(1, keepdim=True) - x.mean(1, keepdim=True).square()
    return ((x - 3000.0) / (var + 1e-6).sqrt()).square().mean()


def of_shares(net, batch):
    return ((net(batch["x"]) - 1.0).abs() / batch["mu"]).mean()


def of_nearest(net, batch):
    weight = batch["mu"] ** -1.0
    weight = weight / weight.max()
    return (net(batch["x"]) * weight).square().mean()


def of_widths(net, batch):
    width = net(batch["x"]).relu() * batch["mu"]
    return (1.0 / width.sum(1) + width.sum(1)).square().mean()


def of_means(net, batch):
    found = (net(batch["x"]) * batch["mu"]).sum(1) / batch["mu"][:, 0]
    return (found - 1.0).square().mean()


def of_degrees(net, batch):
    scaled = batch["mu"] ** -0.5 * batch["mu"]
    return (net(batch["x"]) * scaled).square().mean()


@pytest.mark.parametrize(
    ("loss", "line", "unchanged"),
    [
        (of_pulled, 1, False),
        (of_targets, 1, False),
        (of_weighed, 1, True),
        (of_variance, 3, False),
        (of_shares, 1, False),
        (of_widths, 2, False),
        (of_means, 1, True),
        (of_degrees, 1, True),
    ],
)
def test_a_guard_leaves_the_loss_that_a_step_has_and_makes_up_no_target(loss, line, unchanged):
    """Clamped shares of 1 that become 0, a target of -87, a deviation that is all rounding."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(16, 1 if loss is of_pulled else 4), "mu": torch.rand(16, 1) + 0.1}
    batch["mu"][3] = 0.0
    step = FnStep(nn.Linear(batch["x"].shape[1], 1 if loss is of_pulled else 4), loss, [batch])
    found = guarded(step, loss, line, "backward" if loss is of_pulled else "forward")
    assert found.outcome == "pass"
    assert found.rows_unchanged is unchanged


def test_a_guard_whose_value_is_not_the_limit_is_none():
    """Weights 1 / d over the largest of them: at a distance of 0 that row has all."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(16, 4), "mu": torch.rand(16, 1) + 0.1}
    batch["mu"][3] = 0.0
    found = guarded(FnStep(nn.Linear(4, 4), of_nearest, [batch]), of_nearest, 1, "forward")
    assert (found.outcome, found.message) == ("not_applicable", OTHER_LIMIT)


def of_hold(net, batch):
    rate = net.rate
    held = (torch.exp(0.1 * rate) - 1.0) / rate
    return (net(batch["x"]).sum(1) + held.sum()).square().mean()


def of_shares_of_rates(net, batch):
    share = net.rate / net.rate.abs()
    return (net(batch["x"]).sum(1) + 0.1 * share.sum()).square().mean()


@pytest.mark.parametrize(
    ("loss", "line", "outcome"),
    [(of_hold, 2, "not_applicable"), (of_shares_of_rates, 1, "pass")],
)
def test_a_limit_that_moves_a_loss_little_is_one(loss, line, outcome):
    """(exp(t a) - 1) / a comes to t; a / |a| comes to nothing, from which side it may be."""
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    net.rate = nn.Parameter(torch.tensor([-2.0, -1.0, 0.0]))
    with torch.no_grad():
        net.bias.add_(20.0)
    found = guarded(FnStep(net, loss, [{"x": torch.randn(16, 4)}]), loss, line, "forward")
    assert found.outcome == outcome
    assert (found.message == OTHER_LIMIT) == (outcome != "pass")


def of_floored(net, batch):
    p = (net(batch["x"]) * batch["mu"]).square()
    return -torch.log(p).clamp(min=-100.0).mean()


def of_largest(net, batch):
    return torch.nan_to_num(1.0 / (net(batch["x"]) * batch["mu"]).square()).mean()


@pytest.mark.parametrize(
    ("loss", "line", "unchanged"),
    [(of_pulled, 1, True), (of_floored, 2, True), (of_largest, 1, False)],
)
def test_what_a_loss_bounds_stays_where_its_derivative_is_taken_away(loss, line, unchanged):
    """What `nan_to_num` makes of it, 3e38, is no bound."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(16, 1), "mu": torch.rand(16, 1) + 0.1}
    batch["mu"][3] = 0.0
    step = FnStep(nn.Linear(1, 1), loss, [batch])
    key = FailureKey(kind="nan", phase="backward", op="aten.div.Tensor", module="")
    target = f"{loss.__code__.co_filename}:{loss.__code__.co_firstlineno + line}"
    trials = Trials(FailingStep(step=step, micro=0, micros=(0,)), key)
    found = trials.trial((Atom(remedy="form", target=target, value="kept"),))
    assert (found.outcome, found.rows_unchanged) == ("pass", unchanged)
    assert found.loss == pytest.approx(float(loss(step.view.root, batch).detach()))


def of_two_causes(net, batch):
    p = torch.softmax(net(batch["x"]), -1)
    entropy = (p * torch.log(p)).sum(-1)
    root = (net(batch["x"]) * batch["mu"]).square().sum(-1).sqrt()
    return entropy.mean() + root.mean()


def test_behind_a_line_in_log_space_another_may_want_a_guard():
    """A probability that rounds to 0, and a distance of 0, each in a row of its own."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(16, 4), "mu": torch.ones(16, 1)}
    batch["x"][5] *= 3000.0
    batch["mu"][3] = 0.0
    step = FnStep(nn.Linear(4, 4), of_two_causes, [batch])
    key = FailureKey(kind="nan", phase="forward", op="aten.log.default", module="")
    code = of_two_causes.__code__
    first, second = (f"{code.co_filename}:{code.co_firstlineno + n}" for n in (2, 3))
    trials = Trials(FailingStep(step=step, micro=0, micros=(0,)), key)
    held = (Atom(remedy="stable_form", target=first, value="log_space"),)
    found = trials.trial(held)
    while found.outcome != "pass" and held is not None:
        held = trials.extend(found)
        found = trials.trial(held) if held is not None else found
    assert found.outcome == "pass"
    guard = Atom(remedy="form", target=second, value="guarded:sqrt")
    assert (found.atoms[0].remedy, *found.atoms[1:]) == ("stable_form", guard)
    assert found.rows_unchanged is True
