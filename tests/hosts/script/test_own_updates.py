"""Loops that change their weights by themselves, without an optimizer: what becomes of their
gradients is told as it is of an optimizer's.
"""

import textwrap

import pytest
import torch

from loop_scripts import run_script, same, weights, with_findings

torch.set_num_threads(1)

HEAD = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
data = [torch.randn(8, 8) for _ in range(80)]


def loss_of(x):
    return (net(x) - x[:, :4]).pow(2).mean()


def move(lr=0.05, parameters=None):
    with torch.no_grad():
        for p in parameters or net.parameters():
            p -= lr * p.grad
            p.grad = None
"""


def loop(body, *, before="", num_updates=20):
    body = textwrap.indent(textwrap.dedent(body).strip("\n"), "    ")
    begin = f"for step, x in enumerate(data[:{num_updates}]):"
    return f"{HEAD}{textwrap.dedent(before)}\n{begin}\n{body}\n"


FAULTS = {
    "never cleared": (
        "NS306",
        "loss.backward()",
        loop("""
        loss = loss_of(x)
        loss.backward()
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.05 * p.grad
        """),
    ),
    "cleared in the window": (
        "NS306",
        "p.grad = None",
        loop(
            """
        for p in net.parameters():
            p.grad = None
        (loss_of(x) / 4).backward()
        if step % 4 == 3:
            with torch.no_grad():
                for p in net.parameters():
                    p.add_(p.grad, alpha=-0.05)
        """,
            num_updates=40,
        ),
    ),
    "cleared in the window, and its memory used again": (
        "NS306",
        "p.grad = None",
        loop(
            """
        for p in net.parameters():
            p.grad = None
        others = [torch.ones(2) for _ in range(100)]
        sums = [other + 1 for other in others]
        (loss_of(x) / 4).backward()
        if step % 4 == 3:
            with torch.no_grad():
                for p in net.parameters():
                    p.add_(p.grad, alpha=-0.05)
        """,
            num_updates=40,
        ),
    ),
    "bound to a name": (
        "NS307",
        "p = p - 0.05 * p.grad",
        loop("""
        loss_of(x).backward()
        with torch.no_grad():
            for p in net.parameters():
                p = p - 0.05 * p.grad
        net.zero_grad()
        """),
    ),
    "copies": (
        "NS307",
        "copy.sub_(p.grad, alpha=0.05)",
        loop(
            """
        loss_of(x).backward()
        for copy, p in zip(copies, net.parameters()):
            copy.sub_(p.grad, alpha=0.05)
            p.grad = None
        """,
            before="copies = [p.detach().clone() for p in net.parameters()]",
        ),
    ),
    "rate of 0": (
        "NS113",
        "p.data -= rate * p.grad",
        loop("""
        loss_of(x).backward()
        rate = 0.1 * (step // 1000)
        for p in net.parameters():
            p.data -= rate * p.grad
            p.grad = None
        """),
    ),
    "rate that comes to 0": (
        "NS113",
        "p -= lr * p.grad",
        loop("""
        loss_of(x).backward()
        move(0.05 * max(0.0, 1 - step / 5))
        """),
    ),
    "lost to rounding": (
        "NS111",
        "p -= lr * p.grad",
        loop(
            """
        (net(x.bfloat16()).float() - x[:, :4]).pow(2).mean().backward()
        move(1e-4)
        """,
            before="net.bfloat16()",
        ),
    ),
    "a tensor left out": (
        "NS114",
        "p -= lr * p.grad",
        loop(
            """
        loss_of(x).backward()
        move(parameters=held)
        net.zero_grad()
        """,
            before="held = list(net.parameters())[:2]",
        ),
    ),
    "runs away": (
        "NS404",
        "p -= rate * p.grad",
        loop(
            """
        x = torch.cat([x, x], 1)
        (w @ x.T - x[:, :4].T).pow(2).mean().backward()
        rate = 6.0
        with torch.no_grad():
            for p in (w,):
                p -= rate * p.grad
                p.grad = None
        """,
            before="w = torch.randn(4, 16, requires_grad=True)",
        ),
    ),
    "decay": (
        "NS113",
        "p -= 0.05 * (p.grad + 8 * p)",
        loop("""
        loss_of(x).backward()
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.05 * (p.grad + 8 * p)
                p.grad = None
        """),
    ),
}

HEALTHY = {
    "plain": loop("loss_of(x).backward()\nmove()"),
    "foreach": loop(
        """
        loss_of(x).backward()
        with torch.no_grad():
            torch._foreach_add_(params, [p.grad for p in params], alpha=-0.05)
        net.zero_grad()
        """,
        before="params = list(net.parameters())",
    ),
    "window": loop(
        """
        (loss_of(x) / 4).backward()
        if step % 4 == 3:
            move()
        """,
        num_updates=80,
    ),
    "momentum that lives in the gradients": loop("""
        loss_of(x).backward()
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.02 * p.grad
                p.grad.mul_(0.9)
        """),
    "momentum": loop(
        """
        loss_of(x).backward()
        with torch.no_grad():
            for p, m in zip(net.parameters(), momenta):
                m.mul_(0.9).add_(p.grad + 1e-2 * p)
                p -= 0.02 * m
        net.zero_grad()
        """,
        before="momenta = [torch.zeros_like(p) for p in net.parameters()]",
    ),
    "a penalty that is raised": loop("""
        loss = loss_of(x) + 10.0 ** (step // 3) * (net[2].bias.sum() - 1) ** 2
        loss.backward()
        move(0.05 / 10.0 ** (step // 3))
        """),
    "a search for the rate": loop(
        """
        (x @ w - x[:, :4]).pow(2).mean().backward()
        move(1e-4 * 2.0 ** step, (w,))
        """,
        before="w = torch.randn(8, 4, requires_grad=True)",
    ),
    "warm-up": loop("loss_of(x).backward()\nmove(0.05 * min(1.0, step / 6))"),
    "Fisher information": loop(
        """
        net.zero_grad()
        loss_of(x).backward()
        for f, p in zip(fisher, net.parameters()):
            f += p.grad.detach() ** 2
        """,
        before="fisher = [torch.zeros_like(p) for p in net.parameters()]",
    ),
    "importance of weights": loop("""
        net.zero_grad()
        loss_of(x).backward()
        scores = [(p.detach() * p.grad).abs() for p in net.parameters()]
        """),
    "saliency": loop("""
        net.zero_grad()
        x.requires_grad_()
        loss_of(x).backward()
        with torch.no_grad():
            moved = x + 0.1 * x.grad.sign()
        """),
    "an attack": loop(
        """
        loss_of(image).backward()
        with torch.no_grad():
            image += 0.05 * image.grad.sign()
        image.grad = None
        net.zero_grad()
        """,
        before="image = torch.randn(8, 8, requires_grad=True)",
    ),
    "a bare tensor that is bound anew": loop(
        """
        ((x @ w) - x[:, :4]).pow(2).mean().backward()
        w = (w - 0.1 * w.grad).detach().requires_grad_()
        """,
        before="w = torch.randn(8, 4, requires_grad=True)",
    ),
    "turns": loop("""
        loss_of(x).backward()
        move(parameters=net[0 if step % 6 == 5 else 2].parameters())
        net.zero_grad()
        """),
    "towards 0": loop(
        """
        (w ** 2).sum().backward()
        with torch.no_grad():
            w -= 0.1 * w.grad
        w.grad = None
        """,
        before="w = torch.randn(8, 4, requires_grad=True)",
    ),
    "average of the weights": loop(
        """
        loss_of(x).backward()
        move()
        with torch.no_grad():
            for mean, p in zip(means, net.parameters()):
                mean += 0.1 * (p - mean)
        """,
        before="means = [p.detach().clone() for p in net.parameters()]",
    ),
    "a rate that ends with the training": loop(
        """
        loss_of(x).backward()
        move(0.05 * (1 - step / 16))
        """,
        num_updates=17,
    ),
}


@pytest.mark.parametrize(("code", "line", "source"), FAULTS.values(), ids=FAULTS)
def test_fault_is_named_with_its_line(tmp_path, code, line, source):
    _, found = with_findings(tmp_path, source)
    assert [one.code for one in found] == [code], found
    assert line in found[0].lines[0]
    assert found[0].where.startswith("script.py:")


@pytest.mark.parametrize("source", HEALTHY.values(), ids=HEALTHY)
def test_healthy_loop_is_left_in_peace(tmp_path, source):
    _, found = with_findings(tmp_path, source)
    assert found == []


@pytest.mark.parametrize("name", ["plain", "momentum", "window", "foreach"])
def test_nothing_is_changed(tmp_path, name):
    plain = run_script(tmp_path / "plain.py", HEALTHY[name])
    seen, _ = with_findings(tmp_path, HEALTHY[name])
    assert same(weights(plain), weights(seen))
