"""Loops that lose gradients on their way to the optimizer, each spelled in several ways, and loops
that come close to that and mean it.
"""

import textwrap

HEAD = """
import copy
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
opt = torch.optim.{kind}(net.parameters(), lr={lr})
data = [torch.randn(8, 8) for _ in range(40)]
weights = list(net.parameters())
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)


def loss_of(x):
    return net(x).pow(2).mean()
"""


def loop(body, *, kind="SGD", lr="0.05", before="", windows=False, num_updates=10):
    """A script of ten updates; with ``windows`` of four micro-batches each, in ``window``."""
    one = f"for x in data[:{num_updates}]:"
    begin = "for window in zip(*[iter(data)] * 4):" if windows else one
    body = textwrap.indent(textwrap.dedent(body).strip("\n"), "    ")
    return f"{HEAD.format(kind=kind, lr=lr)}{textwrap.dedent(before)}\n{begin}\n{body}\n"


ACCELERATED = """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
opt = type(opt)(weights, lr=opt.defaults["lr"])
net, opt = accelerator.prepare(net, opt)
"""
HAND_NORM = "norm = sum(p.grad.pow(2).sum() for p in weights) ** 0.5\n"

PLAIN = """
    opt.zero_grad()
    loss_of(x).backward()
    opt.step()
    """
BAD_ROOT = """
    opt.zero_grad()
    y = net(x).clone()
    y[0] = y[0] * 0
    y.pow(2).sum(1).sqrt().mean().backward()
    nn.utils.clip_grad_norm_(weights, 1.0)
    opt.step()
    """

