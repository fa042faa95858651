"""``nanstop bisect`` as a user types it:
a loop that turns to NaN under two settings together, and bad input.
"""

import json
import subprocess
import sys

import pytest

LOOP = """
import sys, time
import torch
import yaml
from torch import nn

config = yaml.safe_load(open(sys.argv[1]))
torch.manual_seed(0)
torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(net.parameters(), config["lr"])
for step in range(4):
    rows = torch.randn(8, 4)
    if config["scale"] == "bad" and config.get("warm"):
        rows = rows / (rows - rows)
    optimizer.zero_grad()
    net(rows).square().mean().backward()
    optimizer.step()
    if step and config["scale"] == "bad" and config.get("warm") and config["lr"] < 0.05:
        time.sleep(600)
"""
BAD = "lr: 0.1\nscale: bad\nwarm: true\nclip: 1.0\n"
GOOD = "lr: 0.01\nscale: ok\nclip: 0.5\n"


@pytest.fixture
def bisect(tmp_path):
    """Run the command in a folder of its own: (exit code, standard output, standard error)."""
    (tmp_path / "bad.yaml").write_text(BAD)
    (tmp_path / "good.yaml").write_text(GOOD)
    (tmp_path / "train.py").write_text(LOOP)

    def run(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "nanstop", "bisect", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.mark.slow
def test_a_loop_that_turns_to_nan(bisect):
    """From GOOD plus the two keys the script would sleep for ten minutes:
    the trial is over when it has failed.
    """
    code, out, err = bisect("bad.yaml", "good.yaml", "--script", "train.py", "-j", "2", "--json")
    result = json.loads(out)
    assert code == 0, err
    assert result["minimal"] == ["scale", "warm"]
    assert result["sufficient_fix"] in (["scale"], ["warm"])
    assert (result["failure"]["kind"], result["failure"]["name"]) == ("nonfinite", "NS204")
    assert result["failure"]["key"]["op"] == "aten.div.Tensor"
    assert result["flaky"] == []
    assert len(result["trials"]) == err.count("trial ")
    assert "stopped" in {row["end"] for row in result["trials"]}
    again, text, _ = bisect("bad.yaml", "good.yaml", "--script", "train.py", "-j", "2")
    assert again == 0
    assert '  scale: "bad", not "ok"' in text
    assert "0 of them run now" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bad.yaml", "bad.yaml", "--script", "train.py"], "BAD and GOOD say the same"),
        (["bad.yaml", "good.yaml"], "which script reads these configs?"),
        (["bad.yaml", "god.yaml", "--script", "train.py"], "did you mean `good.yaml`?"),
        (["bad.yaml", "good.yaml", "--script", "train.py", "-j", "0"], "jobs must be more than 0"),
        (["bad.yaml"], "missing argument 'GOOD'"),
    ],
)
def test_bad_input_is_a_usage_error(bisect, arguments, message):
    code, out, err = bisect(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error[NS001]: ")
    assert message in err


def test_command_lines_and_a_result_that_is_not_established(bisect, tmp_path):
    (tmp_path / "plain.py").write_text("import sys; sys.exit(3 if '--crash' in sys.argv else 0)\n")
    code, out, _ = bisect("plain.py --crash --x 1 --y 2", "plain.py --x 1 --y 3")
    assert code == 0
    assert "failure: exit code 3" in out
    assert "  --crash: (set), not (not set)" in out
    code, out, _ = bisect("plain.py --x 1", "plain.py --x 2", "--json")
    assert (code, json.loads(out)["status"]) == (1, "bad_passes")
    code, out, _ = bisect("plain.py --crash --x 1", "plain.py --crash --x 2")
    assert code == 1
    assert "GOOD fails as well (exit code 3)" in out
