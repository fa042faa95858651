"""A script that fails, `nanstop run`, `nanstop fix --apply`: then the plain script runs finite."""

import subprocess
import sys

import pytest

from commands.fix.failing import SCRIPTS
from e2e.scripts import run


def losses(ended):
    line = next(one for one in ended.out.decode().splitlines() if one.startswith("losses "))
    return [float(one) for one in line.removeprefix("losses [").rstrip("]").split(",")]


def fixed(folder, *words):
    command = [sys.executable, "-m", "nanstop", "fix", *words, "--apply"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_plain_script_is_finite_afterwards(tmp_path, name):
    script = tmp_path / "train.py"
    script.write_text(SCRIPTS[name])
    before = losses(run(tmp_path, "train.py", watched=False))
    run(tmp_path, "train.py")
    done = fixed(tmp_path, "incidents")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "applied to train.py" in done.stdout
    text = script.read_text()
    assert text != SCRIPTS[name]
    after = losses(run(tmp_path, "train.py", watched=False))
    assert after[:2] == pytest.approx(before[:2], rel=1e-6)
    assert all(abs(one) < 1e6 for one in after)  # NaN is not
    assert fixed(tmp_path, "incidents").returncode == 0
    assert script.read_text() == text