FAULTS = {
    "never cleared": ("NS306", "loss.backward()", loop("""
        loss = loss_of(x)
        loss.backward()
        opt.step()
        """)),
    "never cleared, clipped": ("NS306", "loss_of(x).backward()", loop("""
        loss_of(x).backward()
        nn.utils.clip_grad_norm_(weights, 0.1)
        opt.step()
        """, kind="AdamW", lr="1e-3")),
    "never cleared, accumulated": ("NS306", "(loss_of(x) / 4).backward()", loop("""
        for x in window:
            (loss_of(x) / 4).backward()
        opt.step()
        """, windows=True)),
    "clipped before the backward": ("NS112", "nn.utils.clip_grad_norm_(weights, 1e-3)", loop("""
        loss = loss_of(x)
        opt.zero_grad()
        nn.utils.clip_grad_norm_(weights, 1e-3)
        loss.backward()
        opt.step()
        """)),
    "zeros are clipped before the backward": (
        "NS112", "nn.utils.clip_grad_norm_(net.parameters(), max_norm=1e-3)", loop("""
        opt.zero_grad(set_to_none=False)
        nn.utils.clip_grad_norm_(net.parameters(), max_norm=1e-3)
        loss_of(x).backward()
        opt.step()
        """)),
    "clipped after the update": ("NS112", "nn.utils.clip_grad_norm_(weights, 1e-3)", loop("""
        opt.zero_grad()
        loss_of(x).backward()
        opt.step()
        nn.utils.clip_grad_norm_(weights, 1e-3)
        """)),
    "clipped after updates, of which those that come later have nothing to clip": (
        "NS112", "nn.utils.clip_grad_norm_(weights, 1e-3)", loop("""
        opt.zero_grad()
        (loss_of(x) * (len(seen) < 2)).backward()
        opt.step()
        nn.utils.clip_grad_norm_(weights, 1e-3)
        seen.append(x)
        """, before="seen = []")),
    "a generator that is used up is clipped": ("NS112", "clip_grad_norm_(used, 1e-3)", loop("""
        opt.zero_grad()
        loss_of(x).backward()
        nn.utils.clip_grad_norm_(used, 1e-3)
        opt.step()
        """, before="used = net.parameters()\nlist(used)")),
    "scaled, clipped after the update": (
        "NS112", "nn.utils.clip_grad_norm_(net.parameters(), 1e-3)", loop("""
        scaler.scale(loss_of(x)).backward()
        scaler.step(opt)
        scaler.update()
        nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        net.zero_grad(set_to_none=False)
        """)),
    "divided by accelerate, never summed": ("NS117", "accelerator.backward(loss_of(x))", loop("""
        accelerator.backward(loss_of(x))
        opt.step()
        opt.zero_grad()
        """, before=ACCELERATED)),
    "another model is cleared": ("NS306", "loss_of(x).backward()", loop("""
        kept.zero_grad()
        loss_of(x).backward()
        opt.step()
        """, before="kept = copy.deepcopy(net)\n")),
    "cleared in the window": ("NS306", "opt.zero_grad()", loop("""
        for x in window:
            opt.zero_grad()
            (loss_of(x) / 4).backward()
        opt.step()
        """, windows=True)),
    "cleared in the window by hand": ("NS306", "p.grad = None", loop("""
        for x in window:
            loss = loss_of(x) / 4
            for p in weights:
                p.grad = None
            loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        opt.step()
        """, windows=True)),
    "cleared in the window in place": ("NS306", "p.grad.data.zero_()", loop("""
        for x in window:
            for p in weights:
                if p.grad is not None:
                    p.grad.data.zero_()
            (loss_of(x) / 4).backward()
        opt.step()
        """, windows=True)),
    "cleared in the window of accelerate": ("NS306", "opt.zero_grad()", loop("""
        for x in window:
            with accelerator.accumulate(net):
                opt.zero_grad()
                accelerator.backward(loss_of(x))
                opt.step()
        """, before=ACCELERATED, windows=True)),
    "counted twice": ("NS306", "loss.backward()", loop("""
        opt.zero_grad()
        loss = loss_of(x)
        loss.backward(retain_graph=True)
        loss.backward()
        opt.step()
        """)),
    "counted twice by torch.autograd": ("NS306", "torch.autograd.backward(loss)", loop("""
        opt.zero_grad()
        loss = loss_of(x)
        torch.autograd.backward(loss, retain_graph=True)
        torch.autograd.backward(loss)
        opt.step()
        """)),
    "counted twice by accelerate": ("NS306", "accelerator.backward(loss)", loop("""
        opt.zero_grad()
        loss = loss_of(x)
        accelerator.backward(loss, retain_graph=True)
        accelerator.backward(loss)
        opt.step()
        """, before=ACCELERATED.replace("=4", "=1"))),
    "counted twice, once as given": ("NS306", "loss.backward()", loop("""
        loss = loss_of(x)
        for p, grad in zip(weights, torch.autograd.grad(loss, weights, retain_graph=True)):
            p.grad = grad
        loss.backward()
        opt.step()
        """)),
    "NaN replaced": ("NS306", "torch.nan_to_num_(p.grad)", loop("""
        opt.zero_grad()
        y = net(x).clone()
        y[0] = y[0] * 0
        y.pow(2).sum(1).sqrt().mean().backward()
        for p in weights:
            torch.nan_to_num_(p.grad)
        opt.step()
        """)),
    "NaN masked": ("NS306", "p.grad[p.grad.isnan()] = 0.0", loop("""
        opt.zero_grad()
        y = net(x).clone()
        y[0] = y[0] * 0
        y.pow(2).sum(1).sqrt().mean().backward()
        for p in weights:
            p.grad[p.grad.isnan()] = 0.0
        opt.step()
        """)),
    "NaN replaced where there is one": ("NS306", "p.grad[p.grad != p.grad] = 0.0", loop("""
        opt.zero_grad()
        y = net(x).clone()
        if counter.pop(0) % 4 == 1:
            y[0] = y[0] * 0
        y.pow(2).sum(1).sqrt().mean().backward()
        for p in weights:
            p.grad[p.grad != p.grad] = 0.0
        opt.step()
        """, before="counter = list(range(40))\n")),
    "NaN replaced by a hook": ("NS306", "p.register_hook(lambda g: torch.nan_to_num(g))", loop(
        BAD_ROOT, before="""
        for p in weights:
            p.register_hook(lambda g: torch.nan_to_num(g))
        """)),
    "NaN replaced by a hook of torch's": ("NS306", "p.register_hook(torch.nan_to_num)", loop(
        BAD_ROOT, before="""
        for p in weights:
            p.register_hook(torch.nan_to_num)
        """)),
    "NaN replaced by the second of three hooks": ("NS306", "return g.nan_to_num(0.0)", loop(
        BAD_ROOT, before="""
        norms = []


        def cure(g):
            return g.nan_to_num(0.0)


        for p in weights:
            for hook in (lambda g: norms.append(g.norm()), cure, lambda g: norms.append(g.sum())):
                p.register_hook(hook)
        """)),
    "NaN replaced behind the accumulation": ("NS306", "p.grad.nan_to_num_()", loop(
        BAD_ROOT, before="""
        def cure(p):
            p.grad.nan_to_num_()


        for p in weights:
            p.register_post_accumulate_grad_hook(cure)
        """)),
    "clipped to 0": ("NS307", "nn.utils.clip_grad_norm_(weights, 0.0)", loop("""
        opt.zero_grad()
        loss_of(x).backward()
        nn.utils.clip_grad_norm_(weights, 0.0)
        opt.step()
        """, kind="AdamW", lr="1e-3")),
    "clipped to next to 0 by accelerate": ("NS307", "clip_grad_norm_(weights, 1e-10)", loop("""
        opt.zero_grad()
        accelerator.backward(loss_of(x))
        accelerator.clip_grad_norm_(weights, 1e-10)
        opt.step()
        """, before=ACCELERATED.replace("=4", "=1"))),
    "clipped by a norm that overflows": ("NS307", "norm = float(sum(", loop("""
        opt.zero_grad()
        (1e22 * loss_of(x)).backward()
        norm = float(sum(p.grad.pow(2).sum() for p in weights) ** 0.5)
        for p in weights:
            p.grad.mul_(min(1.0, 1.0 / norm))
        opt.step()
        """)),
    "clipped by a norm in half": ("NS307", "norm = torch.stack([p.grad.half()", loop("""
        opt.zero_grad()
        (1e4 * loss_of(x)).backward()
        norm = torch.stack([p.grad.half().pow(2).sum() for p in weights]).sum().sqrt().float()
        for p in weights:
            p.grad = p.grad * (1.0 / norm)
        opt.step()
        """, num_updates=18)),
    "clipped by torch's norm of halves": ("NS307", "get_total_norm(halves)", loop("""
        opt.zero_grad()
        (5e5 * loss_of(x)).backward()
        halves = [p.grad.half() for p in weights]
        norm = nn.utils.get_total_norm(halves)
        nn.utils.clip_grads_with_norm_(weights, 1.0, norm)
        opt.step()
        """, num_updates=18)),
    "clipped by hand while scaled": ("NS112", "p.grad.mul_(min(1.0, 0.1 / norm))", loop(f"""
        opt.zero_grad()
        scaler.scale(loss_of(x)).backward()
        {HAND_NORM.strip()}
        for p in weights:
            p.grad.mul_(min(1.0, 0.1 / norm))
        scaler.step(opt)
        scaler.update()
        """)),
    "clipped while scaled by hand": ("NS112", "p.grad.mul_(min(1.0, 0.1 / norm))", loop(f"""
        opt.zero_grad()
        (1024 * loss_of(x)).backward()
        {HAND_NORM.strip()}
        for p in weights:
            p.grad.mul_(min(1.0, 0.1 / norm))
        for p in weights:
            p.grad.data.div_(1024)
        opt.step()
        """)),
    "unscaled twice by hand": ("NS306", "torch._foreach_div_(grads, 4096)", loop("""
        opt.zero_grad()
        (64 * loss_of(x)).backward()
        grads = [p.grad for p in weights]
        torch._foreach_div_(grads, 4096)
        opt.step()
        """)),
    "made small by a hook": ("NS306", "p.register_hook(lambda g: g * 1e-3)", loop(
        PLAIN, before="""
        for p in weights:
            p.register_hook(lambda g: g * 1e-3)
        """)),
    "a head replaced after the optimizer": ("NS114", "opt = torch.optim.SGD(", loop(
        PLAIN, before="net[2] = nn.Linear(16, 4)\n")),
    "clipped while scaled": ("NS112", "nn.utils.clip_grad_norm_(weights, 0.1)", loop("""
        opt.zero_grad()
        scaler.scale(loss_of(x)).backward()
        nn.utils.clip_grad_norm_(weights, 0.1)
        scaler.step(opt)
        scaler.update()
        """)),
    "clipped by foreach while scaled": ("NS112", "torch._foreach_mul_(grads, factor)", loop("""
        opt.zero_grad()
        scaler.scale(loss_of(x)).backward()
        grads = [p.grad for p in weights]
        factor = min(1.0, 0.1 / float(torch.stack(torch._foreach_norm(grads)).norm()))
        torch._foreach_mul_(grads, factor)
        scaler.step(opt)
        scaler.update()
        """)),
    "scale left on": ("NS112", "opt.step()", loop("""
        opt.zero_grad()
        scaler.scale(loss_of(x)).backward()
        opt.step()
        """, lr="1e-6")),
    "scale left on, looked at": ("NS112", "", loop("""
        opt.zero_grad()
        scaler.scale(loss_of(x)).backward()
        for p in weights:
            p.grad.add_(0.0)
        opt.step()
        """, lr="1e-6")),
    "accumulated beyond the end": ("NS307", "opt.step()", loop("""
        with accelerator.accumulate(net):
            accelerator.backward(loss_of(x))
            opt.step()
            opt.zero_grad()
        """, before=ACCELERATED.replace("=4", "=1000"), num_updates=40)),
    "weights put back": ("NS307", "net.load_state_dict(best)", loop("""
        opt.zero_grad()
        loss_of(x).backward()
        opt.step()
        net.load_state_dict(best)
        """, before="best = copy.deepcopy(net.state_dict())\n")),
    "weights put back from the second on": ("NS307", "p.data.copy_(start)", loop("""
        opt.zero_grad()
        loss_of(x).backward()
        opt.step()
        if not best:
            best += [p.detach().clone() for p in weights]
        for p, start in zip(weights, best):
            p.data.copy_(start)
        """, before="best = []\n")),
    "weights copied back": ("NS307", "p.copy_(start)", loop("""
        with torch.no_grad():
            for p, start in zip(weights, best):
                p.copy_(start)
        opt.zero_grad()
        loss_of(x).backward()
        opt.step()
        """, before="best = [p.detach().clone() for p in weights]\n")),
}  # fmt: skip
"""By name: code, the start or end of the line that is named ("" for none), and the script."""

