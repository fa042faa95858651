"""Real processes under gloo that train one model together: a failure of one is a failure of all,
and one of them has looked into it.
"""

import math

import pytest

from hosts.sharded.two_ranks import incidents, run

ALLOWED = {"NANSTOP_ALLOW": "drop_sample"}


def alone(folder, *what, **variables):
    """What the same run comes to in one process."""
    codes, (result,), told = run(folder, *what, world=1, **variables)
    assert codes == [0], told
    return result


def together(folder, *what, codes=(0, 0), **variables):
    found, results, told = run(folder, *what, **variables)
    assert tuple(found) == codes, told
    return results, told


def is_healthy(folder, *what):
    plain, _ = together(folder / "plain", *what, watched=False)
    watched, told = together(folder / "watched", *what)
    assert watched == plain
    assert plain[0]["digest"] == plain[1]["digest"]
    rows, _ = incidents(folder / "watched")
    assert rows == [], told


@pytest.mark.parametrize("accumulate", ["1", "2"])
def test_a_healthy_run_is_bitwise_equal(tmp_path, accumulate):
    is_healthy(tmp_path, "loop", "none", accumulate)


def test_what_a_scaler_leaves_out_stays_its_own(tmp_path):
    is_healthy(tmp_path, "loop", "scaler")


def test_data_of_one_rank(tmp_path):
    reference = alone(tmp_path / "alone", "loop", "data", **ALLOWED)
    results, told = together(tmp_path / "ranks", "loop", "data", **ALLOWED)
    assert results[0]["digest"] == results[1]["digest"]
    assert math.isclose(results[0]["loss"], reference["loss"], abs_tol=1e-5)
    (row,), (report,) = incidents(tmp_path / "ranks")
    assert (row["code"], row["rank"], row["step"], row["module"]) == ("NS501", 1, 3, "first")
    assert row["action"] == "quarantine"
    assert report["incident"]["born_on"] == [1]
    assert report["audit"][-1]["outcome"] == "done"
    assert "born on rank 1 of 2" in told
    assert told.count("error[") == 1


def test_gradients_that_are_views_of_what_is_exchanged(tmp_path):
    views, _ = together(tmp_path / "views", "loop", "views", **ALLOWED)
    results, _ = together(tmp_path / "ranks", "loop", "data", **ALLOWED)
    assert [one["digest"] for one in views] == [one["digest"] for one in results]


def test_no_sync(tmp_path):
    reference = alone(tmp_path / "alone", "loop", "data", "2", **ALLOWED)
    results, _ = together(tmp_path / "ranks", "loop", "data", "2", **ALLOWED)
    assert results[0]["digest"] == results[1]["digest"]
    assert math.isclose(results[0]["loss"], reference["loss"], abs_tol=1e-5)
    (row,), _ = incidents(tmp_path / "ranks")
    assert (row["rank"], row["step"], row["micro"]) == (1, 1, 1)


def test_a_skip_is_every_ranks(tmp_path):
    results, _ = together(tmp_path / "ranks", "loop", "data", NANSTOP_ON_FAILURE="skip")
    assert results[0]["digest"] == results[1]["digest"]
    (row,), _ = incidents(tmp_path / "ranks")
    assert (row["action"], row["rank"]) == ("skip", 1)


def test_a_stop_is_every_ranks(tmp_path):
    _, told = together(tmp_path / "ranks", "loop", "data", codes=(3, 3), NANSTOP_ON_FAILURE="stop")
    assert told.count("error[NS501]") == 1


@pytest.mark.slow
def test_a_remedy_is_adopted_by_every_rank(tmp_path):
    results, _ = together(tmp_path / "ranks", "loop", "half")
    assert results[0]["digest"] == results[1]["digest"]
    reference = alone(tmp_path / "alone", "loop", "half")
    assert math.isclose(results[0]["loss"], reference["loss"], rel_tol=1e-3)
    (row,), (report,) = incidents(tmp_path / "ranks")
    assert (row["code"], row["rank"], row["module"]) == ("NS201", 1, "loud")
    assert [entry["action"]["kind"] for entry in report["audit"]] == ["redo", "adopt"]


def test_an_optimizer_that_breaks_the_weights_stops_every_rank(tmp_path):
    together(tmp_path / "ranks", "loop", "eps", codes=(3, 3))
    (row,), (report,) = incidents(tmp_path / "ranks")
    assert (row["code"], row["step"], row["action"]) == ("NS401", 1, "stop")
    assert report["incident"]["born_on"] == [0, 1]


def test_a_rank_that_dies_in_a_trial(tmp_path):
    """The others go on until they miss it in an exchange of the script's own."""
    waits = {"NANSTOP_RANKS_SECONDS": "3"}
    _, told = together(tmp_path / "ranks", "loop", "dies", codes=(1, 9), **waits)
    assert "failures are observed only: rank 1 did not answer within" in told
    assert "Connection closed by peer" in told


def test_a_rank_that_ends_early(tmp_path):
    together(tmp_path / "ranks", "loop", "early", codes=(1, 0))


def test_ranks_that_cannot_agree_observe(tmp_path):
    results, told = together(tmp_path / "ranks", "loop", "policies")
    assert "ranks 0 and 1 have different policies" in told
    rows, _ = incidents(tmp_path / "ranks")
    assert {row["action"] for row in rows} <= {"observe"}
    assert results[0]["digest"] == results[1]["digest"]


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", ["1", "2"])
def test_a_loop_on_accelerate(tmp_path, accumulate):
    is_healthy(tmp_path, "accelerated", "none", accumulate)
    reference = alone(tmp_path / "alone", "accelerated", "data", accumulate, **ALLOWED)
    results, _ = together(tmp_path / "ranks", "accelerated", "data", accumulate, **ALLOWED)
    assert results[0]["digest"] == results[1]["digest"]
    assert math.isclose(results[0]["loss"], reference["loss"], abs_tol=1e-5)


@pytest.mark.slow
def test_a_trainer(tmp_path):
    is_healthy(tmp_path, "trainer", "none")
    reference = alone(tmp_path / "alone", "trainer", "data", **ALLOWED)
    results, _ = together(tmp_path / "ranks", "trainer", "data", **ALLOWED)
    assert results[0]["digest"] == results[1]["digest"]
    assert math.isclose(results[0]["loss"], reference["loss"], abs_tol=1e-5)
    (row,), _ = incidents(tmp_path / "ranks")
    assert (row["code"], row["rank"], row["step"], row["module"]) == ("NS501", 1, 3, "first")
