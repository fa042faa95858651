"""The scripts of ``examples/`` under ``nanstop run``: healthy, with the one line at their end."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
FAST = ("raw_loop.py", "watched_loop.py", "accelerate_loop.py")
NO_SCRIPT = ("tiny.py",)
NEEDS = {"lightning_module.py": "lightning"}
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name not in NO_SCRIPT)


@pytest.mark.parametrize(
    "script",
    [pytest.param(one, marks=[] if one in FAST else [pytest.mark.slow]) for one in SCRIPTS],
)
def test_an_example_is_healthy(script, tmp_path):
    if script in NEEDS and find_spec(NEEDS[script]) is None:
        pytest.skip(f"{NEEDS[script]} is not installed")
    ended = subprocess.run(
        [sys.executable, "-m", "nanstop", "run", str(EXAMPLES / script)],
        cwd=tmp_path,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "NANSTOP_DIR": str(tmp_path / "nanstop"),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    said = [line for line in ended.stdout.splitlines() if re.match(r"nanstop:|\w+\[NS", line)]
    assert len(said) == 1, said
    assert re.fullmatch(r"nanstop: \d+ steps watched, nothing found", said[0])


def test_each_is_named_in_the_list_of_examples():
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(\w+\.py)`", listed)) == {*SCRIPTS, *NO_SCRIPT}
