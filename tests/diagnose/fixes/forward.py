"""The fixes of NS201 to NS204: formats, masks, undefined operations."""

import torch
from torch import nn
from torch.nn import functional as F

from diagnose.fixes.kinds import HEALTHY, Fixes, backpropagated, close, sound

FIXES = Fixes()
ZERO, LARGE = torch.zeros(1, 3), torch.tensor([[200.0, -200.0, 0.0]])
LOW = torch.finfo(torch.float16).min


# NS201 - an operation leaves float16
FIXES.remedy("NS201", 1, "island", "mlp", "float32")
FIXES.remedy("NS201", 3, "bf16")


def eager(q, k, v, *, scale):
    return ((q @ k.mT) * scale).softmax(-1) @ v


def attends_in_float16(size, *, fused, scale, sign=1.0):
    """Whether queries and keys of ``size`` attend in float16 as they do in float64."""
    torch.manual_seed(0)
    width = 128 if scale is None else int(1 / scale)
    q = torch.full((1, 1, 3, width), size)
    k = torch.stack([sign * torch.full((width,), size), torch.zeros(width), q[0, 0, 0] / 9])[
        None, None
    ]
    v = torch.randn(1, 1, 3, 4)
    scale = scale or width**-0.5
    found = []
    for dtype in (torch.float16, torch.float64):
        parts = [part.to(dtype).requires_grad_() for part in (q, k, v)]
        attend = F.scaled_dot_product_attention if fused or dtype == torch.float64 else eager
        out = attend(*parts, scale=scale)
        found.append([out, *torch.autograd.grad(out.float().square().sum(), parts)])
    half, exact = found
    return sound(*half) and all(
        torch.allclose(a.double(), b.double(), rtol=5e-3, atol=5e-3)
        for a, b in zip(half, exact, strict=True)
    )


@FIXES.plant("NS201", 2)
def a_fused_kernel(fixed):
    return attends_in_float16(25.0, fused=fixed, scale=None)


@FIXES.plant("NS209", 2)
def a_fused_kernel_where_scores_vanish(fixed):
    return attends_in_float16(2.125, fused=fixed, scale=1 / 16384, sign=-1.0)


