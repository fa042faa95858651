"""The fixes of NS205 to NS209: divisions, exponentials, digits."""

import math
import tempfile
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F

import tiny
from diagnose.fixes.forward import LARGE, ZERO
from diagnose.fixes.kinds import HEALTHY, Fixes, backpropagated, close, sound

FIXES = Fixes()


# NS205 - a mean over nothing
def masked_mean(x, floor=None):
    mask = (x != 0).float()
    count = mask.sum(-1)
    return ((x * mask).sum(-1) / (count if floor is None else count.clamp(min=floor))).sum()


FIXES.rows("NS205", 1, "a floor", ZERO, masked_mean, lambda x: masked_mean(x, 1.0))
FIXES.remedy("NS205", 4, "drop_micro", "0")


@FIXES.cost("NS205", 1)
def an_empty_group_contributes_0():
    return masked_mean(ZERO, 1.0) == 0


def standardised(groups, *, skip):
    kept = [g for g in groups if not skip or len(g) > 1]
    return sum(((g - g.mean()) / (g.std() + 1e-4)).abs().sum() for g in kept)


@FIXES.plant("NS205", 2)
def a_correction_of_one_element(fixed):
    def spread(x):
        more = {"correction": min(1, len(x) - 1)} if fixed else {}
        return x.std(**more) + x.var(**more) + torch.cov(x, **more)

    x = torch.tensor([1.0, 0.5, 3.0], requires_grad=True)
    loss = spread(x[:2]) + spread(x[2:])
    (gradient,) = torch.autograd.grad(loss, x)
    (right,) = torch.autograd.grad(spread(x[:2]), x)
    return sound(loss, gradient) and close(gradient, right)


@FIXES.plant("NS205", 3)
def groups_of_one_are_skipped(fixed):
    x = torch.tensor([1.0, 0.5, 2.0, 3.0], requires_grad=True)
    loss = standardised([x[:3], x[3:]], skip=fixed)
    (gradient,) = torch.autograd.grad(loss, x)
    (right,) = torch.autograd.grad(standardised([x[:3]], skip=False), x)
    return sound(loss, gradient) and close(gradient[:3], right[:3])


# NS206 - a norm of 0
def unit(x):
    return (x / x.norm(dim=-1, keepdim=True)).sum()


def unit_of_whole_rows(x):
    empty = (x == 0).all(-1, keepdim=True)
    safe = torch.where(empty, 1.0, x)
    return torch.where(empty, 0.0, x / safe.norm(dim=-1, keepdim=True)).sum()


def unit_with_a_floor(x):
    return (x / x.norm(dim=-1, keepdim=True).clamp(min=1e-3)).sum()


FIXES.rows("NS206", 1, "whole rows", ZERO, unit, unit_of_whole_rows)
FIXES.rows("NS206", 2, "a floor of 1e-3", ZERO, unit, unit_with_a_floor)
FIXES.remedy("NS206", 4, "drop_sample", "0:1")


@FIXES.plant("NS206", 3)
def rows_that_are_initialised(fixed):
    torch.manual_seed(0)
    table = nn.Embedding(5, 3)
    with torch.no_grad():
        table.weight[4] = table.weight[:4].mean(0) if fixed else 0.0
    loss = unit(table(torch.arange(5)))
    loss.backward()
    return sound(loss, table.weight.grad)


@FIXES.cost("NS206", 1)
def selecting_behind_the_division_is_not_enough():
    forms = torch.where(ZERO == 0, 0.0, ZERO / ZERO.norm()).sum()
    _, gradient = backpropagated(
        lambda x: torch.where(x == 0, 0.0, x / x.norm(dim=-1, keepdim=True)).sum(), ZERO
    )
    return bool(forms.isfinite() and gradient.isnan().all())


@FIXES.cost("NS206", 2)
def what_comes_to_a_zero_row_is_divided_by_the_floor():
    def gradient(floor, dtype=torch.float32):
        rows = ZERO.to(dtype)
        form = lambda x: (x / x.norm(dim=-1, keepdim=True).clamp(min=floor)).sum()  # noqa: E731
        return backpropagated(form, rows)[1].float()

    wide = all(close(gradient(f), torch.full((1, 3), 1 / f)) for f in (1e-3, 1e-7, 1e-12))
    narrow = gradient(1e-12, torch.float16).isnan().all(), gradient(1e-7, torch.float16).isinf()
    short = torch.tensor([[5e-4, 0.0, 0.0]])
    return (
        wide
        and bool(narrow[0] and narrow[1].all())
        and close(unit_with_a_floor(short), torch.tensor(0.5))
    )


# NS207 - exp and log
def ratio(x, most=None):
    return (x if most is None else x.clamp(max=most)).exp().sum()


for what, broken, fixed in (
    ("log_softmax", lambda x: x.softmax(-1).log(), lambda x: x.log_softmax(-1)),
    ("logsigmoid", lambda x: x.sigmoid().log(), F.logsigmoid),
    ("logsumexp", lambda x: x.exp().sum(-1).log(), lambda x: x.logsumexp(-1)),
):
    FIXES.rows(
        "NS207", 1, what, LARGE, lambda x, f=broken: f(x).sum(), lambda x, f=fixed: f(x).sum()
    )
FIXES.rows("NS207", 2, "a clamped argument", LARGE, ratio, lambda x: ratio(x, 8.0))
FIXES.remedy("NS207", 3, "drop_sample", "0:1")
FIXES.remedy("NS207", 3, "drop_micro", "0")


