"""Schedules that run out, stay at 0 or end before their peak are told by the rates that were used
and those that a copy gives; those that pause, restart or end with the training are not.
"""

import math
import runpy
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import nanstop
from loop_scripts import findings_of
from nanstop.detect.rates.schedules import asked, schedules_of
from noticed import noticed

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:The epoch parameter")  # torch 2.6, SequentialLR


def linear(optimizer, total, warmup=0):
    def share(step):
        if step < warmup:
            return step / warmup
        return max(0.0, (total - step) / (total - warmup))

    return lr_scheduler.LambdaLR(optimizer, share)


def found(folder, make, *, updates=24, micros=1, each_micro=False, stepped=True):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = make(optimizer)
    with nanstop.watch(model, optimizer, out=folder) as watch:
        for _ in range(updates):
            for _ in range(micros):
                watch.step(lambda b: model(b["x"]).square().mean(), {"x": torch.randn(3, 4)})
                if each_micro:
                    schedule.step()
            watch.update(clip=None)
            if stepped and not each_micro:
                schedule.step()
    assert all(one.trains_nothing for one in watch.incidents)
    return {finding.code: finding for finding in noticed(watch.findings, watch.incidents)}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
def test_a_schedule_that_is_stepped_for_each_micro_batch_runs_out(tmp_path):
    findings = found(tmp_path, lambda o: linear(o, 24, 2), micros=8, each_micro=True)
    finding = findings["NS113"]
    assert finding.title == "out of range: a schedule that runs out"
    assert "stepped 8 times an update, as often as there are micro-batches" in finding.cause
    assert finding.seen.step == 2


def test_a_schedule_that_goes_below_0_is_told_at_its_first_such_update(tmp_path):
    made = found(tmp_path, lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 - step / 8))
    finding = made["NS113"]
    assert finding.title == "out of range: a schedule that goes below 0"
    assert "-0.0013" in finding.cause
    assert finding.seen.step == 9


def test_a_schedule_that_ends_at_0_is_not_below_it(tmp_path):
    rates = [1 - step / 23 for step in range(24)]
    assert not found(
        tmp_path, lambda o: lr_scheduler.LambdaLR(o, lambda step: rates[min(step, 23)])
    )


def test_a_schedule_of_0_for_good_is_told_at_once(tmp_path):
    finding = found(tmp_path, lambda o: lr_scheduler.LambdaLR(o, lambda step: step // 1000 * 0.0))
    assert finding["NS113"].cause == "its schedule gives 0 for good: no update moves anything"
    assert finding["NS113"].seen.step == 0


def test_a_warm_up_that_is_never_stepped_is_told_at_the_end(tmp_path):
    finding = found(tmp_path, lambda o: linear(o, 24, 4), stepped=False)["NS113"]
    assert "was not stepped" in finding.cause


def test_a_warm_up_longer_than_the_run_is_told_at_the_end(tmp_path):
    finding = found(tmp_path, lambda o: linear(o, 4000, 400), updates=40)["NS113"]
    assert finding.title == "out of range: a warm-up longer than the training"


def in_epochs(folder, make, *, updates=64, every=16):
    """A schedule that is stepped after each ``every`` updates."""

    class Rare:
        def __init__(self, optimizer):
            self.schedule, self.num = make(optimizer), 0

        def step(self):
            self.num += 1
            if self.num % every == 0:
                self.schedule.step()

    return found(folder, Rare, updates=updates)


FOR_ALL_UPDATES = {
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=64),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 64),
    "linear": lambda o: linear(o, 64, 2),
}


@pytest.mark.parametrize("name", FOR_ALL_UPDATES)
def test_a_schedule_for_all_updates_that_is_stepped_for_epochs_is_told(name, tmp_path):
    finding = in_epochs(tmp_path, FOR_ALL_UPDATES[name])["NS113"]
    assert finding.title == "out of range: a schedule that is stepped too rarely"
    assert "64 steps long, as many as there were updates, and was stepped 4 times" in finding.cause


FOR_EPOCHS = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=5),
    "a longer training, cut short": lambda o: lr_scheduler.CosineAnnealingLR(o, 90),
    "constant": lambda o: lr_scheduler.ConstantLR(o, 1.0),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "steps": lambda o: lr_scheduler.StepLR(o, 2),
    "there and back": lambda o: lr_scheduler.CosineAnnealingLR(o, 2),
}


@pytest.mark.parametrize("name", FOR_EPOCHS)
def test_a_schedule_for_epochs_is_left_in_peace(name, tmp_path):
    assert "NS113" not in in_epochs(tmp_path, FOR_EPOCHS[name])


