"""A small run of ``benchmarks/memory_ladder.py``: nothing that memory is too short for ends it."""

import sys

import pytest
from benchmarks.memory_ladder import measured, shown

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a process is bounded as Linux can")


@pytest.mark.slow  # an allocation that fails inside a kernel ends a process on a CPU now and then
def test_a_bounded_run_goes_on():
    row = measured(160, 3, 0.1)
    assert row.went_on
    assert row.unchanged
    assert row.outcome in ("redo", "skip")
    assert row.scope or row.said
    assert shown([row]).row_count == 1
