"""What a script raises itself: because of a bad number, or for another reason."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import nanstop
from nanstop.decide.policy import Policy
from nanstop.hosts.script import autowatch
from nanstop.report.text.blocks.incident import incident_blocks
from nanstop.session.factory import opener
from nanstop.store.incidents import Store

FAILING = 2


def isnan(h: Tensor) -> None:
    if torch.isnan(h).any() or torch.isinf(h).any():
        raise RuntimeError("stop")


def asserted(h: Tensor) -> None:
    assert h.isfinite().all()


def read(h: Tensor) -> None:
    if not math.isfinite(h.sum().item()):
        raise KeyError(0)


def unequal(h: Tensor) -> None:
    if bool((0.0 * h != 0.0).float().mean() > 0):
        raise ValueError


def unlike(h: Tensor) -> None:
    if (h - h).sum() != (h - h).sum():
        raise ValueError


def not_small(h: Tensor) -> None:
    if not (h - h).abs().max() < 1e6:
        raise RuntimeError("diverged")


def in_numpy(h: Tensor) -> None:
    if np.isnan((h - h).detach().numpy()).any():
        raise KeyError("loss")


def counted(h: Tensor) -> None:
    if (~h.isfinite()).sum() > 0:
        raise OverflowError("of the script's own")


GUARDS = (isnan, asserted, read, unequal, counted)


def missing(h: Tensor) -> None:
    """Raise for another reason, next to a bad number that is read and left out."""
    torch.where(h > 0, h.log(), 0.0).sum().item()
    (h - h.max()).log().isfinite().all().item()
    raise KeyError("missing")


def best(h: Tensor) -> None:
    if h.square().mean() < torch.tensor(math.inf):
        raise RuntimeError("the best so far")


def near(h: Tensor) -> None:
    away = torch.cdist(h, h).fill_diagonal_(math.inf)
    if (away < 1e6).any():
        raise RuntimeError("two of them are near")


def masked(h: Tensor) -> None:
    scores = h.masked_fill(h < 0, -math.inf)
    if (scores == -math.inf).sum() > 1000:
        return
    raise StopIteration


def first(h: Tensor) -> None:
    """Raise where nothing has been kept yet."""
    if torch.isinf(BEST):
        raise LookupError("nothing to compare with")


def none_left(h: Tensor) -> None:
    scores = h.masked_fill(h < h.max() + 1, -math.inf)
    if (scores == -math.inf).all():
        raise LookupError("none is left")


def farther(h: Tensor) -> None:
    if torch.isinf(BEST - h.mean()) or torch.isinf(torch.full((2,), math.inf).cumsum(0)).all():
        raise LookupError("nothing to compare with")


BEST = torch.tensor(math.inf)
OTHERS = (missing, best, near, masked, first, none_left, farther)


class Net(nn.Module):
    """``guard`` is called where the logarithm of 0 has been taken, or that of another number."""

    def __init__(self, guard) -> None:
        super().__init__()
        self.first, self.last, self.guard = nn.Linear(4, 8), nn.Linear(8, 4), guard

    def forward(self, x: Tensor) -> Tensor:
        h = self.last(self.first(x).tanh()) * x.log()
        if x[0, 0] == 2.0:
            self.guard(h)
        return h.square().mean()


def batch(number: int, *, is_bad: bool) -> Tensor:
    x = torch.rand(3, 4, generator=torch.Generator().manual_seed(number)) + 0.5
    if number == FAILING:
        x[0, 0] = 2.0
        x[1, 2] = 0.0 if is_bad else 1.5
    return x


def scaled(net: Net, rows: Tensor) -> Tensor:
    """What a weight has a part in: of data alone a guard would make up a number."""
    return rows * net.last.bias.exp()


def in_a_watched_loop(guard, folder: Path, _monkeypatch, *, is_bad: bool) -> tuple:
    torch.manual_seed(0)
    net = Net(guard)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    with nanstop.watch(net, optimizer, out=folder) as watch:
        for number in range(FAILING + 1):
            try:
                watch.step(lambda given: net(given["x"]), {"x": batch(number, is_bad=is_bad)})
            except Exception:
                assert number == FAILING
                break
            watch.update()
    return watch.incidents


@contextmanager
def script_of(folder: Path, monkeypatch) -> Iterator[Store]:
    """Be a script under ``nanstop run``, which ends with what is raised inside."""
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    store = Store(folder)
    store.reset()
    autowatch.install(opener(Policy(), store, lambda _: None))
    try:
        yield store
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        autowatch.unwatch()


def in_a_script(guard, folder: Path, monkeypatch, *, is_bad: bool) -> tuple:
    with script_of(folder, monkeypatch) as store:
        torch.manual_seed(0)
        net = Net(guard)
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        for number in range(FAILING + 1):
            optimizer.zero_grad()
            net(batch(number, is_bad=is_bad)).backward()
            optimizer.step()
    return tuple(store.reports.values())


RUNS = pytest.mark.parametrize("run", [in_a_watched_loop, in_a_script])


@RUNS
@pytest.mark.parametrize("guard", GUARDS)
def test_a_guard_against_bad_numbers(run, guard, tmp_path, monkeypatch):
    (report,) = run(guard, tmp_path, monkeypatch, is_bad=True)
    assert report.diagnoses[0].code == "NS207"
    assert report.localization.first_bad.op == "aten.log.default"
    assert report.replay.fidelity in ("bitwise", "same_failure")


@RUNS
@pytest.mark.parametrize("guard", OTHERS)
def test_what_is_raised_for_another_reason(run, guard, tmp_path, monkeypatch):
    assert run(guard, tmp_path, monkeypatch, is_bad=False) == ()


def between(guard, folder: Path, monkeypatch, *, is_bad: bool, by_closure: bool) -> tuple:
    """Train with a guard between the model and its backward; return what was reported."""
    with script_of(folder, monkeypatch) as store:
        torch.manual_seed(0)
        net = Net(lambda _: None)
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        for number in range(FAILING + 1):

            def loss(number=number):
                optimizer.zero_grad()
                rows = batch(number, is_bad=is_bad)
                loss = net(batch(number, is_bad=False)) + scaled(net, rows).log().sum()
                if is_bad or number == FAILING:
                    guard(loss if is_bad else rows)
                loss.backward()
                return loss

            optimizer.step(loss) if by_closure else (loss(), optimizer.step())
    return tuple(store.reports.values())


@pytest.mark.parametrize(
    ("guard", "by_closure"),
    [(isnan, True), (unlike, True)]
    + [(guard, False) for guard in (isnan, asserted, read, counted, unlike, not_small, in_numpy)],
)
def test_a_guard_between_a_model_and_its_backward(guard, by_closure, tmp_path, monkeypatch):
    (report,) = between(guard, tmp_path, monkeypatch, is_bad=True, by_closure=by_closure)
    assert (report.diagnoses[0].code, report.proof.verdict) == ("NS207", "proven")
    assert report.audit[-1].action.reason.startswith("the exception goes on to the script")


def left_out(h: Tensor) -> None:
    """Raise for another reason, after what has no logarithm was left out."""
    torch.where(h > 1.0, (h - 1.0).log(), 0.0).sum().item()
    raise KeyError("missing")


@pytest.mark.parametrize(
    ("guard", "by_closure"),
    [(best, False), (near, False), (masked, True), (left_out, False), (left_out, True)],
)
def test_another_reason_between_a_model_and_its_backward(guard, by_closure, tmp_path, monkeypatch):
    assert between(guard, tmp_path, monkeypatch, is_bad=False, by_closure=by_closure) == ()


@RUNS
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_guard_of_what_is_given(run, value, tmp_path, monkeypatch):
    def guarded(self, x: Tensor) -> Tensor:
        if not torch.isfinite(x * 2).all():
            raise ValueError("bad input")
        return self.last(self.first(x).tanh()).square().mean()

    monkeypatch.setattr(Net, "forward", guarded)
    given = torch.where(batch(FAILING, is_bad=True) == 0.0, value, 0.5)
    monkeypatch.setitem(
        globals(),
        "batch",
        lambda n, **_: given if n == FAILING else given.clamp(0.5, 1.0).nan_to_num(),
    )
    found = run(isnan, tmp_path, monkeypatch, is_bad=True)
    # -Inf is what masks are made of, and all of a row may be masked
    assert [one.diagnoses[0].code for one in found] == ["NS501"] * (value != -math.inf)


class Probability(nn.Module):
    """The logarithm of a probability, which float32 rounds to 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        loss = self.first(x).sigmoid().log().mean()
        isnan(loss)
        return -loss


