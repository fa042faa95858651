"""What a loader does for a batch: its first calls are recorded, the others passed on."""

import torch

from nanstop.hosts.tape.given.fetch import MOST_CALLS
from nanstop.hosts.tape.tape import Tape


def fetched(make):
    """A tape under which ``make`` was called as a loader calls its data set."""
    tape = Tape("cpu", lambda _: None)
    assert tape.start()
    try:
        with tape.fetch:
            made = make()
    finally:
        tape.stop()
    return tape, made


def test_the_first_calls_of_a_fetch_are_recorded():
    tape, made = fetched(lambda: [torch.ones(2) * number for number in range(5)])
    assert all(tape.slot(one) is not None for one in made)


def test_a_fetch_of_many_calls_is_not_recorded_to_its_end():
    rows = torch.ones(2)
    tape, made = fetched(lambda: [rows * number for number in range(4 * MOST_CALLS)])
    assert tape.slot(made[0]) is not None
    assert tape.slot(made[-1]) is None
    assert len(tape.calls) == MOST_CALLS


def test_what_is_written_to_late_in_a_fetch_is_taken_as_it_is_then():
    rows = torch.ones(2)

    def make():
        first = rows * 2
        for _ in range(2 * MOST_CALLS):
            rows + 1
        return first.add_(1)

    tape, made = fetched(make)
    assert tape.slot(made) is None


def test_what_comes_after_a_fetch_is_recorded():
    rows = torch.ones(2)
    tape, _ = fetched(lambda: [rows + 1 for _ in range(2 * MOST_CALLS)])
    assert tape.start()
    later = rows * 3
    tape.stop()
    assert tape.slot(later) is not None
