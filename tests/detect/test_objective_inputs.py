"""Objectives that are fed with probabilities or scores are told whichever way those were spelled;
those that take what they are given as it is meant are not.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from loop_scripts import findings_of

torch.set_num_threads(1)


class Normalised(nn.Module):
    """A softmax that does not look like one."""

    def forward(self, x):
        weights = (x - x.amax(-1, keepdim=True)).exp()
        return weights * weights.sum(-1, keepdim=True).reciprocal()


def net(*last):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4), *last)


def chosen(batch):
    return F.one_hot(batch["y"], 4).float()


def by_hand(logits, y):
    return (logits.logsumexp(-1) - logits.gather(1, y[:, None])[:, 0]).mean()


def spelled_out(m, b):
    """A softmax and its cross entropy, as a textbook has them."""
    scores = m(b["x"])
    scores = scores.exp() / scores.exp().sum(-1, keepdim=True)
    return (scores.exp().sum(-1).log() - scores.gather(1, b["y"][:, None])[:, 0]).mean()


def cross_entropy(m, b):
    return F.cross_entropy(m(b["x"]), b["y"])


def with_logits(m, b):
    return F.binary_cross_entropy_with_logits(m(b["x"]), chosen(b))


def likelihood(m, b):
    return F.nll_loss(m(b["x"]), b["y"])


def focal(m, b):
    logs = m(b["x"]).log_softmax(-1)
    return F.nll_loss((1.0 - logs.exp()) ** 2 * logs, b["y"])


def aligned(m, b):
    steps = m(b["x"]).unsqueeze(1).log_softmax(-1)
    return F.ctc_loss(steps, torch.tensor([[1, 2]]), torch.tensor([8]), torch.tensor([2]))


def distilled(m, b):
    target = F.softmax(b["x"][:, :4], -1)
    return F.kl_div(F.log_softmax(m(b["x"]) / 2.0, -1), target, reduction="batchmean")


def divergence(m, b, *, is_log=False, by_hand=False):
    """A KL divergence that takes what the model gives for logarithms."""
    target = F.softmax(b["x"][:, :4], -1)
    if by_hand:
        return (target * (target.log() - m(b["x"]))).sum(-1).mean()
    wanted = target.log() if is_log else target
    return F.kl_div(m(b["x"]), wanted, reduction="batchmean", log_target=is_log)


def target_of_probabilities(m, b):
    target = F.softmax(b["x"][:, :4], -1)
    return F.kl_div(m(b["x"]), target, reduction="batchmean", log_target=True)


def normalised_apart(m, b):
    scores = m(b["x"])
    return divergence(lambda _: scores, b, by_hand=True) + scores.logsumexp(-1).mean()


def the_other_way(m, b):
    log_target, given = F.log_softmax(b["x"][:, :4], -1), F.softmax(m(b["x"]), -1)
    return (given * (given.log() - log_target)).sum(-1).mean()


def expected(m, b):
    return -(F.softmax(b["x"][:, :4], -1) * m(b["x"])).sum(-1).mean()


def tagged(m, b, *, dim=1):
    steps = m(b["x"]).reshape(4, 2, 4).log_softmax(dim)
    return F.nll_loss(steps.flatten(0, 1), b["y"])


def contrast(m, b):
    """The columns of a square are a softmax as well as its rows."""
    rows = F.normalize(m(b["x"]), dim=-1) @ F.normalize(b["x"][:, :4], dim=-1).T * 5.0
    own = torch.arange(len(rows))
    return F.nll_loss(rows.log_softmax(1), own) + F.nll_loss(rows.log_softmax(0), own)


def shifted(m, b):
    """Log-probabilities less those of a prior, on purpose not normalised."""
    return F.nll_loss(m(b["x"]).log_softmax(-1) - 0.3 * torch.arange(1.0, 5.0).log(), b["y"])


def soft_labels(m, b):
    return F.cross_entropy(m(b["x"]), F.softmax(b["x"][:, :4], -1))


def found(folder, model, loss_fn, steps=2):
    return findings_of(folder, lambda: train(model, loss_fn, steps))


def train(model, loss_fn, steps):
    torch.manual_seed(1)
    batch = {"x": torch.randn(8, 6), "y": torch.randint(0, 4, (8,))}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()


FED = [
    ("module", net(nn.Softmax(-1)), cross_entropy),
    ("function", net(), lambda m, b: F.cross_entropy(F.softmax(m(b["x"]), -1), b["y"])),
    ("by hand", net(Normalised()), cross_entropy),
    ("its cross entropy by hand", net(nn.Softmax(-1)), lambda m, b: by_hand(m(b["x"]), b["y"])),
    ("a softmax that overflows", net(), spelled_out),
    ("sigmoid", net(nn.Sigmoid()), with_logits),
    ("sigmoid by hand", net(), lambda m, b: F.binary_cross_entropy_with_logits(
        1.0 / (1.0 + torch.exp(-m(b["x"]))), chosen(b))),
    ("softmax for binary", net(nn.Softmax(-1)), with_logits),
    ("probabilities", net(nn.Softmax(-1)), likelihood),
    ("scores", net(), likelihood),
    ("divergence", net(nn.Softmax(-1)), divergence),
    ("of logarithms", net(nn.Softmax(-1)), partial(divergence, is_log=True)),
    ("by its formula", net(nn.Softmax(-1)), partial(divergence, by_hand=True)),
    ("of scores", net(), divergence),
    ("target of a divergence", net(nn.LogSoftmax(-1)), target_of_probabilities),
    ("along the batch", net(nn.LogSoftmax(0)), likelihood),
    ("along the steps", net(), tagged),
    ("along the batch of a divergence", net(nn.LogSoftmax(0)), divergence),
]  # fmt: skip

MEANT = [
    ("logits", net(), cross_entropy),
    ("log-probabilities", net(nn.LogSoftmax(-1)), cross_entropy),
    ("likelihood", net(nn.LogSoftmax(-1)), likelihood),
    ("focal", net(), focal),
    ("aligned", net(), aligned),
    ("distilled", net(), distilled),
    ("soft labels", net(), soft_labels),
    ("along the classes", net(), partial(tagged, dim=2)),
    ("of a batch with itself", net(), contrast),
    ("shifted", net(), shifted),
    ("divergence", net(nn.LogSoftmax(-1)), divergence),
    ("of logarithms", net(nn.LogSoftmax(-1)), partial(divergence, is_log=True)),
    ("by its formula", net(nn.LogSoftmax(-1)), partial(divergence, by_hand=True)),
    ("normalised apart", net(), normalised_apart),
    ("the other way", net(), the_other_way),
    ("an expectation", net(nn.Softmax(-1)), expected),
    ("binary", net(), with_logits),
    ("positive scores", net(nn.ReLU()), with_logits),
    ("logarithm", net(nn.Softmax(-1)), lambda m, b: F.nll_loss((m(b["x"]) + 1e-8).log(), b["y"])),
    ("probabilities as such", net(nn.Sigmoid()),
     lambda m, b: F.binary_cross_entropy(m(b["x"]), chosen(b))),
    ("sharpened", net(), lambda m, b: F.cross_entropy(
        F.normalize(m(b["x"]), dim=-1) * 16.0, b["y"])),
]  # fmt: skip


@pytest.mark.parametrize(("model", "loss_fn"), [row[1:] for row in FED], ids=[r[0] for r in FED])
def test_probabilities_and_scores_are_told(model, loss_fn, tmp_path):
    finding = found(tmp_path, model, loss_fn)["NS118"]
    assert finding.seen is not None
    assert "test_objective_inputs.py" in " ".join(finding.lines)


@pytest.mark.parametrize(("model", "loss_fn"), [r[1:] for r in MEANT], ids=[r[0] for r in MEANT])
def test_what_is_meant_is_left_in_peace(model, loss_fn, tmp_path):
    assert not {"NS118", "NS701"} & set(found(tmp_path, model, loss_fn))


def test_a_prior_that_a_fresh_head_answers_with_is_no_probability(tmp_path):
    """The last layer begins with weights of 0 and the classes' shares as its bias."""
    model = net()
    nn.init.zeros_(model[2].weight)
    model[2].bias.data.copy_(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    assert "NS118" not in found(tmp_path, model, cross_entropy)


def test_the_look_changes_nothing(tmp_path):
    """Twelve draws of dropout later the weights are those of a run without nanstop."""
    ends = []
    for watched in (False, True):
        model = net(nn.Dropout(0.5), nn.Softmax(-1))
        if watched:
            assert "NS118" in found(tmp_path, model, cross_entropy, steps=3)
        else:
            train(model, cross_entropy, steps=3)
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *ends))


def turns(*, is_fed_probabilities):
    """Train a generator whose loss is right, and in turn with it what judges and classes."""
    torch.manual_seed(0)
    classes = net(nn.Softmax(-1)) if is_fed_probabilities else net()
    made, judge = nn.Linear(4, 6), nn.Linear(6, 1)
    own = torch.optim.Adam(made.parameters(), 1e-3)
    theirs = torch.optim.Adam([*judge.parameters(), *classes.parameters()], 1e-3)
    for _ in range(4):
        x, y = torch.randn(16, 6), torch.randint(0, 4, (16,))
        own.zero_grad()
        F.softplus(-judge(made(torch.randn(16, 4)))).mean().backward()
        own.step()
        theirs.zero_grad()
        (F.softplus(-judge(x)).mean() + F.cross_entropy(classes(x), y)).backward()
        theirs.step()


def test_each_optimizer_that_takes_turns_has_its_objective_looked_at(tmp_path):
    right, wrong = (partial(turns, is_fed_probabilities=one) for one in (False, True))
    assert not findings_of(tmp_path / "right", right)
    assert findings_of(tmp_path / "wrong", wrong).keys() == {"NS118"}
