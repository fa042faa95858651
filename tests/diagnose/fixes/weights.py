"""The fixes of 4xx: weights and optimizers."""

import copy
import math

import torch
from torch import nn

from diagnose.fixes.kinds import HEALTHY, Fixes, close, sound

FIXES = Fixes()


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
    found = [
        n for n in ("good", "bad") if "NS106" in CliRunner().invoke(cli.app, ["scan", n]).output
    ]
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


FIXES.test("NS401", 1, "test_bookkeeping.py::test_rollback_is_a_run_resumed_from_the_snapshot")
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


FIXES.test("NS402", 4, "e2e/forms/test_own_parts.py::test_a_line_of_an_own_optimizer_has_a_form")


@FIXES.plant("NS402", 5)
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
    far = all(
        close(torch.tensor(moved(1e-5, g) / n), torch.ones(()), within=0.01)
        for g, n in first.items()
    )
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


@FIXES.plant("NS404", 4)
def no_update_at_a_rate_of_its_own(fixed):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    x = torch.randn(32, 2)
    losses = []
    for step in range(60):
        optimizer.param_groups[0]["lr"] = 5.0 if step == 20 and not fixed else 1e-3
        optimizer.zero_grad()
        loss = (net(x) - x.sum(-1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return max(losses[21:]) < max(losses[:21])
