"""Real processes under gloo, one of whose kernels computes wrongly below all of Python."""

import json

import pytest

from hosts.sharded.two_ranks import end, incidents, run

AUDITED = {"NANSTOP_AUDIT_DEVICES": "2"}


@pytest.fixture(scope="module", autouse=True)
def _parent_of_ranks():
    yield
    end()


def audited(folder, *what, **options):
    codes, results, told = run(folder, *what, seconds=120, **AUDITED, **options)
    assert set(codes) == {0}, told
    found = json.loads((folder / "out" / "summary.json").read_text())["findings"]
    return results, [one for one in found if one["code"] == "NS603"], told


@pytest.mark.slow
@pytest.mark.parametrize("program", ["loop", pytest.param("trainer", marks=pytest.mark.slow)])
def test_devices_that_agree_are_left_in_peace(tmp_path, program):
    _, plain, _ = run(tmp_path / "plain", program, "none", watched=False, seconds=120)
    results, found, told = audited(tmp_path / "watched", program, "none")
    assert results == plain
    assert found == []
    assert "not compared" not in told


def test_a_device_that_computes_wrongly_is_named(tmp_path):
    _, (found,), told = audited(tmp_path / "ranks", "loop", "wrong_device")
    assert (found["where"], found["confidence"], found["step"]) == ("rank 1", "certain", 4)
    assert found["op"] == "aten.addmm.default"
    assert "cpu of rank 1 computes wrongly" in told
    assert "`first`" in told


@pytest.mark.slow
def test_one_of_four(tmp_path):
    _, (found,), _ = audited(tmp_path / "ranks", "loop", "wrong_device", world=4)
    assert (found["where"], found["confidence"]) == ("rank 1", "certain")


def test_a_failure_that_does_not_come_back_is_run_on_each_device(tmp_path):
    codes, _, told = run(tmp_path / "ranks", "loop", "once", seconds=120)
    assert codes == [0, 0], told
    (row,), (report,) = incidents(tmp_path / "ranks")
    assert (row["code"], row["rank"], row["step"], row["action"]) == ("NS603", 1, 3, "redo")
    assert "run on the devices of all 2 ranks" in told
    assert report["incident"]["facts"]["devices"]["op"] == ""
