"""Targets that an objective cannot count are told: of a binary cross entropy beyond 0 and 1, of a
CTC loss its blank.
"""

import pytest
import torch
from torch.nn import functional as F

from loop_scripts import findings_of

torch.set_num_threads(1)
TARGETS = torch.tensor([[0.0, 1.0, -100.0], [1.0, 0.0, 1.0], [0.0, -100.0, 1.0], [1.0, 1.0, 0.0]])
KNOWN = (TARGETS >= 0.0).float()


def plain(scores, targets):
    return F.binary_cross_entropy_with_logits(scores, targets)


def weighed(scores, targets):
    weight = torch.tensor([1.0, 2.0, 1.0])
    return F.binary_cross_entropy_with_logits(scores, targets, pos_weight=weight)


def masked_before(scores, targets):
    return F.binary_cross_entropy_with_logits(scores, targets, weight=KNOWN)


def masked_later(scores, targets):
    each = F.binary_cross_entropy_with_logits(scores, targets, reduction="none")
    return (each * KNOWN).sum() / KNOWN.sum()


def chosen(scores, targets):
    kept = targets >= 0.0
    return F.binary_cross_entropy_with_logits(scores[kept], targets[kept])


def found(folder, loss, targets, shape=(4, 5)):
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(*shape, generator=draw)

    def train():
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(4):
            optimizer.zero_grad()
            loss(model(inputs), targets).backward()
            optimizer.step()

    return findings_of(folder, train).get("NS118")


@pytest.mark.parametrize("loss", [plain, weighed])
def test_targets_that_are_no_probabilities(tmp_path, loss):
    finding = found(tmp_path, loss, TARGETS)
    assert finding.title == "a binary cross entropy is given targets beyond 0 and 1"
    assert finding.cause.startswith("a target is -100:")
    assert finding.confidence == "certain"
    assert finding.confirmed == "with others in their place the loss is another one"
    assert any("return F.binary_cross_entropy" in line for line in finding.lines)


def test_ids_of_classes_are_no_targets_of_a_binary_cross_entropy(tmp_path):
    ids = torch.tensor([[0.0, 2.0, 1.0]] * 4)
    assert found(tmp_path, plain, ids).cause.startswith("a target is 2:")


@pytest.mark.parametrize("loss", [masked_before, masked_later, chosen])
def test_targets_that_do_not_count(tmp_path, loss):
    assert found(tmp_path, loss, TARGETS) is None


@pytest.mark.parametrize("targets", [KNOWN, 0.9 * KNOWN + 0.05, 1.2 * KNOWN, 0.3 - 0.5 * KNOWN])
def test_targets_that_are_smoothed(tmp_path, targets):
    """Noise around labels, a little beyond them, is a known trick for discriminators."""
    assert found(tmp_path, plain, targets) is None


TEXTS = torch.tensor([[1, 2, 1, 0], [2, 0, 0, 0]])


def spelled(lengths, blank=0):
    """Alignments of two texts, filled up with 0, that have these ``lengths``."""

    def loss(scores, targets):
        steps = scores.log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(steps, targets, torch.tensor([9, 9]), torch.tensor(lengths), blank=blank)

    return loss


def test_padding_that_a_ctc_loss_is_asked_for(tmp_path):
    finding = found(tmp_path, spelled([4, 4]), TEXTS, (2, 9, 5))
    assert finding.title == "a CTC loss is asked for its blank"
    assert finding.cause.endswith("spells nothing: 4")
    assert finding.confidence == "certain"
    assert any("return F.ctc_loss" in line for line in finding.lines)


@pytest.mark.parametrize(
    ("lengths", "blank", "texts"),
    [
        ([3, 1], 0, TEXTS),
        ([3, 1], 0, torch.tensor([1, 2, 1, 2])),
        ([4, 4], 2, TEXTS.clamp(max=1)),
    ],
    ids=["lengths", "one after the other", "another blank"],
)
def test_texts_without_a_blank(tmp_path, lengths, blank, texts):
    assert found(tmp_path, spelled(lengths, blank), texts, (2, 9, 5)) is None


ALIKE = torch.arange(40) % 2


def cosine(z, signs):
    return F.cosine_embedding_loss(z, z.roll(1, 0), signs, margin=0.2)


def distance(z, signs):
    return F.hinge_embedding_loss((z - z.roll(1, 0)).norm(dim=-1), signs)


def written_out(z, signs):
    near = F.cosine_similarity(z, z.roll(1, 0))
    apart = torch.where(signs == -1, near.clamp(min=0.2), 0.0)
    return (torch.where(signs == 1, 1.0 - near, 0.0) + apart).mean()


def three_ways(z, signs):
    near = F.cosine_similarity(z, z.roll(1, 0))
    return written_out(z, signs) + torch.where(signs == 0, near.square(), 0.0).mean()


def counted_alone(z, signs):
    return z.square().mean() + 0.0 * ((signs == 1).sum() + (signs == -1).sum())


@pytest.mark.parametrize("loss", [cosine, distance, written_out])
def test_targets_of_0_and_1_that_are_asked_for_minus_1(tmp_path, loss):
    finding = found(tmp_path, loss, ALIKE, (40, 5))
    assert finding.title == "targets are 0 and 1 where -1 and 1 are looked for"
    assert finding.confidence == "likely"
    assert any(line.startswith("test_targets.py:") for line in finding.lines)


@pytest.mark.parametrize("loss", [cosine, distance, written_out])
def test_targets_of_minus_1_and_1_are_left_in_peace(tmp_path, loss):
    assert found(tmp_path, loss, 2 * ALIKE - 1, (40, 5)) is None
    assert found(tmp_path, loss, (torch.arange(40) % 3) - 1, (40, 5)) is None


@pytest.mark.parametrize("loss", [three_ways, counted_alone])
def test_targets_of_0_that_are_asked_for_are_left_in_peace(tmp_path, loss):
    assert found(tmp_path, loss, ALIKE, (40, 5)) is None
