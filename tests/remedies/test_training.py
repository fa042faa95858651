"""What the remedies of the update do, through every wrapper that a host puts around an
optimizer.
"""

import pytest
import torch

from nanstop.records import Atom
from nanstop.remedies.apply import TABLE, applied, until_update
from nanstop.remedies.precision import reference
from remedies.views import View
from versions import needs


def problem(dtype=torch.float32, optimizer=torch.optim.AdamW, **options):
    """A linear layer with gradients, its optimizer, and a view of both."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 80, bias=False).to(dtype)
    view = View(layer, optimizer=optimizer(layer.parameters(), **({"lr": 1e-2} | options)))
    backward(view)
    return view


def backward(view, seed=1):
    inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
    view.root.zero_grad()
    view.root(inputs.to(view.root.weight.dtype)).square().mean().backward()


def moved(view, *atoms, steps=1):
    """How far the weight goes in ``steps`` steps under the atoms."""
    before = view.root.weight.detach().clone()
    with applied(view, atoms):
        for seed in range(steps):
            backward(view, seed)
            view.optimizer.step()
    return view.root.weight.detach() - before


def atom(remedy, value=""):
    return Atom(remedy=remedy, value=value)


def test_lr_is_scaled_during_the_step_only():
    view = problem(optimizer=torch.optim.SGD)
    scheduler = torch.optim.lr_scheduler.LambdaLR(view.optimizer, lambda step: 1 / (1 + step))
    gradient = view.root.weight.grad.clone()
    before = view.root.weight.detach().clone()
    with applied(view, [atom("lr", "0.1")]):
        view.optimizer.step()
        scheduler.step()
        assert scheduler.get_last_lr() == [0.005]
    assert torch.allclose(view.root.weight, before - 1e-3 * gradient)
    assert view.optimizer.param_groups[0]["lr"] == 0.005


def test_a_loss_scale_is_taken_off_the_gradients_of_the_step_alone():
    view = problem(optimizer=torch.optim.SGD, lr=1.0)
    before, gradient = view.root.weight.detach().clone(), view.root.weight.grad.clone()
    with applied(view, [atom("unscale", "4")]):
        view.optimizer.step()
    assert torch.equal(view.root.weight, before - gradient / 4)
    view.root.weight.grad.copy_(gradient)
    view.optimizer.step()
    assert torch.equal(view.root.weight, before - gradient / 4 - gradient)


def test_a_weight_decay_is_at_most_the_value_during_the_step_only():
    view = problem(optimizer=torch.optim.SGD, lr=1.0, weight_decay=3.0)
    before, gradient = view.root.weight.detach().clone(), view.root.weight.grad.clone()
    with applied(view, [atom("weight_decay", "0")]):
        view.optimizer.step()
    assert torch.equal(view.root.weight, before - gradient)
    assert view.optimizer.param_groups[0]["weight_decay"] == 3.0
    view.optimizer.param_groups[0]["weight_decay"] = 0.0
    with applied(view, [atom("weight_decay", "0.5")]):
        view.optimizer.step()
    assert torch.equal(view.root.weight, before - gradient - gradient)


def test_clip():
    view = problem(optimizer=torch.optim.SGD, lr=1.0)
    norm = float(view.root.weight.grad.norm())
    assert float(moved(view, atom("clip", str(norm / 10)), steps=1).norm()) <= norm / 10 * 1.01


def test_clip_is_told_of_a_loss_scale_that_a_fused_step_divides_by():
    view = problem(optimizer=torch.optim.SGD, lr=1.0, fused=True)
    norm = float(view.root.weight.grad.norm())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    view.root.weight.grad.mul_(1024.0)
    before = view.root.weight.detach().clone()
    with applied(view, [atom("clip", str(norm / 10))]):
        scaler.step(view.optimizer)
    assert float((view.root.weight.detach() - before).norm()) == pytest.approx(norm / 10, rel=1e-3)


def test_float32_state_around_another_optimizer():
    view = problem(torch.float16)
    with applied(view, [atom("optimizer_swap", "adamw"), atom("fp32_optimizer_state")]):
        view.optimizer.step()
    assert view.root.weight.dtype == view.root.weight.grad.dtype == torch.float16
    assert view.root.weight.isfinite().all()


def test_an_update_inside_the_reference():
    view = problem(torch.float16, eps=1e-4)
    view.optimizer.step()
    with reference(view):
        backward(view)
        view.optimizer.step()
        assert view.optimizer.state[view.root.weight]["exp_avg"].dtype == torch.float32
    assert view.optimizer.state[view.root.weight]["exp_avg"].dtype == torch.float16


def test_clip_and_lr_come_before_another_optimizer_takes_over():
    wanted = problem()
    torch.nn.utils.clip_grad_norm_(wanted.root.parameters(), 1e-3)
    wanted.optimizer.param_groups[0]["lr"] *= 0.5
    wanted.optimizer.step()
    view = problem()
    atoms = [atom("optimizer_swap", "adamw"), atom("clip", "1e-3"), atom("lr", "0.5")]
    with applied(view, atoms):
        view.optimizer.step()
    assert torch.allclose(view.root.weight, wanted.root.weight, atol=1e-7)
    assert view.root.weight.grad is not None


def test_half_adam_breaks_and_each_cure_mends_it():
    """AdamW's eps of 1e-8 is 0 in float16: an element with zero gradient gives 0/0."""

    def step(*atoms):
        view = problem(torch.float16)
        view.root.weight.grad[0].zero_()
        with applied(view, atoms):
            if atoms and atoms[0].remedy == "fp32_trainables":
                assert view.root.weight.grad.dtype == torch.float32
            view.optimizer.step()
        return view.root.weight

    assert not step().isfinite().all()
    for cure in (
        atom("optimizer_eps", "1e-05"),
        atom("fp32_optimizer_state"),
        atom("optimizer_swap", "adamw"),
        atom("fp32_trainables"),
    ):
        weight = step(cure)
        assert weight.isfinite().all(), cure
        assert weight.dtype == torch.float16


