"""Micro-batches that are pieces of one batch, and several losses of one step:
real scripts through BatchNorm (NS117).
"""

import pytest
import torch

import nanstop
from loop_scripts import run_script
from nanstop.decide.policy import Policy
from nanstop.session.factory import opener
from nanstop.store.incidents import Store

torch.set_num_threads(1)

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


def block(*ends):
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, *ends))


net, made = block(4), block(8)
optimizer = torch.optim.SGD(net.parameters(), 1e-2)
X, Y = torch.randn(64, 8), torch.randint(4, (64,))
real = [torch.randn(8, 8) + 1 for _ in range(4)]
score = nn.BCEWithLogitsLoss()
mse = nn.MSELoss()


def fake(rows=8):
    with torch.no_grad():
        return made(torch.randn(rows, 8))


for step in range(2):
    optimizer.zero_grad()
"""

PIECES = {
    "slices": """
    for at in range(0, 32, 8):
        (F.cross_entropy(net(X[at : at + 8]), Y[at : at + 8]) / 4).backward()
""",
    "by hand": """
    first = F.cross_entropy(net(X[:8]), Y[:8])
    first.backward()
    second = F.cross_entropy(net(X[8:16]), Y[8:16])
    second.backward()
""",
    "uneven, weighted": """
    for x, y in zip(X.split(24), Y.split(24)):
        logits = net(x).view(x.shape[0], 4)
        (F.cross_entropy(logits, y) * (len(x) / 64)).backward()
""",
    "weighted by a tensor": """
    for x, y, weight in zip(X.split(32), Y.split(32), torch.tensor([0.3, 0.7])):
        (F.cross_entropy(net(x), y) * weight).backward()
""",
    "regression": """
    for x in X.split(16):
        mse(net(x), x[:, :4]).backward()
""",
    "dropout": """
    for x, y in zip(X.split(16), Y.split(16)):
        F.cross_entropy(F.dropout(net(x), 0.1), y).backward()
""",
    "pieces of both losses": """
    for x in real:
        score(net(x), torch.ones(8, 4)).backward()
    for _ in range(4):
        score(net(fake()), torch.zeros(8, 4)).backward()
""",
}

LOSSES = {
    "dcgan": """
    label = torch.full((8, 4), 1.0)
    score(net(real[0]), label).backward()
    generated = made(torch.randn(8, 8))
    label.fill_(0.0)
    score(net(generated.detach()), label).backward()
""",
    "made before": """
    generated = fake()
    score(net(real[0]), torch.ones(8, 4)).backward()
    score(net(generated), torch.zeros(8, 4)).backward()
""",
    "in a loop": """
    for x, target in ((real[0], torch.ones(8, 4)), (fake(), torch.zeros(8, 4))):
        score(net(x), target).backward()
""",
    "smoothed labels": """
    for x, target in ((real[0], 0.9 + 0.1 * torch.rand(8, 4)), (fake(), 0.1 * torch.rand(8, 4))):
        score(net(x), target).backward()
""",
    "targets like the output": """
    for x, target in ((real[0], 0.9), (fake(), 0.1)):
        output = net(x)
        score(output, torch.full_like(output, target)).backward()
""",
    "expanded targets": """
    for x, target in ((real[0], torch.tensor(1.0)), (fake(), torch.tensor(0.0))):
        output = net(x)
        mse(output, target.expand_as(output)).backward()
""",
    "least squares": """
    for x, target in ((real[0], 1), (fake(), 0)):
        ((net(x) - target) ** 2).mean().backward()
""",
    "hinge": """
    F.relu(1.0 - net(real[0])).mean().backward()
    F.relu(1.0 + net(fake())).mean().backward()
""",
    "wasserstein": """
    one = torch.tensor(1.0)
    net(real[0]).mean().backward(-one)
    net(fake()).mean().backward(one)
""",
    "classes": """
    for x, kind in ((real[0], 1), (fake(), 0)):
        F.cross_entropy(net(x), torch.full((8,), kind)).backward()
""",
    "the same batch twice": """
    for _ in range(2):
        F.cross_entropy(F.dropout(net(X), 0.1), Y).backward()
""",
    "two losses": """
    F.cross_entropy(net(X[:32]), Y[:32]).backward()
    net(X[32:]).softmax(-1).square().sum(-1).mean().backward()
""",
    "one": """
    F.cross_entropy(net(X), Y).backward()
""",
}


def told(folder, steps):
    """What is said of NS117 in a script, as (title, cause)."""
    said = []
    opened = opener(Policy(), Store(folder / "out"), said.append)
    run_script(folder / "train.py", f"{HEAD}{steps}    optimizer.step()\n", opened)
    assert not [one for one in said if isinstance(one, str)]
    return [(one.title, one.cause) for one in said if getattr(one, "code", "") == "NS117"]


@pytest.mark.parametrize("steps", PIECES.values(), ids=PIECES)
def test_statistics_of_pieces_of_a_batch_are_told(tmp_path, steps):
    expected = ("statistics of micro-batches", "1 BatchNorm sees one micro-batch at a time")
    assert told(tmp_path, steps) == [expected]


@pytest.mark.parametrize("steps", LOSSES.values(), ids=LOSSES)
def test_several_losses_of_one_step_are_no_pieces_of_a_batch(tmp_path, steps):
    assert told(tmp_path, steps) == []


def watched(folder, *losses, accumulation=None):
    """Whether NS117 is told of a window of ``(loss function, batch)`` through ``net``."""
    net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    with nanstop.watch(net, optimizer, out=folder, accumulation=accumulation) as watch:
        for loss, batch in losses:
            watch.step(loss(net), batch)
        watch.update(clip=None)
    return [finding.code for finding in watch.findings] == ["NS117"]


def against(target):
    return lambda net: lambda x: (net(x) - target).square().mean()


def test_the_loss_functions_of_a_loop_tell_pieces_from_losses(tmp_path):
    real, generated = torch.randn(16, 8), torch.randn(16, 8)
    loss, other = against(1.0), against(0.0)
    assert watched(tmp_path, (loss, real), (loss, generated))
    assert not watched(tmp_path, (loss, real), (other, generated))
    assert not watched(tmp_path, (loss, real), (loss, real))
    assert watched(tmp_path, (loss, real), (other, generated), accumulation=2)
