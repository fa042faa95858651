"""The fixes of 3xx and 4xx: gradients, scalers, clipping, weights and optimizers."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nanstop
from diagnose.fixes.forward import ZERO
from diagnose.fixes.kinds import HEALTHY, Fixes, backpropagated, close, sound
from fnstep import FnView
from nanstop.faults.specimen import run_plain
from nanstop.faults.table import ZOO
from nanstop.records import Atom
from nanstop.remedies.apply import applied

FIXES = Fixes()


# NS301: a gradient leaves float16
@FIXES.plant("NS301", 1)
def a_scaler_finds_a_smaller_scale(fixed):
    weight = nn.Parameter(torch.ones(1, 1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    for _ in range(3 if fixed else 1):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            y = F.linear(torch.full((1, 1), 3.0), weight)
        scaler.scale(y.float().sum() * 0.5).backward()
        scaled = weight.grad.clone()
        scaler.step(optimizer)
        scaler.update()
    moved = math.isclose(weight.item(), 1 - 2 * 0.15, rel_tol=1e-3)  # one step was skipped
    return sound(weight) and bool(scaled.isfinite().all()) and moved


@FIXES.cost("NS301", 1)
@FIXES.cost("NS303", 3)
def a_scaler_refuses_half_gradients():
    weight = nn.Parameter(torch.ones(2).half())
    weight.grad = torch.ones(2).half()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.step(torch.optim.SGD([weight]))
    return True


@FIXES.plant("NS301", 2)
def float32_takes_the_sum(fixed):
    """Autocast would round the gradient to float16 before it is stored: computed in float32."""
    weight = nn.Parameter(torch.ones(1, 1).to(torch.float32 if fixed else torch.float16))
    tokens = torch.full((8192, 1), 10.0).to(weight.dtype)
    F.linear(tokens, weight).float().sum().backward()
    return bool(weight.grad.isfinite().all()) and weight.grad == 81920


FIXES.remedy("NS301", 3, "island", "head", "float32")
FIXES.remedy("NS301", 4, "bf16")


def bytes_of_adam(stored):
    """Bytes a parameter of its weight, gradient and moments."""
    weight = nn.Parameter(torch.ones(1000, dtype=stored))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = [v for v in optimizer.state[weight].values() if v.numel() == 1000]
    return sum(t.numel() * t.element_size() for t in (weight, weight.grad, *state)) / 1000


@FIXES.cost("NS102", 1)
@FIXES.cost("NS110", 1)
@FIXES.cost("NS111", 1)
@FIXES.cost("NS301", 2)
@FIXES.cost("NS302", 2)
@FIXES.cost("NS402", 1)
def eight_bytes_more():
    return bytes_of_adam(torch.float32) - bytes_of_adam(torch.float16) == 8


@FIXES.cost("NS110", 2)
@FIXES.cost("NS402", 2)
def six_bytes_more():
    return 2 * (torch.float32.itemsize - torch.uint8.itemsize) == 6


@FIXES.cost("NS301", 0)
def a_power_of_two_changes_no_digit():
    x = torch.randn(1000)
    return torch.equal(x * 2.0**16 / 2.0**16, x)


# NS302: the scale collapses
def scale_holds(*atoms):
    """Whether the planted collapse is none under ``atoms``, at a rate that its steep loss takes."""
    specimen = ZOO["NS302"].fault()
    specimen.optimizer.param_groups[0]["lr"] = 1e-12
    with applied(FnView(specimen.model, specimen.optimizer), atoms):
        collapses = ZOO["NS302"].sign(specimen)
        loss = specimen.loss_fn(specimen.batches[0])
    return not collapses and sound(loss, *specimen.model.parameters())


@FIXES.plant("NS302", 1)
def the_operation_is_cured_and_the_scale_holds(fixed):
    island = Atom(remedy="island", target="mlp", value="float32")
    return scale_holds(*[island] * fixed)


@FIXES.plant("NS302", 3)
def bfloat16_and_the_scale_holds(fixed):
    return scale_holds(*[Atom(remedy="bf16")] * fixed)


@FIXES.plant("NS302", 2)
def a_scaler_takes_float32_trainables(fixed):
    weight = nn.Parameter(torch.ones(1, 1).to(torch.float32 if fixed else torch.float16))
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD([weight], lr=0.1)
    with torch.autocast("cpu", torch.float16):
        loss = F.linear(torch.full((1, 1), 0.5), weight).float().sum() * 0.5
    scaler.scale(loss).backward()
    try:
        scaler.step(optimizer)
    except ValueError:
        return False
    return math.isclose(weight.item(), 0.975, rel_tol=1e-3) and scaler.get_scale() == 65536


# NS303: gradients below float16
@FIXES.plant("NS303", 1)
def a_loss_scale(fixed):
    weight = nn.Parameter(torch.zeros(1, 2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", enabled=fixed)
    with torch.autocast("cpu", torch.float16):
        y = F.linear(torch.ones(4096, 2), weight)
    scaler.scale(y.float().mean() * 2.0**-16).backward()
    scaler.step(optimizer)
    scaler.update()
    return close(weight, torch.full((1, 2), -(2.0**-16)), within=1e-6) and bool(weight.all())


FIXES.remedy("NS303", 2, "bf16")


@FIXES.plant("NS303", 3)
def what_drives_the_scale_down(fixed):
    """Each step fails until the scale is so small that the gradient of a good one is 0."""
    weight = nn.Parameter(torch.ones(1, 1))
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD([weight], lr=1.0)
    for step in range(41):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            y = F.linear(torch.ones(1, 1), weight)
        bad = step < 40 and not fixed
        scaler.scale(y.float().sum() * (math.nan if bad else 2.0**-10)).backward()
        scaler.step(optimizer)
        scaler.update()
    return weight.grad.item() == 2.0**-10 and sound(weight)


# NS304: no derivative
def squares(x):
    return x.square().sum(-1)


def root_of_what_is_positive(x):
    positive = squares(x) > 0
    return torch.where(positive, torch.where(positive, squares(x), 1.0).sqrt(), 0.0).sum()


FIXES.rows(
    "NS304", 1, "a safe input", ZERO, lambda x: squares(x).sqrt().sum(), root_of_what_is_positive
)
FIXES.rows(
    "NS304", 2, "an eps of 1e-6", ZERO, lambda x: squares(x).sqrt().sum(),
    lambda x: (squares(x) + 1e-6).sqrt().sum(),
)  # fmt: skip
FIXES.remedy("NS304", 3, "drop_sample", "0:1")
FIXES.remedy("NS304", 3, "drop_micro", "0")


@FIXES.cost("NS304", 2)
def bias_and_slope_of_an_eps():
    for eps, bias, slope in ((1e-6, 1e-3, 500.0), (1e-12, 1e-6, 5e5)):
        value, gradient = backpropagated(lambda x, e=eps: (x + e).sqrt(), torch.tensor(0.0))
        if not (close(value / bias, torch.ones(())) and close(gradient, torch.tensor(slope))):
            return False
    _, gradient = backpropagated(lambda x: F.normalize(x, dim=-1).sum(), ZERO)
    return bool((gradient > 0.99e12).all())


# NS305: one bad gradient and a common norm
def two_gradients(bad):
    near, far = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    near.grad, far.grad = torch.tensor([1.0, 2.0]), torch.tensor([bad, 1.0])
    return near, far


@FIXES.plant("NS305", 1)
def what_made_it_is_cured(fixed):
    """The distance of 0 with a floor under its root."""
    x, gap = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    apart = (gap * 0.0).square().sum()
    (x.square().mean() + (apart + 1e-6 * fixed).sqrt()).backward()
    torch.nn.utils.clip_grad_norm_([x, gap], 1.0)
    return sound(x.grad, gap.grad) and close(x.grad, torch.full((3,), 3**-0.5))


@FIXES.plant("NS305", 2)
def a_look_at_the_norm(fixed):
    """The update of a bad norm is left out, and the next one is made."""
    for bad in (math.inf, math.nan):
        near, far = two_gradients(bad)
        optimizer = torch.optim.SGD([near, far], lr=0.1)
        try:
            torch.nn.utils.clip_grad_norm_([near, far], 1.0, error_if_nonfinite=fixed)
            optimizer.step()
        except RuntimeError:
            optimizer.zero_grad()
        if not sound(near, far):
            return False
    return bool((near == 1).all())


@FIXES.plant("NS305", 3)
def clipping_where_nanstop_looks_first(fixed):
    specimen = ZOO["NS305"].fault()
    if not fixed:
        run_plain(specimen)
        return sound(*specimen.model.parameters())
    with nanstop.watch(specimen.model, specimen.optimizer, policy="skip", out="n") as watch:
        for batch in specimen.batches:
            watch.step(specimen.loss_fn, batch)
            watch.update(clip=specimen.clip)
    return sound(*specimen.model.parameters())


# NS306: gradients between backward and update
FIXES.twin("NS306", 1)


@FIXES.plant("NS306", 2)
def losses_that_share_a_graph_are_summed(fixed):
    x = nn.Parameter(HEALTHY.clone())
    hidden = x.square().sum(-1)
    a, b = hidden.sum(), (2 * hidden).sum()
    if fixed:
        (a + b).backward()
    else:
        a.backward(retain_graph=True)
        (a + b).backward()  # a again
    return sound(x.grad) and torch.equal(x.grad, 6 * x)


@FIXES.cost("NS306", 2)
def the_graph_is_walked_once():
    walks = []
    x = nn.Parameter(HEALTHY.clone())
    hidden = x.square()
    hidden.register_hook(lambda gradient: walks.append(gradient) and None)
    (hidden.sum() + hidden.mean()).backward()
    return len(walks) == 1


@FIXES.plant("NS306", 3)
def the_operation_is_cured(fixed):
    """NaN made 0 leaves a weight untrained; a safe root trains it."""
    scale = nn.Parameter(torch.ones(3))
    x = torch.cat([HEALTHY, ZERO])
    if fixed:
        root_of_what_is_positive(x * scale).backward()
    else:
        squares(x * scale).sqrt().sum().backward()
        scale.grad.nan_to_num_()
    right = (HEALTHY.square() / HEALTHY.norm(dim=-1, keepdim=True)).sum(0)
    return sound(scale.grad) and close(scale.grad, right)


@FIXES.plant("NS306", 4)
def a_norm_is_kept_from_0(fixed):
    for gradient in (torch.zeros(3), torch.tensor([3.0, 0.0, 4.0])):
        norm = gradient.norm()
        made = gradient / (norm.clamp(min=1e-6) if fixed else norm)
        if not sound(made):
            return False
    return close(made, torch.tensor([0.6, 0.0, 0.8]))


# NS307: next to nothing is left
def taken(gradient, limit):
    weight = nn.Parameter(torch.zeros_like(gradient))
    weight.grad = gradient.clone()
    if limit is not None:
        torch.nn.utils.clip_grad_norm_([weight], limit)
    return weight.grad


@FIXES.plant("NS307", 1)
def no_clipping(fixed):
    kept = [taken(torch.ones(4), limit) for limit in ((None, math.inf) if fixed else (0.0,))]
    return all(torch.equal(each, torch.ones(4)) for each in kept)


FIXES.twin("NS307", 2)


@FIXES.plant("NS307", 3)
def the_norm_in_float64(fixed):
    for gradient in (torch.full((4,), 2e19), torch.full((4,), 256.0).half()):
        if fixed:
            norm = torch.stack([g.double().norm() for g in [gradient]]).norm()
            clipped = (gradient.double() / norm).to(gradient.dtype)
        else:
            norm = gradient.square().sum().sqrt()
            clipped = gradient / norm
        if not close(clipped, torch.full((4,), 0.5)):
            return False
    return True


@FIXES.plant("NS307", 4)
def kept_weights_at_the_end(fixed):
    """Copies of the best weights, loaded in every step or behind the last."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 1)
    before = layer.weight.detach().clone()
    optimizer, best, least = torch.optim.SGD(layer.parameters(), lr=0.02), None, math.inf
    for step in range(9):
        loss = layer(HEALTHY).square().mean()
        if best is None or (fixed and loss < least):
            best, least = copy.deepcopy(layer.state_dict()), loss.item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not fixed or step == 8:
            layer.load_state_dict(best)
    return sound(layer.weight) and not torch.equal(layer.weight, before)


