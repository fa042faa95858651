"""The fixes of NS111 to NS114: updates, scales, rates, ways for gradients."""

import torch
from torch import nn
from torch.nn import functional as F

import tiny
from diagnose.fixes.kinds import HEALTHY, Fixes, close, sound
from diagnose.fixes.setup_formats import lora, loss_of

FIXES = Fixes()


# NS111 - an update that rounding swallows
FIXES.remedy("NS111", 1, "fp32_trainables")


@FIXES.plant("NS111", 2)
def adapters_in_float32(fixed):
    """Rates of 1e-6: the adapters of a bfloat16 base, in its format and in float32."""
    model = lora(tiny.llama().to(torch.bfloat16), casts=fixed)
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for parameter in trained:
            parameter.fill_(0.02)
    before = [p.detach().clone() for p in trained]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, weight_decay=0.0)
    with torch.autocast("cpu", torch.bfloat16):
        loss_of(model).backward()
    optimizer.step()
    moved = [(p != old).float().mean() > 0.9 for p, old in zip(trained, before, strict=True)]
    return sound(*trained) and all(moved)


def stochastically(weight, update):
    """``weight + update`` in bfloat16, rounded up as often as it is nearer to it."""
    bits = (weight.float() + update).view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32)
    return ((bits + noise) & -65536).view(torch.float32).to(torch.bfloat16)


@FIXES.plant("NS111", 3)
def stochastic_rounding(fixed):
    """500 updates of 1e-4 from 1: the mean over 1000 weights is that of float32."""
    weight = torch.ones(1000, dtype=torch.bfloat16)
    update = torch.full((1000,), 1e-4)
    for _ in range(500):
        weight = stochastically(weight, update) if fixed else weight + update.bfloat16()
    return abs(weight.float().mean().item() - 1.05) < 2e-3


@FIXES.plant("NS111", 3)
def kahan_summation(fixed):
    """With what was lost kept in 2 bytes more."""
    weight, lost = torch.ones(10, dtype=torch.bfloat16), torch.zeros(10, dtype=torch.bfloat16)
    assert lost.element_size() == 2
    for _ in range(500):
        update = torch.full((10,), 1e-4).bfloat16() + lost
        new = weight + update
        if fixed:
            lost = update - (new - weight)
        weight = new
    return bool(((weight.float() - 1.05).abs() < 5e-3).all())


@FIXES.cost("NS111", 3)
def an_update_has_noise():
    weight = stochastically(torch.ones(1000).bfloat16(), torch.full((1000,), 1e-3))
    return len(weight.unique()) == 2


@FIXES.plant("NS111", 4)
def a_larger_rate(fixed):
    weight = torch.ones(10, dtype=torch.bfloat16) - (1e-2 if fixed else 1e-3)
    return bool((weight < 1).all())


@FIXES.cost("NS111", 4)
def the_small_updates_are_still_lost():
    one = torch.ones((), dtype=torch.bfloat16)
    return bool(one - 1e-2 < 1 and one - 1e-3 == 1)


# NS112 - clipping and the loss scale
def scaled_step(gradient, *, unscaled=True, limit=1.0, scale=1024.0):
    """The update of a weight at 0 by SGD at a rate of 1."""
    weight = nn.Parameter(torch.zeros_like(gradient))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale((weight * gradient).sum()).backward()
    if unscaled:
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_([weight], limit)
    scaler.step(optimizer)
    return -weight.detach()


@FIXES.plant("NS112", 1)
def unscaled_before_clipping(fixed):
    small, large = torch.tensor([0.3, 0.4]), torch.tensor([3.0, 4.0])
    found = [scaled_step(each, unscaled=fixed) for each in (small, large)]
    return close(found[0], small) and close(found[1], large / 5)


FIXES.twin("NS112", 2)


@FIXES.plant("NS112", 2)
def bfloat16_needs_no_scaler(fixed):
    weight = nn.Parameter(torch.ones(1, 2))
    with torch.autocast("cpu", torch.bfloat16 if fixed else torch.float16):
        y = F.linear(torch.ones(1, 2), weight)
    (1e-8 * y.float()).sum().backward()
    return close(weight.grad / 1e-8, torch.ones(1, 2), within=0.01)