def test_a_schedule_that_is_constant_for_most_of_the_time_is_left_in_peace(tmp_path):
    """It is stepped after each update: a warm-up, a long plateau, a decay at the end."""

    def make(optimizer):
        return lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 3, (64 - s) / 6))

    assert "NS113" not in found(tmp_path, make, updates=64)


HEALTHY = {
    "linear": lambda o: linear(o, 24, 2),
    "two steps too many": lambda o: linear(o, 22, 2),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 8),
    "there and back": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "cycles": lambda o: lr_scheduler.CyclicLR(o, 0.0, 1e-2, step_size_up=4, cycle_momentum=False),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=25),
    "three zeros, then on": lambda o: lr_scheduler.LambdaLR(o, lambda s: 0.0 if s < 4 else 1.0),
    "one after the other": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 1e-3, 1.0, 4), lr_scheduler.CosineAnnealingLR(o, 20)], [4]
    ),
    "constant": lambda o: lr_scheduler.ConstantLR(o, 1.0),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_schedule_is_left_in_peace(name, tmp_path):
    assert "NS113" not in found(tmp_path, HEALTHY[name])


@pytest.mark.parametrize("name", HEALTHY)
def test_what_a_copy_gives_is_what_the_schedule_then_gives(name):
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=1e-2)
    schedule = HEALTHY[name](optimizer)
    schedule_state = schedule.state_dict()
    foretold = asked(schedule, 20)
    assert schedule.state_dict() == schedule_state
    given = []
    for _ in range(20):
        given.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert foretold == given


def test_a_rate_that_is_set_by_hand_has_nobody_to_be_asked(tmp_path):
    class Frozen:
        """A critic trains alone for a while."""

        def __init__(self, optimizer):
            optimizer.param_groups[0]["lr"] = 0.0

        def step(self):
            """Do nothing."""

    assert "NS113" not in found(tmp_path, Frozen)


class Wrapping(torch.optim.Optimizer):
    """What a script wraps around another optimizer (Lookahead)."""

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer

    def step(self, closure=None):
        return self.optimizer.step(closure)


@pytest.mark.parametrize("on", ["wrapping", "inner"])
def test_a_schedule_of_an_optimizer_in_another_is_that_of_both(on):
    inner = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    wrapping = Wrapping(inner)
    schedule = linear({"wrapping": wrapping, "inner": inner}[on], 8)
    assert schedules_of(wrapping) == schedules_of(inner) == [schedule]


def trained(make, *, updates=20, window=1, each_micro=False, kind=torch.optim.Adam):
    """Return a training whose objects are gone when it ends, as those of a ``main()`` are."""

    def main():
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = kind(model.parameters(), lr=1e-2)
        schedule = make(optimizer)
        for number in range(1, updates * window + 1):
            model(torch.randn(3, 4)).square().mean().backward()
            if number % window == 0:
                optimizer.step()
                optimizer.zero_grad()
            if each_micro or number % window == 0:
                schedule.step()

    return main


def rise(optimizer, num, least=1e-4):
    return lr_scheduler.LinearLR(optimizer, least, total_iters=num)


