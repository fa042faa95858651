"""``%load_ext nanstop`` in a real shell of IPython."""

import re
from html import unescape

import pytest

pytest.importorskip("IPython", reason="pip install ipython")
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from nanstop.hosts.script import autowatch
from report.specimens import FINDING, REPORT

LOOP = """
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
for step in range(12):
    rows = torch.randn(8, 8)
    if step == BAD:
        rows[3] = float("nan")
    model(rows).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def shell(tmp_path, monkeypatch):
    monkeypatch.setenv("NANSTOP_DIR", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    one = InteractiveShell.instance()
    one.history_manager.enabled = False
    one.run_line_magic("load_ext", "nanstop")
    yield one
    one.run_line_magic("unload_ext", "nanstop")
    one.history_manager.end_session()
    one.reset()
    InteractiveShell.clear_instance()


def shown(outputs):
    """The pages that a cell has shown."""
    frames = (one.data.get("text/html", "") for one in outputs)
    return [unescape(re.search(r'srcdoc="([^"]*)"', one)[1]) for one in frames if "srcdoc" in one]


def test_records_are_pages(shell):
    formatter = shell.display_formatter.formatters["text/html"]
    assert "error[NS201]" in unescape(formatter(REPORT))
    assert f"[{FINDING.code}]" in unescape(formatter(FINDING))
    shell.run_line_magic("unload_ext", "nanstop")
    assert formatter(REPORT) is None
    shell.run_line_magic("load_ext", "nanstop")


def test_a_cell_that_fails_shows_its_incident(shell):
    with capture_output() as caught:
        shell.run_cell(f"%%nanstop\nBAD = 5\n{LOOP}")
    *_, last = shown(caught.outputs)
    assert "error[NS501]" in last
    assert "12 steps" in last
    assert "ended well" in last
    assert shell.user_ns["model"][0].weight.isfinite().all()
    assert autowatch.opener() is None


def test_a_healthy_cell_shows_its_numbers_and_trains_as_ever(shell):
    with capture_output() as caught:
        shell.run_cell(f"%%nanstop\nBAD = None\n{LOOP}")
    watched = shell.user_ns["model"][0].weight.detach().clone()
    *_, last = shown(caught.outputs)
    assert "no incident" in last
    assert "<svg" in last
    shell.run_cell(f"BAD = None\n{LOOP}")
    assert (shell.user_ns["model"][0].weight == watched).all()


def test_the_word_of_a_policy_is_taken(shell):
    with capture_output() as caught:
        shell.run_cell(f"%%nanstop observe\nBAD = 5\n{LOOP}")
    assert "error[NS501]" in shown(caught.outputs)[-1]
    assert not shell.user_ns["model"][0].weight.isfinite().all()
