"""Part by part, a step comes to the very float32 numbers that the whole model comes to."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fnstep import FnStep
from nanstop.remedies.precision import reference
from nanstop.remedies.streamed import Stream, parts, streamed
from nanstop.replay.path import Path
from nanstop.replay.rerun import attempt


class Block(nn.Module):
    def __init__(self, width, kind):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.down, self.drop, self.kind = nn.Linear(2 * width, width), nn.Dropout(0.3), kind

    def inner(self, x):
        chosen = self.up(self.norm(x)).topk(5, dim=-1)
        return torch.zeros_like(self.up(x)).scatter(-1, chosen.indices, chosen.values)

    def forward(self, x, seen=None):
        if seen is not None:
            seen.add(x)
        if self.kind is None:
            made = self.inner(x)
        else:
            made = checkpoint(self.inner, x, use_reentrant=self.kind)
        return x + self.drop(self.down(made))


class Seen:
    """What blocks write to, as a cache of keys and values."""

    def __init__(self):
        self.num, self.last = 0, None

    def add(self, x):
        self.num, self.last = self.num + 1, x.detach()


class Net(nn.Module):
    def __init__(self, kind=None, tied=True):
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(Block(16, kind) for _ in range(3))
        self.head = nn.Linear(16, 50, bias=False)
        self.scale = nn.Parameter(torch.ones(16))
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids):
        x, seen = self.table(ids), Seen()
        for block in self.blocks:
            x = block(x, seen=seen)
        assert seen.num == 3
        return self.head(x * self.scale)


def loss(net, batch):
    return nn.functional.cross_entropy(net(batch["ids"]).flatten(0, 1).float(), batch["labels"])


def step_of(net):
    torch.manual_seed(0)
    ids = torch.randint(50, (2, 6))
    return FnStep(net.half(), loss, [{"ids": ids, "labels": ids.flatten()}])


def by_parts(step, path):
    stream, formats = Stream(step.view.root), set()
    run = attempt(
        step,
        0,
        keep_grads=True,
        under=lambda: streamed(step.view, stream),
        gathered=stream.gathered,
        along=lambda: path.played(formats=formats),
    )
    return run, formats


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [None, True, False])
def test_the_same_bits_as_the_whole_model(kind, tied):
    torch.manual_seed(1)
    step, path = step_of(Net(kind, tied)), Path()
    attempt(step, 0, along=path.recorded)
    whole = attempt(step, 0, keep_grads=True, under=lambda: reference(step.view), along=path.played)
    before = {n: (p.data_ptr(), p.clone()) for n, p in step.view.root.named_parameters()}
    run, formats = by_parts(step, path)
    assert (run.error, run.bad, formats) == (None, (), {torch.float32})
    assert run.loss == whole.loss
    assert path.num_draws
    assert path.num_choices
    assert set(run.grads) == set(whole.grads)
    tight = {} if not tied else {"rtol": 1e-5, "atol": 1e-8}  # two gradients, added elsewhere
    for name, grad in whole.grads.items():
        if tight and name == "table.weight":
            torch.testing.assert_close(run.grads[name], grad, **tight)
        else:
            assert torch.equal(run.grads[name], grad), name
    for name, p in step.view.root.named_parameters():
        place, values = before[name]
        assert (p.dtype, p.data_ptr(), p.grad) == (torch.float16, place, None)
        assert torch.equal(p, values)


def test_one_part_is_wide_at_a_time():
    wide, net = [], Net()
    step = step_of(net)

    def note(module, *_):
        names = parts(net)
        wide.append({n for n, m in names.items() if next(m.parameters()).dtype is torch.float32})

    for block in net.blocks:
        block.down.register_forward_hook(note)
    run, _ = by_parts(step, Path())
    assert run.error is None
    # In the forward and once more in the backward.
    assert wide == [{f"blocks.{place}"} for place in (0, 1, 2, 2, 1, 0)]


class Borrowing(Net):
    def forward(self, ids):
        return super().forward(ids).float() + self.blocks[0].down.weight.sum().float()


class Listing(Net):
    def forward(self, ids):
        x, losses = self.table(ids), []
        for block in self.blocks:
            x = block(x, seen=losses)
        return self.head(x) + sum(losses)


class Adding(Block):
    def forward(self, x, seen=None):
        seen.append(x.mean())
        return super().forward(x)


class InPlace(Block):
    def forward(self, x, seen=None):
        return super().forward(x.mul_(2.0))


def test_a_weight_that_is_used_outside_of_its_part_is_refused():
    run, _ = by_parts(step_of(Borrowing()), Path())
    assert "used outside of" in str(run.error)


def test_a_part_that_writes_to_what_it_is_given_is_refused():
    net = Net()
    net.blocks[1] = InPlace(16, None)
    run, _ = by_parts(step_of(net), Path())
    assert "writes to what it is given" in str(run.error)


def test_a_part_that_adds_to_a_list_is_refused():
    net = Listing()
    net.blocks = nn.ModuleList(Adding(16, None) for _ in range(3))
    run, _ = by_parts(step_of(net), Path())
    assert "writes to what it is given" in str(run.error)


def test_a_gradient_of_a_gradient_is_refused():
    def penalty(net, batch):
        found = loss(net, batch)
        [grad] = torch.autograd.grad(found, [net.table.weight], create_graph=True)
        return found + grad.float().square().sum()

    step = step_of(Net())
    step._loss_fn = penalty
    run, _ = by_parts(step, Path())
    assert run.error is not None