# NS401 to NS404
@FIXES.plant("NS401", 2)
@FIXES.plant("NS106", 1)
def scan_says_which_checkpoint_is_sound(fixed):
    from pathlib import Path

    from safetensors.torch import load_file, save_file
    from typer.testing import CliRunner

    from nanstop import cli

    layer = nn.Linear(3, 3)
    for name, value in (("good", 0.5), ("bad", math.nan)):
        Path(name).mkdir(exist_ok=True)
        with torch.no_grad():
            layer.weight[0, 0] = value
        save_file(layer.state_dict(), f"{name}/model.safetensors")
    found = [n for n in ("good", "bad") if "NS106" in CliRunner().invoke(cli.app, ["scan", n]).output]
    assert found == ["bad"]
    layer.load_state_dict(load_file(f"{'good' if fixed else 'bad'}/model.safetensors"))
    loss = layer(HEALTHY).square().mean()
    loss.backward()
    return sound(loss, *(p.grad for p in layer.parameters()))


@FIXES.plant("NS401", 3)
@FIXES.plant("NS106", 4)
def bad_tensors_are_made_anew(fixed):
    torch.manual_seed(0)
    table = nn.Embedding(5, 3)
    kept = table.weight[:4].detach().clone()
    with torch.no_grad():
        table.weight[4] = math.nan
        if fixed:
            nn.init.normal_(table.weight[4], std=0.02)
    loss = table(torch.arange(5)).square().sum()
    loss.backward()
    return sound(loss, table.weight.grad) and torch.equal(table.weight[:4], kept)