@FIXES.plant("NS201", 1)
def half_weights_need_autocast_around_an_island(fixed):
    """An island in a model of half weights hands float32 to a half layer."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).half())
    x = HEALTHY.clone()
    try:
        with torch.autocast("cpu", torch.float16, enabled=fixed):
            loss = model(x).float().square().mean()
    except RuntimeError:
        return False
    loss.backward()
    return sound(loss, *(p.grad for p in model.parameters()))


@FIXES.cost("NS201", 3)
@FIXES.cost("NS209", 3)
@FIXES.cost("NS301", 4)
@FIXES.cost("NS302", 3)
@FIXES.cost("NS303", 2)
def three_bits():
    return torch.finfo(torch.bfloat16).eps / torch.finfo(torch.float16).eps == 2**3


@FIXES.cost("NS101", 0)
@FIXES.cost("NS104", 0)
def bits_of_each_format():
    bits = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
    return all(torch.finfo(dtype).eps == 2.0 ** (1 - number) for dtype, number in bits.items())


# NS202 - a row that sees no key
def attended(x, kernel):
    """Attention over what is not 0: a row of zeros hides every key."""
    keys = torch.eye(3)
    if kernel:
        mask = (x != 0)[:, None]
        return F.scaled_dot_product_attention(x[:, None], keys, keys, mask).sum()
    scores = (x[:, None] @ keys).masked_fill((x == 0)[:, None], -torch.inf) / 3**0.5
    return (scores.softmax(-1) @ keys).sum()


FIXES.rows("NS202", 1, "a kernel", ZERO, lambda x: attended(x, False), lambda x: attended(x, True))
FIXES.remedy("NS202", 3, "drop_sample", "0:1")


def causal_attention(padding, x, *, self_visible=False):
    """Eager causal attention of tokens [n, 3] of which ``padding`` are hidden."""
    n = len(x)
    visible = torch.ones(n, n).tril().bool() & ~padding
    if self_visible:
        visible |= torch.eye(n).bool()
    return (x @ x.mT).masked_fill(~visible, -torch.inf).softmax(-1) @ x


def padded(*, left, self_visible=False):
    tokens = torch.cat([ZERO, HEALTHY] if left else [HEALTHY, ZERO])
    padding = (tokens == 0).all(-1)
    keep = ~padding

    def loss(x):
        weights = keep.float()[:, None]
        return (causal_attention(padding, x, self_visible=self_visible) * weights).square().sum()

    value, gradient = backpropagated(loss, tokens)
    none = torch.zeros(2, dtype=torch.bool)
    alone, right = backpropagated(lambda x: causal_attention(none, x).square().sum(), HEALTHY)
    return sound(value, gradient) and close(value, alone) and close(gradient[keep], right)


@FIXES.plant("NS202", 2)
def padding_on_the_right(fixed):
    return padded(left=not fixed)


@FIXES.plant("NS202", 2)
def padded_queries_see_themselves(fixed):
    return padded(left=True, self_visible=fixed)


# NS203 - masks that are added
def two_masks(form):
    """Float16 scores under two masks; the last token neither asks nor answers."""
    causal, padding = torch.ones(3, 3).tril().bool(), torch.tensor([[True], [True], [False]])
    causal[:, 2] = False
    first, second = (torch.where(m, 0.0, LOW).half() for m in (causal, padding.expand(3, 3)))

    def attend(x, form):
        scores = (x @ x.mT).half()
        if form == "sum":
            scores = (scores + first + second).float()
        elif form == "filled":
            scores = scores.masked_fill(~(causal & padding), LOW).float()
        elif form == "clamped":
            scores = torch.clamp(scores + first + second, min=LOW).float()
        elif form == "wide":
            scores = scores.float() + first.float() + second.float()
        return scores.softmax(-1)[:2] @ x + 0 * scores.softmax(-1)[2:].sum()

    x = torch.cat([HEALTHY, torch.tensor([[-38.0, -27.0]]) @ HEALTHY])  # scores of -30
    value, gradient = backpropagated(lambda x: attend(x, form).square().sum(), x)
    exact = causal[:2, :2]
    right_value, right = backpropagated(
        lambda x: ((x @ x.mT).masked_fill(~exact, -torch.inf).softmax(-1) @ x).square().sum(),
        x[:2],
    )
    same = close(value, right_value, within=1e-2) and close(gradient[:2], right, within=2e-2)
    return sound(value, gradient) and same


@FIXES.plant("NS203", 1)
def masks_as_booleans(fixed):
    return two_masks("filled" if fixed else "sum")


@FIXES.plant("NS203", 3)
def masks_added_in_float32(fixed):
    return two_masks("wide" if fixed else "sum")


@FIXES.plant("NS203", 4)
def clamped_after_the_addition(fixed):
    return two_masks("clamped" if fixed else "sum")


@FIXES.cost("NS203", 3)
def twice_the_lowest_of_float32_is_beyond_it():
    low = torch.tensor(torch.finfo(torch.float32).min)
    half = torch.tensor(LOW)
    return bool((low + low).isinf() and (half.half() - 20).isinf() and (half - 20.0).isfinite())


@FIXES.plant("NS203", 2)
def a_kernel_takes_the_mask(fixed):
    """One mask of the lowest number, and a row of scores of -20 that it hides."""
    x = torch.tensor([[[1.0, 2.0], [2.0, 1.0], [-8.0, -8.0]]]).half()
    keys = torch.ones(1, 3, 2).half() + x.detach() * 0
    mask = torch.zeros(3, 3).half()
    mask[2] = LOW
    q = (x * 4).requires_grad_()
    if fixed:
        out = F.scaled_dot_product_attention(q[None], keys[None], x[None], mask)
    else:
        out = (q @ keys.mT * 2**-0.5 + mask).float().softmax(-1) @ x.float()
    loss = out.float().square().sum()
    loss.backward()
    return sound(loss, q.grad)


# NS204 - undefined
def entropy(x, form):
    p = x.clamp(min=0)
    if form == "where":
        safe = torch.where(p > 0, p, 1.0)
        return torch.where(p > 0, safe * safe.log(), 0.0).sum()
    return (torch.special.xlogy(p, p) if form == "xlogy" else p * p.log()).sum()


@FIXES.plant("NS204", 1)
def where_on_the_input(fixed):
    loss, gradient = backpropagated(
        lambda x: entropy(x, "where" if fixed else ""), torch.tensor([[0.0, 0.3, 0.7]])
    )
    right = torch.tensor([0.3, 0.7]).log() + 1
    return sound(loss, gradient) and close(gradient[0, 1:], right)


FIXES.rows(
    "NS204", 1, "log_softmax", LARGE, lambda x: x.softmax(-1).log().sum(),
    lambda x: x.log_softmax(-1).sum(),
)  # fmt: skip
FIXES.rows(
    "NS204", 1, "softplus", LARGE, lambda x: (1 + x.exp()).log().sum(),
    lambda x: F.softplus(x).sum(),
)  # fmt: skip


@FIXES.cost("NS204", 1)
def xlogy_has_no_gradient_at_0():
    loss, gradient = backpropagated(lambda x: entropy(x, "xlogy"), torch.tensor([[0.0, 1.0]]))
    return loss == 0 and bool(gradient[0, 0].isnan())


@FIXES.plant("NS204", 2)
def a_number_in_place_of_what_is_missing(fixed):
    p = torch.tensor([1.0, 2.0], requires_grad=True)
    y = torch.tensor([0.5, torch.nan])
    known = ~y.isnan()
    y = y.nan_to_num() if fixed else y
    loss = ((p - y).square() * known).sum()
    (gradient,) = torch.autograd.grad(loss, p)
    return sound(loss, gradient) and close(gradient, torch.tensor([1.0, 0.0]))


FIXES.say("NS204", 3, "a look at the data")
FIXES.remedy("NS204", 4, "drop_sample", "0:1")
FIXES.remedy("NS204", 4, "drop_micro", "0")
FIXES.test(
    "NS204",
    5,
    "e2e/forms/test_formats.py::test_what_only_a_half_format_rounds_away_is_computed_in_float32",
)