def test_a_cure_for_what_comes_does_not_say_that_the_step_goes_on(tmp_path, monkeypatch):
    with script_of(tmp_path, monkeypatch) as store:
        torch.manual_seed(0)
        net = Probability()
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        for number in range(FAILING + 1):
            optimizer.zero_grad()
            x = batch(number, is_bad=False)
            if number == FAILING:
                x[1] *= -1e4 * net.first.weight.detach()[0].sign()
            net(x).backward()
            optimizer.step()
    (report,) = store.reports.values()
    (done,) = [block.cells[0] for block in incident_blocks(report) if block.kind == "done"]
    assert report.audit[-1].action.kind == "adopt"
    assert done.startswith("nothing was changed: the exception goes on to the script; from now on")


class Shares(nn.Module):
    """Rows as shares of their sum, which one of them has not; its output is no loss yet."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).exp() * x
        h = h / h.sum(-1, keepdim=True)
        isnan(h)
        return h


def test_a_guard_before_the_loss_leaves_what_follows_unknown_and_has_code(tmp_path, monkeypatch):
    with script_of(tmp_path, monkeypatch) as store:
        torch.manual_seed(0)
        net = Shares()
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        for number in range(FAILING + 1):
            optimizer.zero_grad()
            x = batch(number, is_bad=False)
            x[1] *= number != FAILING
            net(x).square().mean().backward()
            optimizer.step()
    (report,) = store.reports.values()
    assert report.proof.verdict == "plausible"
    assert report.proof.next_experiment.endswith("the step ends before its loss")
    assert report.proof.typed


class Rates(nn.Module):
    """Parameters of a distribution, which has none at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> torch.distributions.Gamma:
        shape, rate = (self.first(x) * x[:, :1]).square().unbind(-1)
        return torch.distributions.Gamma(shape, rate + 0.1, validate_args=True)


