"""``optimizer.step(closure)``: an update that is left out leaves no trace of its evaluations, and
one that comes back from a bad evaluation is healthy.
"""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

from closure_programs import OPTIMIZERS, Program, programs, same, train
from nanstop.decide.policy import Policy
from nanstop.errors import TrainingStopped
from nanstop.hosts.script import autowatch
from nanstop.hosts.script.updates import closures
from nanstop.numerics import host_memory
from nanstop.report.text.run_end import RunEnd
from nanstop.session.factory import opener
from nanstop.store.incidents import Store

QUICK = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
MANY = settings(QUICK, max_examples=400)
RECOVERS = "searching"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("incidents")


def watched(run, policy, folder):
    """Return what a run returns that is watched as ``nanstop run`` does, the rows of its incidents
    and all that was announced: of its end the updates that were left out.
    """
    store, said = Store(folder), []
    store.reset()
    policy = policy if isinstance(policy, Policy) else Policy(on_failure=policy)
    autowatch.install(opener(policy, store, said.append))
    try:
        ended = run()
    finally:
        autowatch.unwatch()
    assert not torch._C._len_torch_function_stack(), "a mode of ours was left behind"
    rows = json.loads((folder / "summary.json").read_text())["incidents"]
    lost = [num for one in said if isinstance(one, RunEnd) for num in one.lost.values() if num]
    return ended, rows, [one for one in said if isinstance(one, str)] + lost


def differences(one, other):
    """Return what of two ends is not the same."""
    return [name for name in vars(one) if not same(vars(one)[name], vars(other)[name])]


def observed_alike(program, folder):
    return differences(train(program), watched(lambda: train(program), "observe", folder)[0])


def left_out_alike(program, policy, folder):
    """Return what of a run that leaves its bad update out is not as in a run without that step;
    where the plain run stays finite there is nothing to leave out.
    """
    plain = train(program)
    ended, rows, said = watched(lambda: train(program), policy, folder)
    if all(w.isfinite().all() for w in plain.weights):
        return differences(plain, ended) + rows + said
    assert [(row["step"], row["count"], row["action"]) for row in rows] == [(program.at, 1, "skip")]
    assert said == [1]
    without = train(replace(program, at=None, without=program.at))
    return [name for name in differences(without, ended) if name in ("weights", "state")]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_healthy_closures_are_bitwise_the_same_under_every_policy(name, folder):
    plain = train(Program(name))
    for policy in ("observe", "skip", "repair", "stop"):
        ended, rows, said = watched(lambda: train(Program(name)), policy, folder)
        assert (differences(plain, ended), rows, said) == ([], [], [])


