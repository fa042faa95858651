"""What watching adds to a healthy step, counted in calls of nanstop's functions.

Calls do not depend on the machine: a bound here is what somebody has to argue with who adds to the
path of every step. Milliseconds are in `benchmarks/step_cost.py`.
"""

import pytest
from benchmarks.fixed_cost.calls import calls_a_step
from benchmarks.fixed_cost.trainings import TRAININGS

MOST = {
    "trainer": 218,
    "loop": 152,
    "script": 530,
    "trainer, accumulation 8": 690,
    "loop, accumulation 8": 410,
    "script, accumulation 8": 2400,
    "loop, scaler": 163,
    "script, scaler": 745,
    "SFT": 285,
    "DPO": 325,
}
FAST = ("trainer", "loop", "script")


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in TRAININGS]
)
def test_a_healthy_step_calls_few_of_our_functions(name):
    found = calls_a_step(TRAININGS[name])
    assert sum(found.values()) <= MOST[name], found


def test_a_data_set_that_is_a_list_is_not_noted_row_by_row():
    """A trainer holds its data set: to note it entry by entry took 96,000 calls a step."""
    found = calls_a_step(TRAININGS["trainer"])
    assert sum(n for name, n in found.items() if name.startswith("hosts/state_diff")) < 100
