"""Real processes under gloo whose backward and update DeepSpeed's engine makes."""

import math
import random
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest

from hosts.sharded.two_ranks import end, incidents, job, run, run_each
from nanstop.store.incidents import load_report, load_summary

ALLOWED = {"NANSTOP_ALLOW": "drop_sample"}
pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")


@pytest.fixture(scope="module", autouse=True)
def _parent_of_ranks():
    yield
    end()


def together(folder, *what, codes=(0, 0), program="engine", **variables):
    found, results, told = run(folder, program, *what, **variables)
    assert tuple(found) == codes, told
    return results, told


def reference(folder, *what, program="loop"):
    """What the same training comes to in one process without an engine."""
    codes, (result,), told = run(folder, program, *what, world=1, **ALLOWED)
    assert codes == [0], told
    return result


def assert_alike(results, loss, within=1e-5):
    assert len({one["digest"] for one in results}) == 1
    assert all(math.isclose(one["loss"], loss, abs_tol=within) for one in results)


def the_incident(folder):
    (row,), (report,) = incidents(folder)
    assert report["incident"]["born_on"] in ([row["rank"]], [], None)
    return row


@pytest.mark.parametrize(
    "what",
    [
        ("2",),
        pytest.param(("0",), marks=pytest.mark.slow),
        pytest.param(("1", "float32", "2"), marks=pytest.mark.slow),
        pytest.param(("2", "float32", "2"), marks=pytest.mark.slow),
        pytest.param(("2", "bfloat16"), marks=pytest.mark.slow),
        pytest.param(("2", "float16"), marks=pytest.mark.slow),
        pytest.param(("3",), marks=pytest.mark.slow),
    ],
)
def test_a_healthy_run_is_bitwise_equal(tmp_path, what):
    """Its loss scale in float16 begins with updates that it leaves out by itself."""
    plain, _ = together(tmp_path / "plain", "none", *what, watched=False)
    watched, told = together(tmp_path / "watched", "none", *what)
    assert watched == plain
    assert (plain[0]["skipped"] > 0) == ("float16" in what)
    assert incidents(tmp_path / "watched")[0] == [], told


@pytest.mark.parametrize("stage", ["2", *(pytest.param(s, marks=pytest.mark.slow) for s in "01")])
@pytest.mark.parametrize("accumulate", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_data_of_one_rank(tmp_path, stage, accumulate):
    alone = reference(tmp_path / "alone", "data", accumulate)
    what = ("data", stage, "float32", accumulate)
    results, told = together(tmp_path / "ranks", *what, **ALLOWED)
    assert_alike(results, alone["loss"])
    row, at = the_incident(tmp_path / "ranks"), {"1": (3, 0), "2": (1, 1)}[accumulate]
    assert (row["code"], row["rank"], row["module"]) == ("NS501", 1, "first")
    assert ((row["step"], row["micro"]), row["action"]) == (at, "quarantine")
    assert results[0]["skipped"] == 0
    assert told.count("error[") == 1


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["0", "2"])
def test_what_only_the_gradients_show(tmp_path, stage):
    alone = reference(tmp_path / "alone", "data", "1")
    results, _ = together(tmp_path / "ranks", "one_row", stage, **ALLOWED)
    assert_alike(results, alone["loss"])
    row = the_incident(tmp_path / "ranks")
    assert (row["code"], row["rank"], row["step"], row["action"]) == ("NS304", 1, 3, "quarantine")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["0", "1", "2"])
