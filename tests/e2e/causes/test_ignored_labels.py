"""Labels and masks that leave nothing of a loss, however they are spelled."""

import pytest
import torch
from torch.nn import functional as F

from e2e.one_step import ROWS, WIDTH, said, x


def test_labels_that_are_all_ignored_in_any_spelling():
    labels = torch.full((ROWS,), -100)
    found = said(lambda net, b: F.cross_entropy(net(b["v"]), b["labels"]), v=x(), labels=labels)
    assert (found[0].code, found[0].confidence) == ("NS503", "certain")

    def by_hand(net, batch):
        kept = batch["labels"] != -100
        scores = net(batch["v"]).log_softmax(-1).gather(1, batch["labels"].clamp(min=0)[:, None])
        return -(scores[:, 0] * kept).sum() / kept.sum()

    found = said(by_hand, v=x(), labels=labels)
    assert found[0].code in ("NS503", "NS205")
    assert found[0].confidence == "certain"


@pytest.mark.parametrize("ignored", [0, 1, 255])
def test_labels_that_a_loss_leaves_out_by_a_number_of_its_own(ignored):
    labels = torch.full((ROWS,), ignored)

    def flat(net, batch):
        return F.cross_entropy(net(batch["v"]), batch["labels"], ignore_index=ignored)

    def map_of_pixels(net, batch):
        scores, kept = net(batch["v"]).T[None, :, None], batch["labels"][None, None]
        return F.cross_entropy(scores, kept, ignore_index=ignored)

    def weighted(net, batch):
        ones, scores = torch.ones(WIDTH), net(batch["v"])
        return F.cross_entropy(scores, batch["labels"], weight=ones, ignore_index=ignored)

    for spelled in (flat, map_of_pixels, weighted):
        found = said(spelled, v=x(), labels=labels)
        assert (found[0].code, found[0].confidence) == ("NS503", "certain")
        assert "leaves out every entry of `batch[labels]`" in found[0].cause
        assert f"], {ignored}: its mean" in found[0].cause


def test_classes_that_weigh_nothing_are_not_left_out():
    def loss(net, batch):
        none = torch.zeros(WIDTH)
        return F.cross_entropy(net(batch["v"]), batch["labels"], weight=none, ignore_index=1)

    assert said(loss, v=x(), labels=torch.zeros(ROWS, dtype=torch.long))[0].code == "NS205"


def test_a_mask_that_keeps_no_token_whatever_it_is_called():
    keep, ids = torch.zeros(ROWS, dtype=torch.long), torch.arange(ROWS)

    def by_hand(net, batch):
        losses = F.cross_entropy(net(batch["v"]), batch["w"], reduction="none")
        return (losses * batch["q"]).sum() / batch["q"].sum()

    found = said(by_hand, v=x(), w=ids, q=keep, type_ids=keep)
    assert (found[0].code, found[0].confidence, found[0].where) == ("NS503", "certain", "q")

    def picked(net, batch):
        chosen = batch["q"].bool()
        return F.cross_entropy(net(batch["v"])[chosen], batch["w"][chosen])

    found = said(picked, v=x(), w=ids, q=keep)
    assert (found[0].code, found[0].confidence) == ("NS503", "certain")

    def pooled(net, batch):
        return (net(batch["v"]) * batch["q"][:, None]).sum() / batch["q"].sum()

    assert said(pooled, v=x(), q=keep)[0].code == "NS205"


def test_labels_without_a_part_in_the_failure_are_not_blamed():
    def loss(net, batch):
        counted = (batch["labels"] != -100).sum()
        return net(batch["v"] / (batch["v"] - batch["v"]).norm()).sum() + counted

    found = said(loss, v=x(), labels=torch.full((ROWS,), -100))
    assert "NS503" not in [one.code for one in found if one.confidence == "certain"]
    assert found[0].code == "NS206"
