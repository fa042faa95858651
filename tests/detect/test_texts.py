"""Rows of a batch are known again as the texts that a tokenizer was given: those that end before
their text does are told, rows of classifiers, packed ones and shifted ones are not.
"""

import pytest
import torch

from nanstop.detect.first_rows import counted
from nanstop.detect.texts import TEXTS, Texts
from nanstop.hosts.model.view import PlainView
from nanstop.records import TextFacts

torch.set_num_threads(1)

TEXT = list(range(10, 30))


def found(row, *, num_cut=0, text=TEXT):
    texts = Texts()
    texts.add([(text, num_cut)], None)
    return texts.of(row)


@pytest.mark.parametrize(
    ("row", "num_cut"),
    [(TEXT[:8], 0), ([1, *TEXT[:8]], 0), (TEXT, 6), ([*TEXT, 2], 6)],
    ids=["sliced", "sliced behind a beginning", "by the tokenizer", "by it, and ended"],
)
def test_a_row_that_ends_before_its_text(row, num_cut):
    assert found(row, num_cut=num_cut).is_short


@pytest.mark.parametrize(
    ("row", "num_cut"),
    [(TEXT, 0), ([1, *TEXT, 2], 0), (TEXT[:-1], 0), ([*TEXT, *TEXT], 6), (TEXT[:19], 0)],
    ids=["whole", "with an end", "what predicts the others", "packed", "one less"],
)
def test_a_row_that_has_all_of_it(row, num_cut):
    assert not found(row, num_cut=num_cut).is_short


def test_another_text_is_not_known():
    assert found(list(range(40, 60))) is None
    assert found([10, 11]) is None  # two tokens are anybody's


def test_a_short_text_lacks_its_last_token_for_what_predicts():
    assert not found([10, 11, 12], text=[10, 11, 12, 13]).is_short


class Scores(torch.nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.table, self.head = torch.nn.Embedding(64, 8), torch.nn.Linear(8, outputs)


@pytest.mark.parametrize(("outputs", "num"), [(64, 4), (2, 0)], ids=["tokens", "classes"])
def test_what_predicts_no_tokens_may_read_a_part(outputs, num):
    texts = [[n, *TEXT[:12]] for n in range(4)]
    try:
        TEXTS.add([(ids, 0) for ids in texts], None)
        batch = {"input_ids": torch.tensor([ids[:6] for ids in texts])}
        data = counted(batch, PlainView(Scores(outputs)), TextFacts())
    finally:
        TEXTS.forget()
    assert data.num_shortened == num


@pytest.mark.parametrize(
    ("labels", "only"),
    [([-100, -100, -100, 2], 2), ([-100, -100, 9, 2], None), ([-100] * 4, None)],
    ids=["ends alone", "an answer and an end", "none"],
)
def test_labels_that_are_all_one_token(labels, only):
    batch = {"input_ids": torch.tensor([[5, 6, 9, 2]] * 8), "labels": torch.tensor([labels] * 8)}
    assert counted(batch, PlainView(Scores(64)), TextFacts()).only_label == only
    assert counted(batch, PlainView(Scores(2)), TextFacts()).only_label is None
