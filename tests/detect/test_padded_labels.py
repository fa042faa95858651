"""Labels that are padding and count are told; those that are ignored, masked later or words are
not.
"""

import pytest
import torch
from torch.nn import functional as F

import tiny
from loop_scripts import findings_of
from nanstop.detect.objective import padded_labels

torch.set_num_threads(1)
PAD, END = 0, 2


def texts(*, end=END, pad=PAD, left=False, longest=9):
    draw = torch.Generator().manual_seed(0)
    ids = torch.full((6, 12), pad)
    for row, length in enumerate((4, 6, 5, 7, 3, longest)):
        text = [*torch.randint(3, 60, (length - 1,), generator=draw).tolist(), end]
        ids[row, (12 - length if left else 0) : (12 if left else length)] = torch.tensor(text)
    return ids, (ids != PAD).long()


def as_they_are(model, ids, keep):
    return model(input_ids=ids, attention_mask=keep, labels=ids).loss


def by_hand(model, ids, keep):
    logits = model(input_ids=ids, attention_mask=keep).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:])


def ignored(model, ids, keep):
    labels = ids.masked_fill(keep == 0, -100)
    return model(input_ids=ids, attention_mask=keep, labels=labels).loss


def masked_later(model, ids, keep):
    logits = model(input_ids=ids, attention_mask=keep).logits[:, :-1]
    each = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return (each * keep[:, 1:]).sum() / keep[:, 1:].sum()


def found(folder, loss, *, fresh=False, **options):
    ids, keep = texts(**options)

    def train():
        model = tiny.llama(pad_token_id=PAD)
        if fresh:
            torch.nn.init.zeros_(model.lm_head.weight)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(4):
            optimizer.zero_grad()
            loss(model, ids, keep).backward()
            optimizer.step()

    return findings_of(folder, train).get("NS118")


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (as_they_are, {}),
        (as_they_are, {"fresh": True}),
        (by_hand, {"left": True}),
        (by_hand, {"end": PAD}),
    ],
)
def test_labels_of_padding(tmp_path, loss, options):
    finding = found(tmp_path, loss, **options)
    assert finding.title == "padding is trained on"
    assert finding.confidence == "likely"


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("loss", [ignored, masked_later])
def test_labels_that_do_not_count(tmp_path, loss, fresh):
    assert found(tmp_path, loss, fresh=fresh) is None


def test_words_at_the_end(tmp_path):
    assert found(tmp_path, as_they_are, pad=7) is None


def test_labels_without_padding_cost_no_run_under_the_recorder(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(padded_labels, "first_ops", lambda step: asked.append(step) or ())
    assert found(tmp_path, ignored) is None
    assert asked == []