FIXES.say("NS401", 1, "nanstop's rewinding; tests/session and the demo S1 run it")
FIXES.remedy("NS402", 1, "fp32_trainables")
FIXES.remedy("NS402", 2, "fp32_optimizer_state")
FIXES.remedy("NS402", 2, "optimizer_swap", value="adamw")


def adam_of_a_still_weight(*, eps, stored=torch.float32):
    weight = nn.Parameter(torch.ones(3, dtype=stored))
    weight.grad = torch.tensor([0.0, 1.0, -1.0], dtype=stored)
    torch.optim.AdamW([weight], lr=0.1, eps=eps, weight_decay=0.0).step()
    return weight


@FIXES.plant("NS402", 3)
def an_eps_of_1e_8(fixed):
    weight = adam_of_a_still_weight(eps=1e-8 if fixed else 0.0)
    return sound(weight) and close(weight, torch.tensor([1.0, 0.9, 1.1]))


@FIXES.cost("NS402", 3)
def an_eps_of_1e_8_is_0_in_float16():
    return bool(adam_of_a_still_weight(eps=1e-8, stored=torch.float16)[0].isnan())


@FIXES.plant("NS402", 4)
def a_lower_rate_where_the_update_overflows(fixed):
    weight = nn.Parameter(torch.ones(2).half())
    weight.grad = torch.tensor([100.0, 1.0]).half()
    torch.optim.SGD([weight], lr=1e-2 if fixed else 1e3).step()
    return sound(weight)


