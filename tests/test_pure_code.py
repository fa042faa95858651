"""What a script's code leaves behind is seen in it; arithmetic on tensors leaves nothing."""

import math

import pytest
import torch
from torch.nn import functional as F

from nanstop.pure_code import leaves_nothing

CALLS, SEEN, FACTOR = [], {}, 2.0
num_calls = 0


def halved(x):
    return x / FACTOR


def arithmetic(ctx, x, shape=(2, 3)):
    with torch.enable_grad():
        ctx.kept = halved(F.softmax(x.detach().requires_grad_(), -1))
    scale = max(math.sqrt(y) for y in range(1, len(shape)))
    return torch.autograd.grad(ctx.kept.sum() * scale, [x]) if x.requires_grad else None


def counts(ctx, x):
    global num_calls
    num_calls += 1
    return x


def notes(ctx, x):
    SEEN[len(x)] = x
    return x


def appends(ctx, x, losses):
    losses.append(x)
    return x


def speaks(ctx, x):
    print(x.shape)  # noqa: T201
    return x


def marks(ctx, x):
    x.seen = True
    return x


def calls_another(ctx, x):
    return counts(ctx, x)


def saves(ctx, x):
    torch.save(x, "x.pt")
    return x


def fills(ctx, rows):
    rows[0] = 1
    return rows


def doubles(ctx, x):
    x += x
    return x


def adds(ctx, x):
    return torch.Tensor.add_(x, 1)


def imports(ctx, x):
    import os

    return x if os.sep else None


def in_chunks(ctx, rows, size):
    """Fills what it has made itself."""
    made, total, seen = torch.empty_like(rows), 0.0, torch.zeros(len(rows))
    for start in range(0, len(rows), size):
        part = rows[start : start + size].softmax(-1)
        part[torch.arange(len(part)), 0] -= 1
        part = part * 2
        total += part.sum()
        made[start : start + size] = part
        seen[start : start + size] += 1
    ctx.save_for_backward(made)
    return total / seen.sum()


def fills_a_view(ctx, rows):
    part = rows[:2]
    part[0] = 1
    return part


def fills_what_may_be_given(ctx, rows):
    made = rows.float()
    made[0] = 1
    return made


def fills_one_of_two(ctx, rows):
    made = torch.zeros(2)
    if len(rows) > 2:
        made = rows
    made[0] = 1
    return made


def fills_both(ctx, rows):
    made = torch.zeros(2)
    made[0] = rows[0] = 1
    return made


def fills_for_another(ctx, rows):
    made = torch.zeros(2)
    made[0] = SEEN.setdefault("rows", 1)
    return made


def fills_inside(ctx, rows):
    made = torch.zeros(2)

    def inner(made):
        made[0] = 1

    inner(rows)
    return made


def fills_in_a_loop(ctx, rows):
    made = torch.zeros(2)
    for made in rows:
        made[0] = 1
    return made


def closes_over(value):
    def inner(ctx, x):
        return x * value

    return inner


def counter():
    number = 0

    def inner(ctx, x):
        nonlocal number
        number += 1
        return x

    return inner


@pytest.mark.parametrize(
    "function", [arithmetic, halved, in_chunks, closes_over(2.0), closes_over(torch.pi)]
)
def test_arithmetic(function):
    assert leaves_nothing(function, "torch")


@pytest.mark.parametrize(
    "function",
    [
        *(counts, notes, appends, speaks, marks, calls_another, saves, imports, counter()),
        *(fills, doubles, adds, fills_a_view, fills_what_may_be_given, fills_one_of_two),
        *(fills_both, fills_for_another, fills_inside, fills_in_a_loop),
        *(closes_over(CALLS), len, lambda ctx, x: CALLS, object()),
    ],
)
def test_what_may_be_left_behind(function):
    assert not leaves_nothing(function, "torch")