def whole_numbers(optimizer):
    return lr_scheduler.LambdaLR(optimizer, lambda step: step // 1000)


def test_a_rate_of_numpys_that_has_no_value_later_is_computed_without_a_word(tmp_path):
    script = tmp_path / "poly.py"
    script.write_text("""
import numpy as np, torch
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
def poly(optimizer, base, step, total):
    rate = base * np.power(1 - step / total, 0.9)
    for group in optimizer.param_groups:
        group["lr"] = rate
for step in range(30):
    poly(optimizer, 0.1, step, 30)
    optimizer.zero_grad()
    net(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
""")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert findings_of(tmp_path, lambda: runpy.run_path(str(script))) == {}
    assert not said


def test_a_rate_of_0_is_told_though_optimizer_and_schedule_are_gone_by_then(tmp_path):
    finding = findings_of(tmp_path, trained(whole_numbers))["NS113"]
    assert finding.title == "out of range: a learning rate of 0"
    assert "lr_scheduler.LambdaLR(optimizer" in finding.lines[0]
    assert finding.where.startswith("test_rates.py:")


def test_a_warm_up_that_no_recipe_has_is_told_in_a_short_run(tmp_path):
    finding = findings_of(tmp_path, trained(lambda o: rise(o, 200_000)))["NS113"]
    assert finding.title == "out of range: a warm-up of more than 100,000 updates"
    assert "lr_scheduler.LinearLR(optimizer" in finding.lines[0]
    assert finding.seen.step <= 16


def test_a_warm_up_longer_than_a_training_whose_objects_are_gone(tmp_path):
    findings = findings_of(tmp_path, trained(lambda o: rise(o, 5000), updates=40))
    assert findings["NS113"].title == "out of range: a warm-up longer than the training"


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
@pytest.mark.parametrize(
    "make",
    [
        lambda o: linear(o, 20),
        lambda o: lr_scheduler.PolynomialLR(o, 20),
        lambda o: lr_scheduler.SequentialLR(
            o, [rise(o, 2), lr_scheduler.PolynomialLR(o, 18)], milestones=[2]
        ),
    ],
)
def test_the_line_that_steps_a_schedule_too_often(tmp_path, make):
    findings = findings_of(tmp_path, trained(make, window=4, each_micro=True))
    finding = findings["NS113"]
    assert "stepped 4 times an update" in finding.cause
    assert finding.lines[0].endswith("schedule.step()")


def noam(optimizer):
    """Rates are far below the number that is multiplied, as in "Attention is all you need"."""
    share = lambda step: 512**-0.5 * min((step + 1) ** -0.5, (step + 1) * 4000**-1.5)  # noqa: E731
    return lr_scheduler.LambdaLR(optimizer, share)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: rise(o, 30_000),  # that of RoBERTa: a short run is a trial of it
        noam,
        lambda o: lr_scheduler.SequentialLR(
            o, [rise(o, 10_000), lr_scheduler.CosineAnnealingLR(o, 90_000)], milestones=[10_000]
        ),
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0 + step / 1e6),
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 1e-5),
        lambda o: lr_scheduler.ExponentialLR(o, 1.5),  # a search for the rate
        lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
        lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=1_000_000),
    ],
)
def test_a_short_trial_of_a_healthy_schedule_is_left_in_peace(tmp_path, make):
    assert "NS113" not in findings_of(tmp_path, trained(make))


def test_a_schedule_is_as_it_was_without_nanstop(tmp_path):
    def rates():
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1e-2)
        schedule = lr_scheduler.SequentialLR(
            optimizer, [rise(optimizer, 4), lr_scheduler.PolynomialLR(optimizer, 6)], [4]
        )
        for _ in range(10):
            optimizer.step()
            schedule.step()
            seen.append(schedule.get_last_lr())
        states.append({k: v for k, v in schedule.state_dict().items() if k != "_schedulers"})

    seen, states, own = [], [], vars(lr_scheduler.LRScheduler)["step"]
    rates()
    findings_of(tmp_path, rates)
    assert seen[:10] == seen[10:]
    assert states[0] == states[1]
    assert vars(lr_scheduler.LRScheduler)["step"] is own


def test_beside_a_rate_of_infinity_no_other_is_told_to_be_0(tmp_path):
    """A schedule that divides by the steps since its restart."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = lr_scheduler.LambdaLR(
        optimizer, lambda step: 1 / (step - 10) if step > 10 else math.inf if step == 10 else 1.0
    )
    with nanstop.watch(model, optimizer, out=tmp_path) as watch:
        for _ in range(30):
            watch.step(lambda b: model(b["x"]).square().mean(), {"x": torch.randn(3, 4)})
            watch.update(clip=None)
            schedule.step()
    assert [one.diagnoses[0].code for one in watch.incidents] == ["NS402"]
    assert not [one.title for one in watch.findings if one.code == "NS113"]


class Remembering:
    """What a schedule's function may keep of its calls."""

    def __init__(self):
        self.calls, self.given = 0, []

    def share(self, step):
        self.calls += 1
        self.given.append(step)
        sys.stdout.write("asked")
        return 1.0 / (1.0 + step)


def test_what_a_schedules_function_remembers_is_what_the_run_has_asked(tmp_path, capsys):
    kept = [Remembering(), Remembering()]
    for on, one in enumerate(kept):
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        schedule = lr_scheduler.LambdaLR(optimizer, one.share)
        parts = [lr_scheduler.ConstantLR(optimizer, 0.5, 2), schedule]
        schedule = lr_scheduler.SequentialLR(optimizer, parts, [2]) if on else schedule
        before = (one.calls, list(one.given), capsys.readouterr().out)
        assert len(asked(schedule, 8)) == 8
        assert (one.calls, one.given, capsys.readouterr().out) == (*before[:2], "")


def test_a_schedule_that_reads_a_generator_is_not_asked():
    shares = (one for one in [1.0, 0.5, 0.25])
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    schedule = lr_scheduler.LambdaLR(optimizer, lambda _: next(shares))
    assert asked(schedule, 2) == []
    assert list(shares) == [0.5, 0.25]
