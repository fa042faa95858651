"""Which elements an update should move and does not, exactly, for every format and optimizer."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fnstep import FnStep
from nanstop import NanstopError
from nanstop.measure.updates import after_update, before_update, probe_update, trained_by

torch.set_num_threads(1)


class Weights(nn.Module):
    """``weight * x``: its gradient is ``x``."""

    def __init__(self, values, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(values, dtype=dtype))

    def forward(self, x):
        return (self.weight.float() * x).sum()


def step_of(values, grads, dtype=torch.bfloat16, optimizer=None, **options):
    model = Weights(values, dtype)
    kind = optimizer or torch.optim.SGD
    made = kind(model.parameters(), **({"lr": 1.0} | options))
    return FnStep(model, lambda m, b: m(b["x"]), [{"x": torch.tensor(grads)}], made)


FORMATS = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
VALUES = st.floats(-100, 100, width=16).filter(lambda v: v == 0 or abs(v) > 1e-3)
UPDATES = st.floats(-1, 1, width=16)


@settings(max_examples=60, deadline=None)
@given(FORMATS, st.lists(st.tuples(VALUES, UPDATES), min_size=1, max_size=8))
def test_lost_is_a_sum_that_rounds_to_the_weight(dtype, pairs):
    values, grads = zip(*pairs, strict=True)
    step = step_of(values, grads, dtype)
    weight = step.view.root.weight.detach()
    update = torch.tensor(grads).to(
        dtype
    )  # of SGD at a rate of 1: the gradient in the weight's format
    stays = (weight.double() - update.double()).to(dtype) == weight
    expected = int((stays & (update != 0)).sum())
    (row,) = probe_update(step).rows
    assert (row.num_lost, row.num_total) == (expected, int((update != 0).sum()))


def test_adam_in_bfloat16_at_a_small_rate():
    step = step_of([1.0, 0.02, 1e-4], [1.0, 1.0, 1.0], optimizer=torch.optim.AdamW, lr=1e-6)
    found = probe_update(step)
    assert found.lr == 1e-6
    assert (found.rows[0].num_lost, found.rows[0].num_total) == (2, 3)
    assert found.rows[0].dtype == "bfloat16"


def test_everything_is_as_before():
    step = step_of([1.0, 2.0], [1.0, 0.5], dtype=torch.float32, optimizer=torch.optim.AdamW, lr=0.1)
    step.run(0)
    step.update()
    model, optimizer = step.view.root, step.view.optimizer
    before = model.weight.detach().clone(), model.weight.grad, dict(optimizer.state[model.weight])
    moments = {k: v.clone() for k, v in before[2].items()}
    probe_update(step)
    assert torch.equal(model.weight, before[0])
    assert model.weight.grad is before[1]
    assert all(torch.equal(v, moments[k]) for k, v in optimizer.state[model.weight].items())


def test_second_moments_that_vanish_in_float16():
    step = step_of([1.0, 1.0], [1e-3, 1.0], torch.float16, torch.optim.AdamW, lr=1e-3)
    found = probe_update(step)
    (state,) = found.states
    assert (state.dtype, state.num_vanished, state.num_total) == ("float16", 1, 2)
    assert found.broken == ("weight",)


def test_the_rate_is_that_after_the_warm_up():
    step = step_of([1.0], [1.0], torch.float32)
    torch.optim.lr_scheduler.LambdaLR(step.view.optimizer, lambda _: 0.0)
    found = probe_update(step)
    assert found.lr == 1.0
    assert found.rows[0].num_lost == 0
    assert step.view.optimizer.param_groups[0]["lr"] == 0.0


def test_weights_with_a_compensation_lose_nothing():
    class Kahan(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["kahan_comp"] = p.grad.clone()

    (row,) = probe_update(step_of([1.0], [1.0], optimizer=Kahan)).rows
    assert row.num_lost == 0


@pytest.mark.parametrize(
    ("grads", "options", "message"),
    [
        ([float("inf")], {}, "gradients are not finite"),
        ([1.0], {"lr": 0.0}, "learning rate is 0"),
    ],
)
def test_no_update_no_answer(grads, options, message):
    with pytest.raises(NanstopError, match=message):
        probe_update(step_of([1.0], grads, torch.float32, **options))


def test_no_optimizer():
    step = step_of([1.0], [1.0])
    step.view.optimizer = None
    with pytest.raises(NanstopError, match="no optimizer"):
        probe_update(step)


def test_a_sample_of_a_real_update_has_the_share_of_the_whole():
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    nn.init.normal_(model.weight, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    model.weight.grad = torch.randn(64, 64).to(torch.bfloat16)
    named = trained_by(optimizer, model)
    sample, whole = before_update(named, most=500), before_update(named)
    optimizer.step()
    ((few,), _), ((all_of_them,), (state,)) = (
        after_update(optimizer, named, noted) for noted in (sample, whole)
    )
    assert all_of_them.num_total == state.num_total == 4096
    assert 400 < few.num_total <= 500
    share, true = few.num_lost / few.num_total, all_of_them.num_lost / 4096
    assert abs(share - true) < 0.05
    assert 0.7 < true < 0.9


def test_behind_a_master_copy_nothing_is_lost():
    class Mastered(torch.optim.SGD):
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                master = state.setdefault("master_param", parameter.detach().float())
                master.sub_(parameter.grad.float() * self.param_groups[0]["lr"])
                parameter.data.copy_(master)

    step = step_of([1.0, 2.0], [1.0, 1.0], optimizer=Mastered, lr=1e-6)
    assert probe_update(step).rows[0].num_lost == 0