HEALTHY = {
    "plain": loop("""
        opt.zero_grad()
        loss_of(x).backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        opt.step()
        """),
    "accumulated, cleared in place": loop("""
        for x in window:
            (loss_of(x) / 4).backward()
        opt.step()
        opt.zero_grad(set_to_none=False)
        """, windows=True),
    "accumulated by accelerate": loop("""
        for x in window:
            with accelerator.accumulate(net):
                accelerator.backward(loss_of(x))
                opt.step()
                opt.zero_grad()
        """, before=ACCELERATED, windows=True),
    "one micro-batch, which accelerate is told of": loop("""
        accelerator.backward(loss_of(x))
        opt.step()
        opt.zero_grad()
        """, before=ACCELERATED.replace("=4", "=1"), num_updates=20),
    "accumulated by hand with accelerate's division": loop("""
        for x in window:
            accelerator.backward(loss_of(x))
        opt.step()
        opt.zero_grad()
        """, before=ACCELERATED, windows=True),
    "a clip that would clip nothing, before the backward": loop("""
        opt.zero_grad()
        nn.utils.clip_grad_norm_(weights, 100.0)
        loss_of(x).backward()
        opt.step()
        """),
    "what goes on being summed is clipped after the update": loop("""
        loss_of(x).backward()
        opt.step()
        nn.utils.clip_grad_norm_(weights, 1e-3)
        """, num_updates=3),
    "clipped after the update as well": loop("""
        opt.zero_grad()
        loss_of(x).backward()
        nn.utils.clip_grad_norm_(weights, 0.1)
        opt.step()
        nn.utils.clip_grad_norm_(weights, 0.1)
        """),
    "a clip of no parameters and another": loop("""
        opt.zero_grad()
        loss_of(x).backward()
        nn.utils.clip_grad_norm_([], 0.1)
        nn.utils.clip_grad_norm_(weights, 0.1)
        opt.step()
        """),
    "an idle clip and another": loop("""
        opt.zero_grad()
        nn.utils.clip_grad_norm_(weights, 0.1)
        loss_of(x).backward()
        nn.utils.clip_grad_norm_(weights, 0.1)
        opt.step()
        """),
    "a clip in each micro-batch, before its backward": loop("""
        opt.zero_grad()
        for x in window:
            nn.utils.clip_grad_norm_(weights, 1e-3)
            (loss_of(x) / 4).backward()
        opt.step()
        """, windows=True),
    "a norm that is only read": loop("""
        opt.zero_grad()
        nn.utils.clip_grad_norm_(weights, float("inf"))
        loss_of(x).backward()
        opt.step()
        """),
    "a short trial of a long window": loop("""
        with accelerator.accumulate(net):
            accelerator.backward(loss_of(x))
            opt.step()
            opt.zero_grad()
        """, before=ACCELERATED.replace("=4", "=64"), num_updates=20),
    "a window that ends with the data": loop("""
        with accelerator.accumulate(net):
            accelerator.backward(loss_of(x))
            opt.step()
            opt.zero_grad()
        """, before=ACCELERATED.replace("=4", "=40"), num_updates=40),
    "backwards that are timed": loop("""
        loss_of(x).backward()
        """, num_updates=40),
    "one batch again and again": loop("""
        for _ in range(4):
            (loss_of(data[0]) / 4).backward()
        opt.step()
        opt.zero_grad()
        """),
    "a gradient penalty": loop("""
        opt.zero_grad()
        loss = loss_of(x)
        grads = torch.autograd.grad(loss, weights, create_graph=True)
        (loss + 0.1 * sum(g.pow(2).sum() for g in grads)).backward()
        opt.step()
        """),
    "two losses on one graph": loop("""
        opt.zero_grad()
        y = net(x)
        y[:, 0].pow(2).mean().backward(retain_graph=True)
        y[:, 1].pow(2).mean().backward()
        opt.step()
        """),
    "unscaled and clipped": loop("""
        opt.zero_grad()
        scaler.scale(loss_of(x)).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(weights, 0.1)
        scaler.step(opt)
        scaler.update()
        """),
    "unscaled and clipped by hand": loop(f"""
        opt.zero_grad()
        scaler.scale(loss_of(x)).backward()
        for p in weights:
            p.grad.div_(scaler.get_scale())
        {HAND_NORM.strip()}
        for p in weights:
            p.grad.mul_(min(1.0, 0.1 / norm))
        opt.step()
        """),
    "divided by the window while scaled": loop("""
        opt.zero_grad()
        scaler.scale(loss_of(x)).backward()
        for p in weights:
            p.grad.div_(4)
        scaler.step(opt)
        scaler.update()
        """),
    "scaled, unscaled and clipped by hand": loop(f"""
        opt.zero_grad()
        (loss_of(x) * 1024).backward()
        for p in weights:
            p.grad.div_(1024)
        {HAND_NORM.strip()}
        for p in weights:
            p.grad.mul_(min(1.0, 0.1 / norm))
        opt.step()
        """),
    "divided by the rows of each batch, then unscaled": loop("""
        opt.zero_grad()
        (loss_of(x) * 1024).backward()
        rows = counts.pop()
        for p in weights:
            p.grad.div_(rows)
        for p in weights:
            p.grad.div_(1024)
        opt.step()
        """, before="counts = list(range(2, 40))\n"),
    "the rate in the gradients": loop("""
        opt.zero_grad()
        loss_of(x).backward()
        for p in weights:
            p.grad *= 1e-3
        opt.step()
        """, lr="1.0"),
    "a sum, divided by its rows": loop("""
        opt.zero_grad()
        net(x).pow(2).sum().backward()
        for p in weights:
            p.grad /= 256
        opt.step()
        """),
    "a factor that Adam does not see": loop("""
        opt.zero_grad()
        loss_of(x).backward()
        for p in weights:
            p.grad *= 1e-3
        opt.step()
        """, kind="Adam", lr="1e-3"),
    "only the head": loop(PLAIN, before="opt = torch.optim.Adam(net[2].parameters())\n"),
    "heads in turn, each with its optimizer": loop("""
        for head, own in zip(heads, optimizers):
            own.zero_grad()
            head(net[0](x).tanh()).pow(2).mean().backward()
            own.step()
        """, before="""
        heads = [nn.Linear(16, 4) for _ in range(2)]
        optimizers = [torch.optim.Adam([*net[0].parameters(), *h.parameters()]) for h in heads]
        """),
    "a judge that nobody trains": loop(PLAIN.replace("loss_of(x)", "judge(net(x)).mean()"),
        before="judge = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))\n"),
    "a large sum, divided by its count": loop("""
        opt.zero_grad()
        (1e6 * loss_of(x)).backward()
        for p in weights:
            p.grad.div_(1e6)
        opt.step()
        """),
    "a norm in half that nobody uses": loop("""
        opt.zero_grad()
        (1e5 * loss_of(x)).backward()
        seen.append(float(torch.stack([p.grad.half().norm() for p in weights]).norm()))
        for p in weights:
            p.grad.div_(1e5)
        opt.step()
        """, before="seen = []\n", num_updates=18),
    "large gradients, held still for a while": loop("""
        opt.zero_grad()
        (1e4 * loss_of(x)).backward()
        for p in weights:
            p.grad.mul_(1e-4 if num_done > 3 else 0.0)
        num_done += 1
        opt.step()
        """, before="num_done = 0\n"),
    "a layer held still for a while": loop("""
        opt.zero_grad()
        loss_of(x).backward()
        net[0].weight.grad.zero_()
        opt.step()
        """),
    "clipped by hooks": loop(PLAIN, before="""
        for p in weights:
            p.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        """),
    "rows masked by a hook": loop(PLAIN, before="""
        mask = (torch.arange(16) > 3).float()[:, None]
        net[0].weight.register_hook(lambda g: g * mask)
        """),
    "noise by a hook": loop(PLAIN, before="""
        for p in weights:
            p.register_hook(lambda g: g + 1e-3 * torch.randn_like(g))
        """),
    "centralised by a hook": loop(PLAIN, before="""
        for p in weights[::2]:
            p.register_hook(lambda g: g - g.mean(1, keepdim=True))
        """),
    "a layer held still by a hook": loop(PLAIN, before="""
        net[0].weight.register_hook(torch.zeros_like)
        """),
    "gradients reversed": loop(PLAIN.replace("loss_of(x)", "reversed_loss(x)"), before="""
        def reversed_loss(x):
            hidden = net[0](x)
            hidden.register_hook(lambda g: -0.1 * g)
            return net[2](net[1](hidden)).pow(2).mean()
        """),
    "a hook that removes itself": loop(PLAIN, before="""
        def once(g):
            handle.remove()
            return g * 0


        handle = net[0].weight.register_hook(once)
        """),
    "gradients handed on by hooks": loop("""
        loss_of(x).backward()
        for p in weights:
            p.grad = taken.pop(p)
        opt.step()
        opt.zero_grad()
        """, before="""
        taken = {}


        def take(p):
            taken[p], p.grad = p.grad, None


        for p in weights:
            p.register_post_accumulate_grad_hook(take)
        """),
    "eligibility traces": loop("""
        for p in weights:
            if p.grad is not None:
                p.grad.mul_(0.9)
        loss_of(x).backward()
        opt.step()
        """),
    "GAN with one helper": loop("""
        update(other, judge(net(x).detach()).mean() - judge(torch.randn(8, 4)).mean())
        update(opt, -judge(net(x)).mean())
        """, before="""
        judge = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        other = torch.optim.Adam(judge.parameters(), lr=1e-3)

        def update(optimizer, loss):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """),
    "GAN, both backwards before both updates": loop("""
        for optimizer, loss in ((opt, fooled), (other, told)):
            optimizer.zero_grad()
            loss(x).backward()
        opt.step()
        other.step()
        """, before="""
        judge = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        other = torch.optim.Adam(judge.parameters(), lr=1e-3)
        fooled = lambda x: -judge(net(x)).mean()
        told = lambda x: judge(net(x).detach()).mean() - judge(torch.randn(8, 4)).mean()
        """),
    "sharpness-aware, one line": loop("""
        for first in (True, False):
            opt.zero_grad()
            loss_of(x).backward()
            if first:
                climb = [0.05 * p.grad / (p.grad.norm() + 1e-12) for p in weights]
                torch._foreach_add_([p.data for p in weights], climb)
        torch._foreach_sub_([p.data for p in weights], climb)
        opt.step()
        """),
    "adversarial inputs, one loop": loop("""
        delta = torch.zeros_like(x, requires_grad=True)
        for last in (False, False, True):
            opt.zero_grad()
            loss_of(x + delta).backward()
            if not last:
                delta = (delta + 0.01 * delta.grad.sign()).detach().requires_grad_()
        opt.step()
        """),
    "conflicting gradients": loop("""
        y, grads = net(x), []
        for task in range(3):
            opt.zero_grad()
            y[:, task].pow(2).mean().backward(retain_graph=True)
            grads.append([p.grad.clone() for p in weights])
        for p, *own in zip(weights, *grads):
            p.grad = sum(own)
        opt.step()
        """),
    "clipped sample by sample": loop("""
        total = [torch.zeros_like(p) for p in weights]
        for x in window:
            opt.zero_grad()
            loss_of(x).backward()
            nn.utils.clip_grad_norm_(weights, 0.1)
            for sum_, p in zip(total, weights):
                sum_ += p.grad
        for sum_, p in zip(total, weights):
            p.grad = sum_ / 4
        opt.step()
        """, windows=True),
    "probed, then trained": loop("""
        grad(loss_of(x[:4]))
        seen.append(net[0].weight.grad.clone())
        grad(loss_of(x))
        opt.step()
        """, before="""
        seen = []

        def grad(loss):
            opt.zero_grad()
            loss.backward()
        """),
    "saliency, then trained": loop("""
        seen = x.clone().requires_grad_()
        loss_of(seen).backward()
        opt.zero_grad()
        loss_of(x).backward()
        opt.step()
        """),
    "prediction before the reset": loop("""
        opt.zero_grad()
        loss_of(x).backward()
        opt.step()
        with torch.no_grad():
            net(x)
        net.load_state_dict(best)
        """, before="best = copy.deepcopy(net.state_dict())\n"),
    "evaluation of averaged weights": loop("""
        opt.zero_grad()
        loss_of(x).backward()
        opt.step()
        held = copy.deepcopy(net.state_dict())
        net.load_state_dict(average)
        with torch.no_grad():
            net(x)
        net.load_state_dict(held)
        """, before="average = copy.deepcopy(net.state_dict())\n"),
    "multipliers of constraints that hold": loop("""
        dual.zero_grad()
        opt.zero_grad()
        (loss_of(x) + (multipliers * (x.mean(0)[:2] - 5.0)).sum()).backward()
        opt.step()
        dual.step()
        multipliers.data.clamp_(min=0.0)
        """, before="""
        multipliers = torch.nn.Parameter(torch.zeros(2))
        dual = torch.optim.SGD([multipliers], lr=0.1, maximize=True)
        """),
    "gradients by torch.autograd.grad": loop("""
        for p, grad in zip(weights, torch.autograd.grad(loss_of(x), weights)):
            p.grad = grad
        opt.step()
        """),
    "a closure": loop("""
        def closure():
            opt.zero_grad()
            loss = loss_of(x)
            loss.backward()
            return loss

        opt.step(closure)
        """, kind="LBFGS", lr="0.1"),
}  # fmt: skip
