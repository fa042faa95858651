"""What watching adds to a healthy step, counted in calls of nanstop's functions.

Calls do not depend on the machine: a bound here is what somebody has to argue with who adds to the
path of every step. Milliseconds are in `benchmarks/step_cost.py`.
"""

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
from benchmarks.fixed_cost.calls import calls_a_step
from benchmarks.fixed_cost.trainings import TRAININGS

MOST = {
    "trainer": 214,
    "loop": 154,
    "script": 512,
    "trainer, accumulation 8": 690,
    "loop, accumulation 8": 400,
    "script, accumulation 8": 2300,
    "loop, scaler": 163,
    "script, scaler": 751,
    "SFT": 285,
    "DPO": 325,
}
FAST = ("trainer", "loop", "script")


COUNT = """
import json, sys
from benchmarks.fixed_cost.calls import calls_a_step
from benchmarks.fixed_cost.trainings import TRAININGS
found = {name: calls_a_step(TRAININGS[name]) for name in sys.argv[2:]}
with open(sys.argv[1], "w") as file:
    json.dump(found, file)
"""
ROOT = Path(__file__).parents[2]


@cache
def counted(names):
    """Count in a process of its own: what other tests have imported and left is looked at, too."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "calls.json")
        paths = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests")))}
        command = [sys.executable, "-c", COUNT, str(file), *names]
        subprocess.run(command, env=os.environ | paths, check=True, capture_output=True)
        return json.loads(file.read_text())


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in TRAININGS]
)
def test_a_healthy_step_calls_few_of_our_functions(name):
    found = counted(FAST if name in FAST else (name,))[name]
    assert sum(found.values()) <= MOST[name], found


def test_a_data_set_that_is_a_list_is_not_noted_row_by_row():
    """A trainer holds its data set: to note it entry by entry took 96,000 calls a step."""
    found = calls_a_step(TRAININGS["trainer"])
    assert sum(n for name, n in found.items() if name.startswith("replay/state_diff")) < 100
