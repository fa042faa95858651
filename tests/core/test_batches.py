"""What is known of a batch: ranges, and how much of it is supervised."""

import pytest
import torch

from nanstop.core.batches import batch_facts


@pytest.mark.parametrize(
    ("name", "num_supervised"), [("labels", 1), ("arg1", 1), ("loss2", 1), ("input_ids", None)]
)
def test_labels_are_known_by_their_name_or_by_what_they_ignore(name, num_supervised):
    (fact,) = batch_facts({name: torch.tensor([[-100, 3], [-100, -100]])}, 0)
    assert fact.num_supervised == num_supervised
    if num_supervised is not None:
        assert (fact.num_rows, fact.num_rows_without_labels) == (2, 1)


def test_other_entries_supervise_nothing():
    facts = batch_facts({"arg0": torch.tensor([[1, 3]]), "x": torch.full((2, 2), -100.0)}, 0)
    assert [fact.num_supervised for fact in facts] == [None, None]
