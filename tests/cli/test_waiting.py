"""What a command says at the foot of a terminal while its job runs in another process."""

import io
import os
import sys
from contextlib import contextmanager

import pytest

from nanstop.cli.terminal import waiting
from nanstop.process.inject.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@contextmanager
def followed(part):
    """Yield what follows a job on a terminal of 70 columns, and what stands at its foot after each
    change of it.
    """
    shown = []
    with pytest.MonkeyPatch.context() as patches:
        terminal = Terminal()
        patches.setattr(sys, "stderr", terminal)
        patches.setattr("shutil.get_terminal_size", lambda: os.terminal_size((70, 24)))
        try:
            with waiting(part) as follow:
                yield follow, shown
        finally:
            shown += terminal.getvalue().split("\r\x1b[K")[1:]


def test_the_part_that_is_worked_on_and_the_time_left(monkeypatch):
    times = iter([0.0, 10.0, 12.0, 16.0])
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    with followed("step") as (follow, shown):
        follow(Progress(), 3.4)
        follow(Progress(done=2, total=10), 10.0)
        follow(Progress(done=3, total=10), 12.0)
        follow(Progress(done=5, total=10), 16.0)
    assert shown == [
        "nanstop: the script sets up its training, 3 s so far",
        "nanstop: working on step 3 of 10",
        "nanstop: working on step 4 of 10, about 14 s left",
        "nanstop: working on step 6 of 10, about 10 s left",
        "",
    ]


def test_a_job_that_knows_its_end_and_not_its_parts():
    with followed("trial") as (follow, shown):
        follow(Progress(done=4, seconds_left=31.2), 8.0)
    assert shown == ["nanstop: 4 trials so far, at most 31 s left", ""]


def test_the_line_is_never_longer_than_the_terminal_and_gone_after_an_error():
    def run():
        with followed("word " * 30) as (follow, shown):
            seen.append(shown)
            follow(Progress(done=1, total=2), 1.0)
            raise KeyError("mine")

    seen = []
    with pytest.raises(KeyError, match="mine"):
        run()
    shown = seen[0]
    *lines, last = shown
    assert max(map(len, lines)) < 70
    assert last == ""


def test_nothing_is_shown_where_nobody_looks(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with waiting("step") as follow:
        assert follow is None
