"""The fixes of 3xx: gradients, scalers and clipping."""

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


# NS301 - a gradient leaves float16
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


def summed(weight, *, factor=1.0):
    """8192 tokens of 10 each: their sum of 81920 is the gradient."""
    autocast = weight.dtype == torch.float32
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        y = F.linear(torch.full((8192, 1), 10.0, dtype=weight.dtype), weight)
    return y.float().sum() * factor


@FIXES.plant("NS301", 2)
def float32_that_a_scaler_takes(fixed):
    """In float16 there is no scale that a GradScaler could find; in float32 it is a half."""
    weight = nn.Parameter(torch.ones(1, 1, dtype=torch.float32 if fixed else torch.float16))
    optimizer = torch.optim.SGD([weight], lr=1e-6)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    try:
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(summed(weight)).backward()
            scaler.step(optimizer)
            scaler.update()
    except ValueError:
        return False
    return scaler.get_scale() == 0.5 and close(weight, torch.full((1, 1), 1 - 0.08192))


@FIXES.cost("NS301", 2)
def autocast_makes_the_gradient_in_float16_all_the_same():
    weight = nn.Parameter(torch.ones(1, 1))
    (gradient,) = torch.autograd.grad(summed(weight), weight)
    return gradient.dtype == torch.float32 and bool(gradient.isinf())


FIXES.remedy("NS301", 3, "island", "head", "float32")
FIXES.remedy("NS301", 4, "bf16")


@FIXES.plant("NS301", 5)
def a_logarithm_of_a_softmax_divides_by_no_share(fixed):
    scores = torch.tensor([93.0, 0.0], requires_grad=True)
    share = F.log_softmax(scores, -1)[1] if fixed else F.softmax(scores, -1)[1].log()
    (-share).backward()
    return sound(share, scores.grad)


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


# NS302 - the scale collapses
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
def float32_trainables_leave_room_for_a_scale(fixed):
    """A scaler that takes half gradients, as DeepSpeed's does, and stops at 1: a gradient of
    98304 has no scale there in float16.
    """
    weight = nn.Parameter(torch.ones(1, dtype=torch.float32 if fixed else torch.float16))
    scale, num_updates = 4.0, 0
    for _ in range(40):
        weight.grad = None
        (weight.float() * 98304.0 * scale).sum().backward()
        if weight.grad.isfinite().all():
            num_updates += 1
            with torch.no_grad():
                weight -= 1e-7 * weight.grad / scale
        else:
            scale = max(1.0, scale / 2)
    return num_updates == 40 and sound(weight)


# NS303 - gradients below float16
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


# NS304 - no derivative
def squares(x):
    return x.square().sum(-1)


def root_of_what_is_positive(x):
    positive = squares(x) > 0
    return torch.where(positive, torch.where(positive, squares(x), 1.0).sqrt(), 0.0).sum()


FIXES.rows(
    "NS304", 1, "a safe input", ZERO, lambda x: squares(x).sqrt().sum(), root_of_what_is_positive
)
FIXES.rows(
    "NS304", 3, "an eps of 1e-6", ZERO, lambda x: squares(x).sqrt().sum(),
    lambda x: (squares(x) + 1e-6).sqrt().sum(),
)  # fmt: skip
FIXES.remedy("NS304", 4, "drop_sample", "0:1")
FIXES.remedy("NS304", 4, "drop_micro", "0")


@FIXES.plant("NS304", 2)
def a_number_in_place_of_what_is_missing(fixed):
    p = torch.tensor([1.0, 2.0], requires_grad=True)
    y = torch.tensor([0.5, torch.nan])
    known = ~y.isnan()
    y = y.nan_to_num() if fixed else y
    loss = torch.where(known, (p - y) ** 2, 0.0).sum()
    (gradient,) = torch.autograd.grad(loss, p)
    return sound(loss, gradient) and close(gradient, torch.tensor([1.0, 0.0]))


@FIXES.cost("NS304", 3)
def bias_and_slope_of_an_eps():
    for eps, bias, slope in ((1e-6, 1e-3, 500.0), (1e-12, 1e-6, 5e5)):
        value, gradient = backpropagated(lambda x, e=eps: (x + e).sqrt(), torch.tensor(0.0))
        if not (close(value / bias, torch.ones(())) and close(gradient, torch.tensor(slope))):
            return False
    _, gradient = backpropagated(lambda x: F.normalize(x, dim=-1).sum(), ZERO)
    return bool((gradient > 0.99e12).all())


# NS305 - one bad gradient and a common norm
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


# NS306 - gradients between backward and update
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


# NS307 - next to nothing is left
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
