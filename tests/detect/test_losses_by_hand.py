"""Losses that are spelled by hand and fed with scores or probabilities are told by how they answer
to other numbers; those that take what they are given as it is meant are not.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fnstep import FnStep
from loop_scripts import findings_of
from nanstop.detect.early_steps import at_once

torch.set_num_threads(1)


def chosen(batch):
    return F.one_hot(batch["y"], 4).float()


def picked_by_gather(m, b):
    return -m(b["x"]).gather(1, b["y"][:, None]).mean()


def picked_by_index(m, b):
    return -m(b["x"])[torch.arange(8), b["y"]].sum() / 8


def advantages(m, b):
    """A policy's gradient, of scores that were never made log-probabilities."""
    return -(m(b["x"]).gather(1, b["y"][:, None])[:, 0] * (1.0 + b["x"][:, 0].abs())).mean()


def binary_by_hand(z, t):
    return (z.clamp(min=0) - z * t + torch.log1p(torch.exp(-z.abs()))).mean()


def binary_by_softplus(z, t):
    return (F.softplus(z) - t * z).sum(-1).mean()


def binary_by_logarithms(z, t):
    return -(t * F.logsigmoid(z) + (1.0 - t) * F.logsigmoid(-z)).mean()


def values_of_actions(m, b):
    """Q-learning far below its targets: each picked score is to rise, up to them."""
    return F.smooth_l1_loss(m(b["x"]).gather(1, b["y"][:, None])[:, 0], torch.full((8,), 500.0))


def conservative(m, b):
    q = m(b["x"])
    return (q.logsumexp(-1) - q.gather(1, b["y"][:, None])[:, 0]).mean()


def warm(m, b):
    """A cross entropy whose two halves have their own temperature, written twice."""
    z = m(b["x"])
    return ((z / 2.0).logsumexp(-1) - z.gather(1, b["y"][:, None])[:, 0] / 2.0).mean()


def critic(m, b):
    """A critic of several domains: real up, made down."""
    real, made = (m(x).gather(1, b["y"][:, None]) for x in (b["x"], b["x"].flip(0)))
    return made.mean() - real.mean()


def hinge(m, b):
    return F.relu(1.0 - m(b["x"]).gather(1, b["y"][:, None])).mean()


def margin(m, b):
    z = m(b["x"])
    return (z.amax(-1) - z.gather(1, b["y"][:, None])[:, 0]).mean()


def brier(m, b):
    p, t = m(b["x"]), chosen(b)
    return (p * p - 2.0 * p * t + t).mean()


def overlap(m, b):
    p, t = m(b["x"]), chosen(b)
    return 1.0 - 2.0 * (p * t).sum() / (p.sum() + t.sum())


def by_logarithms(m, b):
    p, t = m(b["x"]), chosen(b)
    return -(t * p.log() + (1.0 - t) * (1.0 - p).log()).mean()


def smooth_gate(m, b):
    """Softplus of something between 0 and 1 is an activation like another."""
    return (F.softplus(m(b["x"])) - 0.7 - 0.6 * chosen(b)).square().mean()


def ranked(m, b):
    p = m(b["x"])
    return F.softplus(p[:, 0] - p[:, 1]).mean()


def weighed_rows(m, b):
    """A share of each sample's loss, and a gate in front of it."""
    gate = m(b["x"])
    return (gate * chosen(b) * b["x"][:, :4].square() + 0.1 * gate.square()).mean()


def rows_of(loss, *last):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4), *last)
    batch = {"x": torch.randn(8, 6), "y": torch.randint(0, 4, (8,))}
    return at_once(FnStep(model, loss, [batch]))["objective"]


def smoothed(m, b, by=0.1):
    return F.cross_entropy(m(b["x"]), b["y"], label_smoothing=by)


def so_smooth_that_it_is_reached(m, b):
    return smoothed(m, b, 0.8)


def weighed_classes(m, b):
    logs = 1.0 / (1.0 + torch.exp(-m(b["x"])))
    return F.nll_loss(logs.log_softmax(-1), b["y"], weight=torch.arange(1.0, 5.0))


def of_relevances(m, b):
    """Rankings have a softmax of relevances between 0 and 1 on either side."""
    return F.cross_entropy(m(b["x"]), F.softmax(b["x"][:, :4].sigmoid(), -1))


def sharpened(m, b):
    return F.cross_entropy(m(b["x"]) * 16.0, b["y"])


def bounded_policy(m, b):
    logs = m(b["x"]).log_softmax(-1).gather(1, b["y"][:, None])[:, 0]
    return -(logs * b["x"][:, 0]).mean()


def beside_its_own_loss(m, b):
    p = m(b["x"])
    return F.binary_cross_entropy(p, chosen(b)) + 0.1 * F.cross_entropy(p, b["y"])


def cosines(m, b):
    """Of features that are positive: matching networks have them so."""
    centres = F.normalize(b["x"][:4, :4].abs(), dim=-1)
    return F.cross_entropy(F.normalize(m(b["x"]), dim=-1) @ centres.T, b["y"])


def soft_margin(m, b):
    return F.soft_margin_loss(m(b["x"]), chosen(b))


def hinge_of_targets(m, b):
    return F.relu(1.0 - chosen(b) * m(b["x"])).mean() + 1e-3 * m[0].weight.square().sum()


def pairs_by_sigmoid(m, b):
    """Which of two halves of a batch belong together, as SigLIP has it, of -1 and 1."""
    z = F.normalize(m(b["x"]), dim=-1)
    return -F.logsigmoid(torch.eye(8) * (10.0 * (z @ z.flip(0).T) - 10.0)).sum(-1).mean()


