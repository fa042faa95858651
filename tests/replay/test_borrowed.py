"""What a run has written to is put back."""

import pytest
import torch

from nanstop.replay.borrowed import Borrowed


def flipped(mask):
    mask ^= True


def masked(mask):
    mask &= torch.tensor([False, False, True])


WRITES = {
    "by an operator": flipped,
    "by another operator": masked,
    "by name": lambda mask: mask.fill_(True),
    "by index": lambda mask: mask.__setitem__(0, False),
    "through a view": lambda mask: mask[1:].logical_not_(),
    "as out": lambda mask: torch.logical_not(mask, out=mask),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_was_there_before_is_put_back(write):
    mask = torch.tensor([True, False, True])
    before, version = mask.clone(), mask._version
    with Borrowed():
        write(mask)
        assert not torch.equal(mask, before)
    assert torch.equal(mask, before)
    assert mask._version == version


def test_what_a_run_may_write_stays():
    own = torch.tensor([True, False])
    with Borrowed([own]):
        flipped(own)
    assert own.tolist() == [False, True]
