import io
import os
import pty
import re
import subprocess
import sys
import textwrap

import pytest
from tqdm import tqdm

from nanstop.report.text.progress import Stage, progress_line, stage_lines
from nanstop.session.telling.terminal_line import TerminalLine


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Terminal(io.TextIOWrapper):
    """A stream that says that it is a terminal, and keeps what is written to it."""

    def __init__(self):
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)

    def isatty(self):
        return True

    def written(self):
        return self.buffer.getvalue().decode()

    def shown(self):
        """Return the line on which the cursor stands, as a terminal shows it."""
        line = []
        for text in self.written().split("\n")[-1].split("\r"):
            line[: len(text)] = text
        return "".join(line).rstrip()


def opened(monkeypatch):
    """Return a terminal that is the standard error stream of this test."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)  # pytest puts its own there before each test
    return stream


def test_a_long_investigation_is_spoken_of_and_leaves_nothing_behind(monkeypatch):
    terminal, clock = opened(monkeypatch), Clock()
    line = TerminalLine(clock=clock)
    line.stage(Stage(name="replay", step=7))
    assert terminal.written() == ""  # it may be over at once
    clock.now = 2.0
    line.stage(Stage(name="proof", step=7, trials=40, seconds_left=58.0))
    assert terminal.shown() == "nanstop: Step 7: proving a cure; at most 58 s left"
    line.stage(Stage(name="", step=7))
    assert terminal.shown() == ""


def test_a_replay_that_puts_another_stream_in_place_does_not_take_the_line_away(monkeypatch):
    terminal, clock = opened(monkeypatch), Clock()
    line = TerminalLine(clock=clock)
    line.stage(Stage(name="replay", step=7))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    clock.now = 2.0
    line.stage(Stage(name="proof", step=7))
    assert terminal.shown() == "nanstop: Step 7: proving a cure"


@pytest.mark.parametrize("stream", [io.StringIO(), None])
def test_where_there_is_no_terminal_nothing_is_shown(monkeypatch, stream):
    clock = Clock()
    line = TerminalLine(clock=clock)
    monkeypatch.setattr(sys, "stderr", stream)
    line.stage(Stage(name="replay", step=7))
    clock.now = 9.0
    line.stage(Stage(name="proof", step=7))
    line.stepped(3, {})
    line.clear()
    assert stream is None or stream.getvalue() == ""


def test_numbers_stand_below_bars_only_and_go_with_them(monkeypatch):
    terminal, line = opened(monkeypatch), TerminalLine()
    line.stepped(3, {"headroom": 5.25})
    assert terminal.written() == ""
    with tqdm(total=10, file=terminal) as bar:
        line.stepped(4, {"headroom": 5.25, "skipped": 2.0})
        said = "nanstop: 4 steps watched, values can double 5.25 times, 2 updates skipped"
        assert said in terminal.written()
        bar.update(10)
    assert "close" not in vars(bar)
    terminal.write("done")
    assert terminal.shown() == "done"


def test_what_is_said_of_a_search():
    stage = Stage(name="proof", step=7, tried=2, trials=40, best="island(head)", seconds_left=3.2)
    assert list(stage_lines(stage)) == [
        "Step 7: proving a cure",
        "2 trials of at most 40; passes so far: island(head)",
        "at most 3 s left",
    ]
    assert progress_line(1, {"scale": 65536.0}) == "1 step watched, loss scale 65536"


@pytest.mark.slow
def test_a_report_does_not_begin_at_the_end_of_a_bar(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import torch
        from tqdm import tqdm

        model = torch.nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in tqdm(range(6)):
            count = torch.tensor(0.0 if step == 3 else 16.0)
            loss = model(torch.ones(16, 4)).pow(2).sum() / count
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """)
    )
    main, side = pty.openpty()
    command = [sys.executable, "-m", "nanstop", "run", "--out", str(tmp_path / "out"), str(script)]
    with subprocess.Popen(command, stderr=side, stdout=subprocess.DEVNULL) as process:
        os.close(side)
        read = b""
        try:
            while part := os.read(main, 65536):
                read += part
        except OSError:  # the other end is closed: Linux says so by an error
            pass
    os.close(main)
    assert process.returncode == 0
    before, found, _ = read.decode().partition("error[NS204]")
    assert found
    assert re.sub(r"\x1b\[[\d;]*m", "", before).rpartition("\r")[2] == ""