def hinge_of_signs(m, b):
    return F.relu(1.0 - (2.0 * chosen(b) - 1.0) * m(b["x"])).mean()


def masked_margins(m, b):
    return (chosen(b) * F.relu(1.0 - m(b["x"]))).mean()


def masked_scores(m, b):
    """Of each row the similarity to what belongs to it."""
    return F.relu(1.0 - (chosen(b) * m(b["x"])).sum(-1)).mean()


def masked_features(m, b):
    return F.relu(chosen(b) * m(b["x"]) - 1.0).square().mean() - m(b["x"]).tanh().mean()


def signed(m, b):
    return F.soft_margin_loss(m(b["x"]), 2.0 * chosen(b) - 1.0)


def pairs_left_out(m, b):
    """Differences of scores that are to be above 0, some of them left out by a mask."""
    return F.soft_margin_loss(m(b["x"]) - m(b["x"].flip(0)), chosen(b))


def held_down(m, b):
    return soft_margin(m, b) + 0.1 * m(b["x"]).square().mean()


def binary_logits(m, b):
    return binary_by_softplus(m(b["x"]), chosen(b))


def negatives_apart(m, b):
    return soft_margin(m, b) + F.soft_margin_loss(m(-b["x"]), -torch.ones(8, 4))


def of_logits(loss):
    """Return a binary loss of two tensors as one of a model and a batch."""
    return lambda m, b: loss(m(b["x"]), chosen(b))


BINARY = [binary_by_hand, binary_by_softplus, binary_by_logarithms]


@pytest.mark.parametrize("loss", [picked_by_gather, picked_by_index, advantages])
def test_picked_scores_without_a_logarithm_are_told(loss):
    (row,) = rows_of(loss)
    assert row.given == "scores"
    assert row.line.startswith("test_losses_by_hand.py:")


@pytest.mark.parametrize("loss", BINARY)
def test_probabilities_in_the_place_of_logits_are_told(loss):
    (row,) = rows_of(of_logits(loss), nn.Sigmoid())
    assert (row.given, row.op) == ("between_0_and_1", "aten.binary_cross_entropy_with_logits")


@pytest.mark.parametrize(("loss", "last"), [(smoothed, (nn.Sigmoid(),)), (weighed_classes, ())])
def test_a_cross_entropy_of_scores_between_0_and_1_is_told(loss, last):
    (row,) = rows_of(loss, *last)
    assert (row.given, row.op) == ("between_0_and_1", "aten._log_softmax.default")
    assert row.width == 4


@pytest.mark.parametrize(
    "loss",
    [
        *(so_smooth_that_it_is_reached, of_relevances, sharpened, bounded_policy),
        *(beside_its_own_loss, cosines),
    ],
)
def test_bounds_that_the_loss_can_do_with_are_left_in_peace(loss):
    assert rows_of(loss, nn.Sigmoid()) == ()


@pytest.mark.parametrize(
    ("loss", "op"),
    [
        (soft_margin, "aten.soft_margin_loss.default"),
        *((hinge_of_targets, "aten.mul.Tensor"), (pairs_by_sigmoid, "aten.mul.Tensor")),
    ],
)
def test_targets_of_0_and_1_where_a_margin_wants_signs_are_told(loss, op):
    (row,) = rows_of(loss)
    assert (row.given, row.op) == ("unsigned", op)
    assert row.line.startswith("test_losses_by_hand.py:")


@pytest.mark.parametrize(
    "loss",
    [
        *(signed, pairs_left_out, held_down, negatives_apart, hinge_of_signs, masked_margins),
        *(masked_scores, masked_features, binary_logits),
    ],
)
def test_targets_of_0_that_are_meant_are_left_in_peace(loss):
    assert rows_of(loss) == ()


class Barely(nn.Module):
    """Scores to which what is trained adds next to nothing, whatever its weights are."""

    def forward(self, x):
        return 0.5 + 0.05 * x.tanh()


@pytest.mark.parametrize("loss", BINARY)
def test_scores_that_weights_hardly_move_are_left_in_peace(loss):
    assert rows_of(of_logits(loss), Barely()) == ()


@pytest.mark.parametrize("loss", BINARY)
def test_logits_are_left_in_peace(loss):
    assert rows_of(of_logits(loss)) == ()


@pytest.mark.parametrize("loss", [values_of_actions, conservative, warm, critic, hinge, margin])
def test_scores_that_are_bounded_otherwise_are_left_in_peace(loss):
    assert rows_of(loss) == ()


@pytest.mark.parametrize("loss", [brier, overlap, by_logarithms, smooth_gate, ranked, weighed_rows])
def test_probabilities_that_are_meant_are_left_in_peace(loss):
    assert rows_of(loss, nn.Sigmoid()) == ()


def test_a_generator_may_raise_the_scores_of_its_critic_without_end(tmp_path):
    """The critic's weights are another optimizer's: only what they judge is trained."""
    torch.manual_seed(0)
    maker, judge = nn.Linear(3, 6), nn.Linear(6, 4)

    def train():
        optimizers = [torch.optim.Adam(part.parameters()) for part in (maker, judge)]
        for step in range(4):
            x, y = maker(torch.randn(8, 3)), torch.randint(0, 4, (8, 1))
            real, made = judge(torch.randn(8, 6)).gather(1, y), judge(x).gather(1, y)
            loss = -made.mean() if step % 2 else F.relu(1 - real).mean() + F.relu(1 + made).mean()
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            optimizers[(step + 1) % 2].step()

    assert "NS118" not in findings_of(tmp_path, train)