def against_float64(form, exact, x):
    """Whether value and derivative in float32 are those of float64."""
    found, slope = backpropagated(form, torch.tensor(x))
    right, right_slope = backpropagated(exact, torch.tensor(x, dtype=torch.float64))
    return close(found, right) and close(slope / right_slope, torch.ones(()))


@FIXES.plant("NS207", 1)
def expm1(fixed):
    form = (lambda x: x.expm1().log()) if fixed else (lambda x: (x.exp() - 1).log())
    return against_float64(form, lambda x: x.expm1().log(), 1e-9)


@FIXES.plant("NS207", 1)
def log_of_minus_expm1(fixed):
    form = (lambda x: (-x.expm1()).log()) if fixed else (lambda x: (-x.exp()).log1p())
    return all(against_float64(form, lambda x: (-x.expm1()).log(), x) for x in (-1e-9, -0.5))


@FIXES.cost("NS207", 1)
def log1p_is_the_exact_one_further_down():
    exact = lambda x: (-x.exp()).log1p()  # noqa: E731
    lost = backpropagated(lambda x: (-x.expm1()).log(), torch.tensor(-20.0))
    return against_float64(exact, exact, -20.0) and lost == (0.0, 0.0)


@FIXES.cost("NS207", 2)
@FIXES.cost("NS702", 1)
def a_clamp_has_no_gradient_beyond():
    return backpropagated(lambda x: ratio(x, 8.0), LARGE)[1][0, 0] == 0


# NS208 - digits
def positions_differ(counted):
    angles = torch.arange(300).to(counted)[:, None] * 10000.0 ** -torch.linspace(0, 1, 9)
    return angles.float().cos().unique(dim=0).shape[0] == 300


@FIXES.plant("NS208", 1)
def positions_in_float32(fixed):
    if not fixed:
        return positions_differ(torch.bfloat16)
    return positions_differ(torch.float32)


FIXES.twin("NS208", 1)


@FIXES.plant("NS208", 1)
def loaded_in_the_format(fixed):
    """Loading leaves ``inv_freq`` in float32, ``.to`` does not."""
    from transformers import LlamaForCausalLM

    model = tiny.llama()
    true = model.model.rotary_emb.inv_freq.clone()
    if not fixed:
        return torch.equal(model.to(torch.bfloat16).model.rotary_emb.inv_freq.float(), true)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return torch.equal(loaded.model.rotary_emb.inv_freq, true) and loaded.dtype == torch.bfloat16


@FIXES.cost("NS208", 1)
def an_island_comes_too_late_for_rounded_numbers():
    rounded = torch.arange(300).to(torch.bfloat16)
    return rounded.float().unique().numel() == 279


class Summing(nn.Module):
    """A running sum in its weight's format, term after term."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        total = torch.zeros(1, dtype=self.weight.dtype)
        for one in x.to(self.weight.dtype):
            total = total + one * self.weight
        return total


@FIXES.plant("NS208", 2)
def a_sum_in_float32(fixed):
    module = Summing().to(torch.float32 if fixed else torch.bfloat16)
    total = module(torch.ones(600))
    total.sum().backward()
    return bool(total == 600) and module.weight.grad == 600


@FIXES.plant("NS208", 3)
def the_padding_token_of_the_tokenizer(fixed):
    """Rows that are padded on the right are scored at their last token."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_labels=1, pad_token_id=7,
    )  # fmt: skip
    model = LlamaForSequenceClassification(config).eval()
    row = torch.tensor([[3, 4, 5]])
    alone = model(row).logits
    if fixed:
        model.config.pad_token_id = 0
    mask = torch.tensor([[1, 1, 1, 0, 0]])
    score = model(F.pad(row, (0, 2)), attention_mask=mask).logits
    model.zero_grad()
    score.sum().backward()
    return close(score, alone) and sound(model.score.weight.grad)


@FIXES.plant("NS208", 4)
def squares_of_differences(fixed):
    x = torch.tensor([3999.0, 4000.0, 4001.0], requires_grad=True)
    variance = (x - x.mean()).square().mean() if fixed else x.square().mean() - x.mean() ** 2
    (gradient,) = torch.autograd.grad(variance, x)
    return close(variance, torch.tensor(2 / 3)) and close(gradient, torch.tensor([-2, 0, 2]) / 3)


def losses_under(outer):
    """Of 20 steps whose forwards are under bfloat16 autocast, all of them in ``outer``."""
    torch.manual_seed(0)
    layer, losses = nn.Linear(3, 1), []
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    with outer:
        for _ in range(20):
            with torch.autocast("cpu", torch.bfloat16):
                loss = layer(HEALTHY).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@FIXES.plant("NS208", 5)
def autocast_around_each_forward(fixed):
    losses = losses_under(nullcontext() if fixed else torch.autocast("cpu", torch.bfloat16))
    return losses[-1] < losses[0] / 2 and math.isfinite(losses[-1])


@FIXES.cost("NS208", 5)
def an_outer_block_that_is_switched_off_keeps_copies_too():
    return len(set(losses_under(torch.autocast("cpu", enabled=False)))) == 1


# NS209 - an overflow that is made finite again
FIXES.remedy("NS209", 1, "island", "norm", "float32")
FIXES.remedy("NS209", 3, "bf16")