def test_a_check_of_a_library_that_refuses_finite_numbers(tmp_path, monkeypatch):
    with script_of(tmp_path, monkeypatch) as store:
        torch.manual_seed(0)
        net = Rates()
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        for number in range(FAILING + 1):
            optimizer.zero_grad()
            x = batch(number, is_bad=False)
            x[1] *= number != FAILING
            (-net(x).log_prob(torch.ones(len(x)))).mean().backward()
            optimizer.step()
    (report,) = store.reports.values()
    (best, *_) = report.diagnoses
    assert (best.code, best.confidence) == ("NS204", "likely")
    assert best.cause.startswith("Expected parameter concentration")
    assert (
        best.source.text
        == "return torch.distributions.Gamma(shape, rate + 0.1, validate_args=True)"
    )
    text = "\n".join(cell for block in incident_blocks(report) for cell in block.cells)
    assert "leave out sample 1 of micro-batch 0" in text
    assert "the usual cure, not tried here: Keep it within its bounds" in text


@pytest.mark.parametrize(("wrong", "said"), [(-1, "be non-negative"), (4, "be smaller than")])
def test_a_label_that_one_hot_refuses(wrong, said, tmp_path, monkeypatch):
    """No operation of torch's has raised it: the line is that of the exception."""
    with script_of(tmp_path, monkeypatch) as store:
        torch.manual_seed(0)
        net = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        for number in range(FAILING + 1):
            optimizer.zero_grad()
            labels = torch.arange(8) % 4
            labels[3] = wrong if number == FAILING else 0
            scores = net(torch.randn(8, 4)).log_softmax(-1)
            (-(nn.functional.one_hot(labels, 4) * scores).sum(-1).mean()).backward()
            optimizer.step()
    (report,) = store.reports.values()
    (best, *_) = report.diagnoses
    assert best.code == "NS502"
    assert said in best.cause
    text = "\n".join(cell for block in incident_blocks(report) for cell in block.cells)
    assert "nn.functional.one_hot(labels, 4)" in text
    assert "A class is a number from 0 to one less than `num_classes`" in text


def test_a_batch_that_a_script_leaves_out_itself_has_a_cure(tmp_path, monkeypatch):
    """It is looked into at the next call of the model, as any other."""
    with script_of(tmp_path, monkeypatch) as store:
        torch.manual_seed(0)
        net = Net(lambda _: None)
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        for number in range(FAILING + 2):
            rows = scaled(net, batch(number, is_bad=True))
            loss = net(batch(number, is_bad=False)) + rows.log().sum()
            if not torch.isfinite(loss):
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    (report,) = store.reports.values()
    # The logarithm of 0 is of the data: a number in its place would be made up.
    assert (report.diagnoses[0].code, report.proof.verdict) == ("NS207", "isolated")
    assert [atom.remedy for atom in report.proof.minimal] == ["drop_sample"]