def test_float32_state_stays_between_steps_and_goes_back():
    view = problem(torch.float16, eps=1e-4)
    view.optimizer.step()
    weight = view.root.weight
    moment = view.optimizer.state[weight]["exp_avg"]
    pointer = moment.data_ptr()
    with applied(view, [atom("fp32_optimizer_state")]):
        backward(view)
        view.optimizer.step()
        assert view.optimizer.state[weight]["exp_avg"].dtype == torch.float32
        assert weight.dtype == weight.grad.dtype == torch.float16
    after = view.optimizer.state[weight]["exp_avg"]
    assert (after.dtype, after.data_ptr()) == (torch.float16, pointer)


@pytest.mark.parametrize("remedy", ["fp32_optimizer_state", "fp32_trainables"])
def test_state_that_an_optimizer_keeps_wide_stays_so(remedy):
    """The scales of 8-bit moments are float32 beside bfloat16 weights."""
    view = problem(torch.bfloat16)
    view.optimizer.step()
    state = view.optimizer.state[view.root.weight]
    state["absmax"] = scales = torch.full((20,), 1 / 3)
    with applied(view, [atom(remedy)]):
        saved = view.optimizer.state_dict()["state"][0]["absmax"]
        view.optimizer.step()
    assert state["absmax"] is scales
    assert saved.equal(scales)
    assert saved.dtype == torch.float32
    assert state["exp_avg"].dtype == torch.bfloat16


def test_swap_of_float32_adamw_is_the_same_training():
    plain, swapped = problem(), problem()
    assert torch.allclose(
        moved(plain, steps=3), moved(swapped, atom("optimizer_swap", "adamw"), steps=3), atol=1e-6
    )


@needs("bitsandbytes", "0.50", "8-bit optimizers on the CPU")
def test_swap_goes_on_from_eight_bit_moments():
    import bitsandbytes as bnb

    view = problem(optimizer=bnb.optim.AdamW8bit)
    moved(view, steps=3)
    state = view.optimizer.state[view.root.weight]
    assert state["state1"].dtype == torch.uint8
    held = {key: value.clone() for key, value in state.items() if torch.is_tensor(value)}
    exact = problem()
    moved(exact, steps=3)
    with torch.no_grad():
        exact.root.weight.copy_(view.root.weight)
    step = moved(view, atom("optimizer_swap", "adamw"))
    wanted = moved(exact)
    cosine = torch.nn.functional.cosine_similarity(step.flatten(), wanted.flatten(), dim=0)
    assert cosine > 0.99
    assert all(torch.equal(state[key], held[key]) for key in held)


@pytest.mark.parametrize("gradient", [1.0, float("inf")])
def test_swap_is_told_of_a_loss_scale_that_a_fused_step_divides_by(gradient):
    def step(*atoms):
        view = problem(eps=1e-2, fused=True)
        before = view.root.weight.detach().clone()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(torch.zeros(()))
        view.root.weight.grad.mul_(1024.0)[0, 0] *= gradient
        with applied(view, atoms):
            scaler.step(view.optimizer)
        return view.root.weight - before

    expected = step()
    assert bool(expected.any()) == (gradient == 1.0)
    assert torch.allclose(expected, step(atom("optimizer_swap", "adamw")), rtol=1e-3, atol=1e-7)


def test_accelerates_wrapper_with_a_scaler_is_reached():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    # It is every accelerator's, and a training that was broken off leaves it as it was then.
    accelerator.gradient_state._set_sync_gradients(True)
    view = problem(optimizer=torch.optim.SGD, lr=1.0)
    gradient = view.root.weight.grad.clone()
    before = view.root.weight.detach().clone()
    view.optimizer = accelerator.prepare_optimizer(view.optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))
    view.optimizer.__setstate__({"scaler": scaler})
    with applied(view, [atom("lr", "0.1")]):
        view.optimizer.step()
    assert not view.optimizer.step_was_skipped
    assert torch.allclose(view.root.weight, before - 0.1 * gradient)


def test_a_step_that_raises_leaves_the_values_as_they_were():
    view = problem()

    def fails():
        raise ZeroDivisionError("in the closure")

    with pytest.raises(ZeroDivisionError, match="closure"), applied(view, [atom("lr", "0.1")]):
        view.optimizer.step(fails)
    assert view.optimizer.param_groups[0]["lr"] == 1e-2


def test_loss_scale():
    view = problem()
    view.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with applied(view, [atom("loss_scale", "0.25")]):
        assert float(view.scaler.scale(torch.ones(()))) == 256.0
    assert view.scaler.get_scale() == 1024.0
    with applied(view, [atom("loss_scale", "0.25")]):
        view.scaler.update(32.0)
    assert view.scaler.get_scale() == 32.0


def test_span():
    micro = {name for name, remedy in TABLE.items() if remedy.span == "micro"}
    assert micro == {
        "drop_micro",
        "drop_sample",
        "attention",
        "eager",
        "finite_constant",
        "finite_fill",
        "form",
        "fp32_line",
        "fp32_logits",
        "held_fill",
        "island",
        "memory_fill",
        "outer_autocast",
        "sdpa_kernel",
        "stable_form",
    }
    mixed = [atom("outer_autocast", "float16"), atom("bf16"), atom("bf16")]
    assert until_update(mixed) == (atom("bf16"),)
