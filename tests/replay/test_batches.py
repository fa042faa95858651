"""What is known of a batch: ranges, and how much of it is supervised."""

import math
import warnings

import pytest
import torch

from nanstop.replay.batches import batch_facts, num_samples


@pytest.mark.parametrize("name", ["labels", "arg1", "target_ids", "completion_mask"])
def test_labels_are_known_by_what_they_ignore_and_not_by_their_name(name):
    (fact,) = batch_facts({name: torch.tensor([[-100, 3], [-100, -100]])}, 0)
    assert (fact.num_supervised, fact.num_rows, fact.num_rows_without_labels) == (1, 2, 1)
    (none,) = batch_facts({name: torch.tensor([[0, 1], [0, 0]])}, 0)
    assert none.num_supervised is None


def test_other_entries_supervise_nothing():
    facts = batch_facts({"arg0": torch.tensor([[1, 3]]), "x": torch.full((2, 2), -100.0)}, 0)
    assert [fact.num_supervised for fact in facts] == [None, None]


@pytest.mark.parametrize(
    ("rows", "row", "ratio"),
    [
        ([[1.0], [-64.0], [2.0], [3.0]], 1, 32.0),
        ([[1.0, math.nan], [4.0, math.inf], [2.0, 0.0], [2.0, 2.0]], 1, 2.0),
        ([[0.0], [5.0], [0.0]], 1, None),
        ([[1.0], [9.0]], None, None),
    ],
)
def test_the_sample_with_the_largest_values(rows, row, ratio):
    (fact,) = batch_facts({"x": torch.tensor(rows).half()}, 0)
    assert (fact.outlier_row, fact.outlier_ratio) == (row, ratio)


def test_ids_and_empty_entries_have_no_odd_sample():
    entries = {"ids": torch.arange(4)[:, None], "none": torch.zeros(4, 0), "one": torch.tensor(1.0)}
    assert [fact.outlier_row for fact in batch_facts(entries, 0)] == [None, None, None]


@pytest.mark.parametrize(
    ("values", "hides"),
    [
        ([0.0, -math.inf, 0.0], True),
        ([-math.inf] * 3, True),
        ([0.0, math.inf, 0.0], False),
        ([0.0, math.nan, -math.inf], False),
        ([0.5, -math.inf, 0.0], False),
        ([0.0, 0.0, 0.0], False),
    ],
)
@pytest.mark.parametrize("name", ["attention_mask", "pixels"])
def test_a_mask_is_known_by_its_values_and_not_by_its_name(name, values, hides):
    (fact,) = batch_facts({name: torch.tensor([values])}, 0)
    assert fact.hides is hides


def test_the_rows_that_are_not_finite():
    """Of pairs there may be half as many margins as there are texts."""
    margins = torch.tensor([1.0, 2.0, float("nan"), 1.0])
    (fact,) = batch_facts({"margin": margins}, 0)
    assert (fact.num_bad, fact.bad_rows) == (1, (2,))
    (fact,) = batch_facts({"x": torch.zeros(9, 2).log()}, 0)
    assert fact.bad_rows == tuple(range(8))
    (fact,) = batch_facts({"scale": torch.tensor(float("inf"))}, 0)
    assert fact.bad_rows == ()


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_entry_is_known_by_what_it_holds(layout):
    entries = torch.tensor([[0.0, math.nan, 2.0], [0.0, 0.0, -5.0]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a layout in beta state
        (fact,) = batch_facts({"adjacency": entries.to_sparse(layout=layout)}, 0)
    assert (fact.shape, fact.num_bad, fact.bad_rows) == ((2, 3), 1, ())
    assert (fact.minimum, fact.maximum, fact.num_supervised) == (-5.0, 2.0, None)
    assert num_samples({"rows": entries}) == 2
    assert num_samples({"rows": entries, "adjacency": entries.to_sparse(layout=layout)}) is None
