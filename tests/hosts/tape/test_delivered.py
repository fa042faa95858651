"""What a loader has given, with bad rows or without, is judged once."""

import torch

from nanstop.hosts.tape.needed_calls import Delivered
from nanstop.hosts.tape.tape_calls import Constant, TapedCall


def given(values, played):
    """What a loader gave in slot 1, made by one call of something."""

    def made(_):
        played.append(values)
        return torch.tensor(values)

    source = Constant(torch.ones(3), 0, None)
    call = TapedCall(made, (source,), {}, ("cpu", False, torch.float32), False, None, None, 1, 1)
    delivered = Delivered()
    delivered.note(1, torch.tensor(values))
    return delivered, [call]


def test_rows_that_a_data_set_has_made_bad_of_what_is_finite_did_not_come_bad():
    played = []
    delivered, early = given([1.0, float("nan"), 3.0], played)
    for _ in range(3):
        assert delivered.that_came_bad(early) == {}
    assert len(played) == 1
    assert list(delivered.that_came_bad([])) == [1]


def test_what_is_finite_did_not_come_bad():
    played = []
    delivered, early = given([1.0, 2.0, 3.0], played)
    assert delivered.that_came_bad(early) == {}
    assert played == []
