"""What tensors are called."""

import pytest

from nanstop.records.values import entry_of


@pytest.mark.parametrize(
    ("name", "said"),
    [("batch[x]", "x"), ("batch[x[0]]", "x[0]"), ("rows[0][1]", "rows[0][1]"), ("scale", "scale")],
)
def test_an_entry_of_the_batch_is_called_as_it_is_there(name, said):
    assert entry_of(name) == said