@FIXES.cost("NS402", 0)
@FIXES.cost("NS110", 0)
@FIXES.cost("NS102", 0)
def a_larger_eps_is_wrong_in_float16():
    """How far a weight at gradients ``g`` moves, in units of how far it should."""

    def moved(eps, g, steps=1):
        weight = nn.Parameter(torch.zeros(1).half())
        optimizer = torch.optim.AdamW([weight], lr=1e-3, eps=eps, weight_decay=0.0)
        for _ in range(steps):
            weight.grad = torch.full((1,), g).half()
            optimizer.step()
        return -weight.item() / (1e-3 * steps)

    first = {1e-4: 10, 1e-3: 100, 5e-3: 500}
    far = all(close(torch.tensor(moved(1e-5, g) / n), torch.ones(()), within=0.01) for g, n in first.items())
    none = all(moved(1e-2, 10.0**place) < 1 for place in range(-4, 2))
    short = 0.0099 < moved(1e-2, 1e-4) < 0.0101
    later = 99 < moved(1e-5, 1e-3, 20) < 101 and 0.09 < moved(1e-2, 1e-3, 20) < 0.11
    bound = moved(0.0054, 5.3e-3), moved(0.0054, 5.43e-3)
    return far and none and short and later and bound[0] < 1 < bound[1] < 1.01