@FIXES.plant("NS112", 3)
def the_norm_is_float32(fixed):
    """300 gradients of 5000: squares and norm leave float16."""
    weight = nn.Parameter(torch.zeros(300).to(torch.float32 if fixed else torch.float16))
    weight.grad = torch.full_like(weight, 5000.0)
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    return close(weight.grad.float().norm(), torch.ones(()))


@FIXES.plant("NS112", 4)
def clipped_between_backward_and_step(fixed):
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    (weight * torch.tensor([300.0, 400.0])).sum().backward()
    if fixed:
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
    optimizer.step()
    if not fixed:
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
    return close(-weight, torch.tensor([0.6, 0.8]))


@FIXES.plant("NS112", 5)
def a_factor_is_taken_off(fixed):
    for factor in (1024.0, 1.0) if fixed else (1024.0,):
        weight = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        (factor * weight * torch.tensor([0.3, 0.4])).sum().backward()
        if fixed:
            weight.grad /= factor
        optimizer.step()
        if not close(-weight, torch.tensor([0.3, 0.4])):
            return False
    return True


# NS113 - hyperparameters
FIXES.twin("NS113", 1)
FIXES.test("NS113", 2, "commands/lr_range/test_lr_range.py::test_a_trainers_script")


@FIXES.plant("NS113", 3)
def a_schedule_of_updates(fixed):
    """16 updates of 4 micro-batches, and a linear decay that should end at 0 with them."""
    from transformers import get_linear_schedule_with_warmup

    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, 16)
    rates = []
    for micro in range(64):
        (weight.square().sum() / 400).backward()
        if micro % 4 == 3:
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            optimizer.zero_grad()
        if micro % 4 == 3 or not fixed:
            schedule.step()
    return sound(weight) and close(torch.tensor(rates), 1 - torch.arange(16) / 16)


# NS114 - no way for a gradient
def checkpointed(*, reentrant, asks=False):
    """A frozen base with adapters, recomputed."""
    model = lora(tiny.llama(use_cache=False))  # a cache would see each token twice
    if asks:
        model.enable_input_require_grads()
    for layer in model.base_model.model.model.layers:
        forward = layer.forward

        def again(hidden, *args, forward=forward, **kwargs):
            run = lambda h: forward(h, *args, **kwargs)  # noqa: E731
            return torch.utils.checkpoint.checkpoint(run, hidden, use_reentrant=reentrant)

        layer.forward = again
    loss = loss_of(model.train())
    if not loss.requires_grad:
        return False
    loss.backward()
    gradients = [p.grad for n, p in model.named_parameters() if "lora_B" in n]
    plain = lora(tiny.llama()).train()
    with torch.no_grad():
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            one.copy_(other)
    loss_of(plain).backward()
    right = [p.grad for n, p in plain.named_parameters() if "lora_B" in n]
    return all(map(close, gradients, right)) and any(g.any() for g in gradients)


@FIXES.plant("NS114", 1)
def checkpointing_that_is_not_reentrant(fixed):
    return checkpointed(reentrant=not fixed)


@FIXES.plant("NS114", 2)
def inputs_require_gradients(fixed):
    return checkpointed(reentrant=True, asks=fixed)


FIXES.twin("NS114", 3)


@FIXES.plant("NS114", 3)
def what_came_later_is_added(fixed):
    layer = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    head = nn.Linear(3, 1)
    before = head.weight.detach().clone()
    if fixed:
        optimizer.add_param_group({"params": list(head.parameters())})
    head(layer(HEALTHY)).sum().backward()
    optimizer.step()
    return sound(head.weight) and not torch.equal(head.weight, before)


@FIXES.plant("NS114", 4)
def a_loss_without_a_detour(fixed):
    layer = nn.Linear(3, 1)
    hidden = layer(HEALTHY)
    detour = hidden.detach().requires_grad_()
    (hidden if fixed else detour).square().mean().backward()
    return layer.weight.grad is not None and sound(layer.weight.grad) and layer.weight.grad.any()


@FIXES.plant("NS114", 5)
def one_of_two_factors_is_random(fixed):
    a, b = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3, 2))
    if fixed:
        nn.init.normal_(a)
    optimizer = torch.optim.SGD([a, b], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (HEALTHY @ (b @ a).T - 1).square().mean().backward()
        optimizer.step()
    return sound(a, b) and bool(b.any())