def test_a_window_that_is_made_anew_is_bitwise_the_same(tmp_path, stage):
    """A kernel of rank 1 is wrong once."""
    plain, _ = together(tmp_path / "plain", "none", stage, watched=False)
    results, _ = together(tmp_path / "ranks", "once", stage)
    assert [one["digest"] for one in results] == [one["digest"] for one in plain]
    row = the_incident(tmp_path / "ranks")
    assert (row["code"], row["action"]) == ("NS603", "redo")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "formats"), [("1", "float32"), ("2", "bfloat16"), ("3", "float32")]
)
def test_an_update_is_left_out_as_after_an_overflow(tmp_path, stage, formats):
    """Which the engine would have met in it as well."""
    plain, _ = together(tmp_path / "plain", "data", stage, formats, watched=False)
    policy = {"NANSTOP_ON_FAILURE": "skip"}
    results, _ = together(tmp_path / "ranks", "data", stage, formats, **policy)
    assert results == plain
    assert results[0]["skipped"] == 1
    row = the_incident(tmp_path / "ranks")
    assert (row["rank"], row["step"], row["action"]) == (1, 3, "skip")


@pytest.mark.slow
def test_without_zero_nothing_else_keeps_bad_gradients_from_the_weights(tmp_path):
    plain, _ = together(tmp_path / "plain", "data", "0", watched=False)
    assert math.isnan(float(plain[0]["losses"][-1]))
    results, _ = together(tmp_path / "ranks", "data", "0", NANSTOP_ON_FAILURE="skip")
    assert all(map(math.isfinite, results[0]["losses"]))
    assert results[0]["skipped"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_ranks_that_come_apart_have_no_bad_weights(tmp_path, stage):
    """Without ZeRO each leaves out what is bad for all; with it, the engine does by itself."""
    late = {"NANSTOP_RANKS_SECONDS": "1", "LATE_SECONDS": "5", "LATE_AT": "3"}
    results, told = together(tmp_path / "ranks", "late", stage, **late)
    assert "failures are observed only: the ranks did not learn of each other's failures" in told
    left_out, _ = together(tmp_path / "skip", "data", stage, NANSTOP_ON_FAILURE="skip")
    assert results == left_out
    assert all(math.isfinite(one["loss"]) for one in results)
    assert results[0]["skipped"] == 1


@pytest.mark.slow
def test_ranks_that_come_apart_stop_where_an_engine_does_not_look(tmp_path):
    """DeepSpeed can be told not to ask whether gradients of bfloat16 are finite."""
    late = {"NANSTOP_RANKS_SECONDS": "1", "LATE_SECONDS": "5", "LATE_AT": "3"}
    what = ("late", "2 unguarded", "bfloat16")
    _, told = together(tmp_path / "ranks", *what, codes=(3, 3), **late)
    assert "this update would ruin the weights of all of them" in told


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["0", "1", "2"])
def test_what_an_exchange_breaks_is_made_anew_bitwise(tmp_path, stage):
    plain, _ = together(tmp_path / "plain", "none", stage, watched=False)
    results, _ = together(tmp_path / "ranks", "exchange", stage)
    assert results == plain
    row = the_incident(tmp_path / "ranks")
    assert (row["code"], row["step"], row["action"]) == ("NS606", 3, "redo")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_an_optimizer_that_breaks_the_weights_stops_every_rank(tmp_path, stage):
    """ZeRO-3 is not run again: without a cause."""
    together(tmp_path / "ranks", "eps", stage, codes=(3, 3))
    (row,), _ = incidents(tmp_path / "ranks")
    assert (row["code"], row["action"]) == ("NS000" if stage == "3" else "NS402", "stop")


@pytest.mark.slow
def test_gradients_in_host_memory_are_not_made_anew(tmp_path):
    plain, _ = together(tmp_path / "plain", "data", "2 on the host", watched=False)
    results, told = together(tmp_path / "ranks", "data", "2 on the host", **ALLOWED)
    assert results == plain
    row = the_incident(tmp_path / "ranks")
    assert (row["code"], row["rank"], row["module"], row["action"]) == ("NS501", 1, "first", "skip")
    said = "this optimizer update was skipped (weights unchanged): "
    assert f"{said}DeepSpeed keeps the gradients in host memory" in told


