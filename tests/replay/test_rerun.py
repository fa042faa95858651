"""Attempts are undone; fidelity is measured."""

import pytest
import torch
from torch import nn

import planted
from fnstep import FnStep
from nanstop.errors import ShortOfMemoryError
from nanstop.records import RunFacts
from nanstop.replay.rerun import attempt, rerun
from planted import NAN, Net, called, text_batch


def step_of(model, loss=called, *, batches=1, optimizer=None):
    return FnStep(model, loss, [text_batch()] * batches, optimizer)


def bits(model):
    return [p.detach().clone() for p in model.parameters()]


def test_clean_attempt():
    run = attempt(step_of(Net(lambda x: x)), 0, keep_grads=True)
    assert (run.failed, run.bad, run.error) == (False, (), None)
    assert set(run.grads) == {
        "embed.weight",
        "proj.weight",
        "proj.bias",
        "head.weight",
        "head.bias",
    }
    assert run.loss == pytest.approx(4.2, abs=0.5)


def test_bad_loss_and_gradients_are_named():
    run = attempt(step_of(Net(lambda x: x * NAN)), 0)
    assert run.failed
    assert run.bad[:2] == ("loss", "grad:embed.weight")


def test_bad_gradient_alone():
    run = attempt(step_of(Net(lambda x: x + (x - x).abs().sqrt())), 0)
    assert run.bad == ("grad:embed.weight", "grad:proj.weight", "grad:proj.bias")


def test_error_is_kept_and_nothing_is_left():
    model = Net(lambda x: x)
    model.proj.weight.grad = kept = torch.ones(8, 8)

    def loss(m, b):
        m.embed.weight.data.add_(1)
        torch.rand(3)
        raise ValueError("planted")

    before, rng = bits(model), torch.get_rng_state()
    run = attempt(step_of(model, loss), 0)
    assert isinstance(run.error, ValueError)
    assert run.failed
    assert run.loss is None
    assert all(torch.equal(a, b) for a, b in zip(before, bits(model), strict=True))
    assert torch.equal(rng, torch.get_rng_state())
    assert model.proj.weight.grad is kept


def test_update_runs_the_window_and_is_undone():
    model = Net(lambda x: x)
    optimizer = torch.optim.SGD(model.parameters(), lr=float("inf"))
    before = bits(model)
    run = attempt(step_of(model, batches=2, optimizer=optimizer), 0, update=True)
    assert "param:head.bias" in run.bad
    assert all(torch.equal(a, b) for a, b in zip(before, bits(model), strict=True))


def test_replaced_batch():
    longer = {"input_ids": planted.ids()[:1], "labels": planted.ids()[:1]}
    step = step_of(Net(lambda x: x))
    assert attempt(step, 0, batch=longer).digest != attempt(step, 0).digest


def test_context_is_entered_inside_the_isolation():
    model = Net(lambda x: x)
    seen = []

    class Under:
        def __enter__(self):
            seen.append(model.proj.weight.grad)

        def __exit__(self, *_):
            seen.append(model.proj.weight.grad is not None)

    model.proj.weight.grad = torch.ones(8, 8)
    attempt(step_of(model), 0, under=Under)
    assert seen == [None, True]


def replayed(step, first_loss, **options):
    return rerun(step, 0, incident="i", first_loss=first_loss, **options)


def test_bitwise():
    replay = replayed(step_of(Net(lambda x: x * NAN)), torch.tensor(NAN))
    assert (replay.fidelity, replay.runs, replay.num_failed) == ("bitwise", 3, 3)
    assert replay.eager == "unknown"


def test_other_loss_than_training_saw():
    assert replayed(step_of(Net(lambda x: x * NAN)), torch.tensor(1.0)).fidelity == "same_failure"


def test_loss_that_is_no_number_of_its_own():
    model = Net(lambda x: x * NAN)
    replay = replayed(step_of(model, lambda m, b: m(**b).reshape(1, 1)), torch.full((2,), NAN))
    assert replay.fidelity == "bitwise"


def test_not_reproduced():
    assert replayed(step_of(Net(lambda x: x)), torch.tensor(NAN)).fidelity == "not_reproduced"


class Sometimes(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (NAN if self.calls % 2 else 1.0)


def test_sometimes_is_different():
    replay = replayed(step_of(Net(Sometimes())), torch.tensor(NAN))
    assert (replay.fidelity, replay.num_failed) == ("different", 2)


class Restless(nn.Module):
    """Fails each time, after a finite value that is never the same."""

    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Identity(), 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x + self.calls) * NAN


def test_losses_that_are_all_nan_are_told_apart_by_what_modules_return():
    assert replayed(step_of(Net(Restless())), torch.tensor(NAN)).fidelity == "same_failure"


def test_nothing_finite_to_compare_is_not_called_identical():
    model = nn.ParameterList([nn.Parameter(torch.ones(2))])  # which is never called
    step = step_of(model, lambda m, b: (m[0] * NAN).sum())
    assert replayed(step, torch.tensor(NAN)).fidelity == "same_failure"


def test_exception_that_raises_again():
    def loss(m, b):
        raise RuntimeError("probability tensor contains either inf, nan")

    assert replayed(step_of(Net(lambda x: x), loss), None, raised=True).fidelity == "bitwise"
    assert replayed(step_of(Net(lambda x: x), loss), None).fidelity == "same_failure"


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize(("fault", "eager"), [("compiled", "finite"), ("both", "nonfinite")])
def test_compiled_code_is_told_from_eager(fault, eager):
    def body(x):
        if fault == "both" or torch.compiler.is_compiling():
            return x * NAN
        return x

    model = Net(body)
    model.body = torch.compile(model.body, backend="eager")
    step = step_of(model)
    step.facts = RunFacts(compiled=True)
    assert replayed(step, torch.tensor(NAN)).eager == eager


def test_sparse_gradients_have_a_digest():
    model = nn.Embedding(64, 8, sparse=True)
    plain = attempt(step_of(model, lambda m, b: m(b["input_ids"]).sum()), 0)
    double = attempt(step_of(model, lambda m, b: m(b["input_ids"]).sum() * 2), 0)
    assert plain.digest != double.digest
    bad = attempt(step_of(model, lambda m, b: m(b["input_ids"]).sum() * NAN), 0)
    assert bad.bad == ("loss", "grad:weight")


def test_a_generator_of_the_runs_own_is_seen_where_the_failure_does_not_come_back():
    own = torch.Generator().manual_seed(0)
    private = step_of(Net(lambda x: x * torch.rand(1, generator=own)))
    assert rerun(private, 0, incident="", first_loss=torch.tensor(NAN)).private_rng
    public = step_of(Net(lambda x: x * torch.rand(1, generator=torch.default_generator)))
    assert not rerun(public, 0, incident="", first_loss=torch.tensor(NAN)).private_rng


@pytest.mark.parametrize("short", [(0,), (1,), (2,), (0, 1)])
def test_a_replay_that_memory_was_too_short_for_is_not_counted(short):
    """The others tell, where there are two to be held against each other."""
    runs = []

    def loss(model, batch):
        runs.append(1)
        if len(runs) - 1 in short:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return called(model, batch)

    step = step_of(Net(lambda x: x * torch.tensor([NAN] + [1.0] * 7)), loss)
    if len(short) > 1:
        with pytest.raises(ShortOfMemoryError):
            rerun(step, 0, incident="", first_loss=torch.tensor(NAN))
        return
    found = rerun(step, 0, incident="", first_loss=torch.tensor(NAN))
    assert (found.fidelity, found.runs, found.num_failed) == ("bitwise", 2, 2)
