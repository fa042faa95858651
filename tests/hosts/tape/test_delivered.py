"""What a loader has given, with bad rows or without, is judged once."""

import torch

from nanstop.hosts.tape.needed.calls import that_came_bad
from nanstop.hosts.tape.tape_calls import Constant, TapedCall


def given(values, played):
    """What a loader gave in slot 1, made by one call of something."""

    def made(_):
        played.append(values)
        return torch.tensor(values)

    source = Constant(torch.ones(3), 0, None)
    call = TapedCall(made, (source,), {}, ("cpu", False, torch.float32), False, None, None, 1, 1)
    return ({1: Constant(torch.tensor(values), 0, 1)}, {}), [call]


def test_rows_that_a_data_set_has_made_bad_of_what_is_finite_did_not_come_bad():
    played = []
    delivered, early = given([1.0, float("nan"), 3.0], played)
    for _ in range(3):
        assert that_came_bad(delivered, early) == {}
    assert len(played) == 1
    assert list(that_came_bad(delivered, [])) == [1]


def test_what_is_finite_did_not_come_bad():
    played = []
    delivered, early = given([1.0, 2.0, 3.0], played)
    assert that_came_bad(delivered, early) == {}
    assert played == []