@pytest.mark.slow
def test_a_stop_is_every_ranks(tmp_path):
    _, told = together(tmp_path / "ranks", "data", codes=(3, 3), NANSTOP_ON_FAILURE="stop")
    assert told.count("error[NS501]: batch not finite") == 1


@pytest.mark.slow
def test_weights_on_all_ranks_are_not_run_again(tmp_path):
    """ZeRO-3: the rank and the step are named, and all leave the update out."""
    results, _ = together(tmp_path / "ranks", "data", "3", **ALLOWED)
    assert len({one["digest"] for one in results}) == 1
    row = the_incident(tmp_path / "ranks")
    assert (row["rank"], row["step"], row["micro"], row["action"]) == (1, 3, 0, "skip")


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", ["1", "2"])
def test_a_loop_on_accelerate(tmp_path, accumulate):
    engine = {"program": "accelerated_engine"}
    plain, _ = together(tmp_path / "plain", "none", accumulate, watched=False, **engine)
    watched, _ = together(tmp_path / "watched", "none", accumulate, **engine)
    assert watched == plain
    alone = reference(tmp_path / "alone", "data", accumulate, program="accelerated")
    results, _ = together(tmp_path / "ranks", "data", accumulate, **engine, **ALLOWED)
    assert_alike(results, alone["loss"])
    row = the_incident(tmp_path / "ranks")
    assert (row["code"], row["rank"], row["action"]) == ("NS501", 1, "quarantine")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["none", "data"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_trainer_is_observed(tmp_path, fault, world):
    """Its failing step is run again without an update of the engine's."""
    many = {"program": "trainer_engine", "world": world, "codes": (0,) * world, "STEPS": "8"}
    plain, _ = together(tmp_path / "plain", fault, watched=False, **many)
    watched, told = together(tmp_path / "watched", fault, **many)
    assert watched == plain
    assert "the update cannot be held back here" in told
    rows, _ = incidents(tmp_path / "watched")
    shown = [(row["code"], row["rank"], row["module"], row["action"]) for row in rows]
    assert shown == ([] if fault == "none" else [("NS501", world - 1, "first", "observe")])


@pytest.mark.slow
def test_four_ranks(tmp_path):
    four = {"world": 4, "codes": (0,) * 4}
    plain, _ = together(tmp_path / "plain", "none", watched=False, **four)
    watched, _ = together(tmp_path / "watched", "none", **four)
    assert watched == plain
    results, _ = together(tmp_path / "ranks", "data", **four, **ALLOWED)
    row = the_incident(tmp_path / "ranks")
    assert (row["code"], row["rank"], row["step"], row["module"]) == ("NS501", 3, 1, "first")
    assert len({one["digest"] for one in results}) == 1


@pytest.mark.slow
def test_a_rank_that_is_killed_or_stopped_at_any_time(tmp_path):
    """The other ends, and what is written is whole."""
    counted = {"DISTURB": f"1 {int(signal.SIGKILL)} -1"}
    results, _ = together(tmp_path / "counted", "data", **counted, **ALLOWED)
    waits = {"NANSTOP_RANKS_SECONDS": "3", "DEEPSPEED_TIMEOUT": "1"}
    jobs = []
    for seed in range(10):
        draw = random.Random(seed)
        at = f"1 {int(signal.SIGKILL)} {draw.randrange(results[1]['calls'])}"
        one = job(tmp_path / str(seed), "engine", "data", DISTURB=at, **waits, **ALLOWED)
        jobs.append(one)
    for ended, (codes, _, told) in zip(jobs, run_each(jobs), strict=True):
        assert "hung" not in codes, told
        assert -signal.SIGKILL in codes, (codes, told)
        for report in Path(ended["folder"], "out").glob("*/report.json"):
            load_report(report)
        if Path(ended["folder"], "out", "summary.json").exists():
            load_summary(Path(ended["folder"], "out", "summary.json"))