@pytest.mark.parametrize("evaluation", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_that_is_left_out_leaves_weights_and_state_as_before_it(name, evaluation, folder):
    program = Program(name, at=2, evaluation=evaluation)
    assert left_out_alike(program, "skip", folder) == []


@pytest.mark.slow
@QUICK
@given(programs())
def test_random_closures_end_as_alone_or_as_without_the_bad_step(folder, program):
    assert observed_alike(program, folder) == []
    assert left_out_alike(program, "repair", folder) == []


@pytest.mark.slow
@MANY
@given(programs())
def test_many_random_closures_end_as_alone_or_as_without_the_bad_step(folder, program):
    assert observed_alike(program, folder) == []
    assert left_out_alike(program, "skip", folder) == []
    assert left_out_alike(program, "repair", folder) == []


def test_a_line_search_that_comes_back_from_a_bad_place_is_healthy(folder):
    program = Program(RECOVERS, at=2, evaluation=1)
    plain = train(program)
    for policy in ("observe", "skip", "stop"):
        ended, rows, said = watched(lambda: train(program), policy, folder)
        assert (differences(plain, ended), rows, said) == ([], [], [])


@pytest.mark.parametrize("name", ["lbfgs", "sharpness", "sgd"])
def test_a_stop_leaves_the_weights_that_the_update_began_with(name, folder):
    program, caught = Program(name, at=2, evaluation=int(name != "sgd")), []

    def run():
        return train(program, caught=caught)

    ended, rows, _ = watched(run, "stop", folder)
    assert [type(error) for error in caught] == [TrainingStopped]
    assert [row["action"] for row in rows] == ["stop"]
    assert same(ended.weights, train(replace(program, num_steps=2)).weights)


def test_what_cannot_be_put_back_for_want_of_memory_is_said_so(folder, monkeypatch):
    monkeypatch.setattr(host_memory, "free_bytes", lambda: 0)
    program = Program("lbfgs", at=2, evaluation=1)
    ended, rows, _ = watched(lambda: train(program), "skip", folder)
    assert all(w.isfinite().all() for w in ended.weights)
    report = folder / rows[0]["folder"] / "report.json"
    (entry,) = json.loads(report.read_text())["audit"]
    assert entry["outcome"].startswith("failed: the update had moved the weights before")


def test_an_optimizer_that_evaluates_once_is_copied_once(folder, monkeypatch):
    copied, copy = [], closures._copy
    monkeypatch.setattr(closures, "_copy", lambda *given: copied.append(1) or copy(*given))
    for name, num in (("adam", 1), ("lbfgs", 4)):
        copied.clear()
        watched(lambda name=name: train(Program(name)), "skip", folder)
        assert len(copied) == num


def test_a_closure_by_any_name_with_what_else_the_step_takes(folder):
    class Own(torch.optim.SGD):
        def step(self, evaluate, scale, *, factor=1.0):
            self.given = (scale, factor, torch.is_grad_enabled())
            evaluate()
            return super().step()

    class Told(torch.optim.SGD):
        def step(self, options):
            self.given = options
            options["closure"]()
            return super().step()

    def run():
        torch.manual_seed(0)
        net = nn.Linear(3, 1)
        optimizers = [Own(net.parameters(), 0.1), Told(net.parameters(), 0.1)]

        def closure():
            net.zero_grad()
            loss = net(torch.ones(2, 3)).square().mean()
            loss.backward()
            return loss

        optimizers[0].step(closure, 2.0, factor=3.0)
        optimizers[1].step({"closure": closure})
        return [*net.parameters(), *(optimizer.given for optimizer in optimizers)][:3]

    assert same(run(), watched(run, "skip", folder)[0])


def test_a_closure_that_is_evaluated_for_its_value_alone_is_no_step(folder):
    class Armijo(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure):
            with torch.enable_grad():
                first = closure()
            weights = self.param_groups[0]["params"]
            rate, start = 1e12, [p.clone() for p in weights]
            while True:
                for p, before in zip(weights, start, strict=True):
                    p.copy_(before - rate * p.grad)
                if closure() < first:
                    return first
                rate /= 10

    def run():
        torch.manual_seed(0)
        net, losses, rows = nn.Linear(3, 1), [], torch.randn(8, 3)
        optimizer = Armijo(net.parameters(), 0.1)

        def closure():
            loss = (net(rows) - 1).pow(4).mean()
            losses.append(float(loss.detach()))
            if torch.is_grad_enabled():
                optimizer.zero_grad()
                loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return [*net.parameters(), losses]

    plain = run()
    assert any(loss == float("inf") for loss in plain[-1])
    for policy in ("observe", "skip"):
        ended, rows, said = watched(run, policy, folder)
        assert same(plain, ended)
        assert (rows, said) == ([], [])


def with_a_bad_row(returned, folder=None):
    """Train with closures of which the fourth meets a row that is not finite, and return the
    weights and what the optimizer was given; ``returned``: what a closure makes of its loss.
    """
    given, rows = [], torch.randn(48, 3, generator=torch.Generator().manual_seed(1))
    rows[14, 1] = float("nan")
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for batch in rows.split(4):
        kept = batch if folder is not None else batch[batch.isfinite().all(-1)]

        def closure(batch=kept):
            optimizer.zero_grad()
            loss = (net(batch).squeeze(-1) - batch.sum(-1)).square().mean()
            result = returned(loss)
            loss.backward()
            return result

        given.append(optimizer.step(closure))
    return [p.detach() for p in net.parameters()], given


@pytest.mark.parametrize(
    "returned",
    [lambda loss: loss, lambda loss: (loss / 2).detach().clone(), lambda _: None],
    ids=["loss", "detached", "nothing"],
)
def test_an_update_of_one_evaluation_is_made_anew_with_what_the_closure_returns(returned, folder):
    weights, given = with_a_bad_row(returned)
    policy = Policy(allow=("drop_sample",))
    (ended, told), rows, _ = watched(lambda: with_a_bad_row(returned, folder), policy, folder)
    assert [(row["step"], row["code"], row["action"]) for row in rows] == [
        (3, "NS501", "quarantine")
    ]
    assert all(torch.allclose(one, other) for one, other in zip(ended, weights, strict=True))
    if given[0] is not None:
        assert torch.allclose(torch.stack(told), torch.stack(given))


def test_a_number_that_the_closure_has_read_is_out(folder):
    policy = Policy(allow=("drop_sample",))
    (ended, _), rows, _ = watched(lambda: with_a_bad_row(torch.Tensor.item, folder), policy, folder)
    assert [(row["step"], row["code"], row["action"]) for row in rows] == [(3, "NS501", "skip")]
    assert all(one.isfinite().all() for one in ended)
