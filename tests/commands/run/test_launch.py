"""What `nanstop run` does after its command has ended."""

import os
import signal
import sys

from nanstop.commands.run import launch as run
from nanstop.decide.policy import Policy
from nanstop.store.incidents import load_report, load_summary


def test_all_is_written_though_it_is_asked_to_end(tmp_path, monkeypatch):
    """As a launcher of ranks asks all of them when one has failed."""
    written, heard = run._announce, []

    def announce(*given):
        os.kill(os.getpid(), signal.SIGTERM)
        written(*given)

    monkeypatch.setattr(run, "_announce", announce)
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        dies = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
        assert run.launch(dies, policy=Policy(), out=tmp_path) == 137
        os.kill(os.getpid(), signal.SIGTERM)  # which is the caller's again
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]
    assert load_report(tmp_path / "0000").diagnoses[0].code == "NS601"
    assert load_summary(tmp_path / "summary.json").exit == 137