@FIXES.plant("NS403", 1)
def no_state_or_an_earlier_one(fixed):
    for earlier in (None, 1e-4) if fixed else (-1.0,):
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([weight], lr=1e-3)
        if earlier is not None:
            moment = torch.full((3,), earlier)
            optimizer.state[weight] = {
                "step": torch.tensor(9.0), "exp_avg": torch.zeros(3), "exp_avg_sq": moment,
            }  # fmt: skip
        for _ in range(5):
            weight.grad = weight.detach().clone()
            optimizer.step()
        if not sound(weight) or (weight - 1).abs().max() > 0.02:
            return False
    return True


FIXES.remedy("NS403", 2, "optimizer_swap", value="adamw")


@FIXES.plant("NS403", 3)
def parameters_in_the_order_of_the_state(fixed):
    """Moments of gradients of 1e-4 come to a weight with gradients of 1."""
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    saved = torch.optim.AdamW([a, b], lr=1e-3)
    for _ in range(1000):
        a.grad, b.grad = torch.full((2,), 1e-4), torch.ones(2)
        saved.step()
    order = [a, b] if fixed else [b, a]
    resumed = torch.optim.AdamW(order, lr=1e-3)
    resumed.load_state_dict(copy.deepcopy(saved.state_dict()))
    before = [p.detach().clone() for p in (a, b)]
    a.grad, b.grad = torch.full((2,), 1e-4), torch.ones(2)
    resumed.step()
    moved = max((p - old).abs().max().item() for p, old in zip((a, b), before, strict=True))
    return moved < 2e-3


def descending(lr, *, clip=None, warm=0, steps=60):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.tensor([3.0, -2.0]))
    optimizer = torch.optim.SGD([weight], lr=lr)
    for step in range(steps):
        if warm:
            optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / warm)
        optimizer.zero_grad()
        loss = weight.pow(4).sum()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_([weight], clip)
        optimizer.step()
        if not math.isfinite(loss.item()):
            return False
    return sound(weight) and loss.item() < 97.0


@FIXES.plant("NS404", 1)
def a_tenth_of_the_rate(fixed):
    return descending(0.01 if fixed else 0.1)


@FIXES.plant("NS404", 2)
def a_clipped_norm(fixed):
    return descending(0.1, clip=1.0 if fixed else None)


@FIXES.plant("NS404", 3)
def a_warm_up(fixed):
    """A loss that is a hundred times as steep at the start."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.full((2,), 0.1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    far, target = 0.0, torch.tensor([1.0, 1.0])
    curvature = [100.0 if step < 20 else 1.0 for step in range(60)]  # steep at the start
    for step, steep in enumerate(curvature):
        if fixed:
            optimizer.param_groups[0]["lr"] = 0.5 * min(1.0, (step + 1) / 1000)
        optimizer.zero_grad()
        (steep * (weight - target).square().sum() / 2).backward()
        optimizer.step()
        far = max(far, (weight.detach() - target).abs().max().item())
    return far < 1.0 and sound(weight)
