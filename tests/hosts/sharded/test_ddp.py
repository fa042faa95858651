"""Real processes under gloo that train one model together: a failure of one is a failure of all,
and one of them has looked into it.
"""

import math
import random
import signal
import time
from pathlib import Path

import pytest

from hosts.sharded.two_ranks import end, incidents, job, run, run_each
from nanstop.store.incidents import load_report, load_summary

ALLOWED = {"NANSTOP_ALLOW": "drop_sample"}


@pytest.fixture(scope="module", autouse=True)
def _parent_of_ranks():
    yield
    end()


def alone(folder, *what, **variables):
    """What the same run comes to in one process."""
    codes, (result,), told = run(folder, *what, world=1, **variables)
    assert codes == [0], told
    return result


def together(folder, *what, codes=(0, 0), **variables):
    found, results, told = run(folder, *what, **variables)
    assert tuple(found) == codes, told
    return results, told


def assert_alike(results, reference):
    """Both ranks have the same weights, and the loss of the run in one process."""
    assert results[0]["digest"] == results[1]["digest"]
    assert math.isclose(results[0]["loss"], reference["loss"], abs_tol=1e-5)


def is_healthy(folder, *what):
    plain, _ = together(folder / "plain", *what, watched=False)
    watched, told = together(folder / "watched", *what)
    assert watched == plain
    assert plain[0]["digest"] == plain[1]["digest"]
    rows, _ = incidents(folder / "watched")
    assert rows == [], told


@pytest.mark.parametrize("accumulate", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_a_healthy_run_is_bitwise_equal(tmp_path, accumulate):
    is_healthy(tmp_path, "loop", "none", accumulate)


def test_what_a_scaler_leaves_out_stays_its_own(tmp_path):
    is_healthy(tmp_path, "loop", "scaler")


def test_data_of_one_rank(tmp_path):
    reference = alone(tmp_path / "alone", "loop", "data", **ALLOWED)
    results, told = together(tmp_path / "ranks", "loop", "data", **ALLOWED)
    assert_alike(results, reference)
    (row,), (report,) = incidents(tmp_path / "ranks")
    assert (row["code"], row["rank"], row["step"], row["module"]) == ("NS501", 1, 3, "first")
    assert row["action"] == "quarantine"
    assert report["incident"]["born_on"] == [1]
    assert report["audit"][-1]["outcome"] == "done"
    assert "born on rank 1 of 2" in told
    assert told.count("error[") == 1


@pytest.mark.slow
def test_gradients_that_are_views_of_what_is_exchanged(tmp_path):
    views, _ = together(tmp_path / "views", "loop", "views", **ALLOWED)
    results, _ = together(tmp_path / "ranks", "loop", "data", **ALLOWED)
    assert [one["digest"] for one in views] == [one["digest"] for one in results]


@pytest.mark.slow
def test_no_sync(tmp_path):
    reference = alone(tmp_path / "alone", "loop", "data", "2", **ALLOWED)
    results, _ = together(tmp_path / "ranks", "loop", "data", "2", **ALLOWED)
    assert_alike(results, reference)
    (row,), _ = incidents(tmp_path / "ranks")
    assert (row["rank"], row["step"], row["micro"]) == (1, 1, 1)


def test_a_skip_is_every_ranks(tmp_path):
    results, _ = together(tmp_path / "ranks", "loop", "data", NANSTOP_ON_FAILURE="skip")
    assert results[0]["digest"] == results[1]["digest"]
    (row,), _ = incidents(tmp_path / "ranks")
    assert (row["action"], row["rank"]) == ("skip", 1)


def test_a_stop_is_every_ranks(tmp_path):
    _, told = together(tmp_path / "ranks", "loop", "data", codes=(3, 3), NANSTOP_ON_FAILURE="stop")
    assert told.count("error[NS501]: batch not finite") == 1


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
    assert (row["code"], row["step"], row["action"]) == ("NS402", 0, "stop")
    assert report["incident"]["born_on"] == [0, 1]


@pytest.mark.parametrize("program", ["loop", pytest.param("trainer", marks=pytest.mark.slow)])
def test_all_ranks_go_back_together(tmp_path, program):
    cured = {"NANSTOP_ALLOW": "optimizer_eps"}
    reference = alone(tmp_path / "alone", program, "eps", **cured)
    results, _ = together(tmp_path / "ranks", program, "eps", **cured)
    assert_alike(results, reference)
    (row,), (report,) = incidents(tmp_path / "ranks")
    assert (row["code"], row["step"], row["action"]) == ("NS402", 0, "rollback")
    assert report["audit"][-1]["outcome"] == "done"


@pytest.mark.slow
def test_what_ranks_only_look_at_together(tmp_path):
    """A collective whose result no loss depends on: the data is left out as without it."""
    plain, _ = together(tmp_path / "plain", "loop", "data", **ALLOWED)
    results, _ = together(tmp_path / "ranks", "loop", "gathers", **ALLOWED)
    assert [one["digest"] for one in results] == [one["digest"] for one in plain]
    (row,), (report,) = incidents(tmp_path / "ranks")
    assert (row["code"], row["rank"], row["action"]) == ("NS501", 1, "quarantine")
    assert report["incident"]["born_on"] == [1]


@pytest.mark.slow
def test_what_a_collective_brings(tmp_path):
    """All ranks have a bad loss, one of them by its own data."""
    results, _ = together(tmp_path / "ranks", "loop", "centred", **ALLOWED)
    assert results[0]["digest"] == results[1]["digest"]
    assert results[0]["losses"][3] == "nan"
    (row,), (report,) = incidents(tmp_path / "ranks")
    assert (row["code"], row["rank"], row["action"]) == ("NS501", 1, "skip")
    assert report["incident"]["born_on"] == [1]


def test_what_one_rank_raises_names_it_once(tmp_path):
    _, told = together(tmp_path / "ranks", "classes", "raised", codes=(1, 1))
    (row,), _ = incidents(tmp_path / "ranks")
    assert (row["code"], row["rank"], row["step"]) == ("NS502", 1, 3)
    assert told.count("error[NS502]") == 1
    assert "Connection closed by peer" in told


@pytest.mark.slow
def test_four_healthy_ranks(tmp_path):
    four = {"world": 4, "codes": (0,) * 4}
    plain, _ = together(tmp_path / "plain", "loop", "none", "2", watched=False, **four)
    watched, told = together(tmp_path / "watched", "loop", "none", "2", **four)
    assert watched == plain
    assert incidents(tmp_path / "watched")[0] == [], told


@pytest.mark.slow
def test_four_ranks(tmp_path):
    reference = alone(tmp_path / "alone", "loop", "data", ALIKE="4", **ALLOWED)
    results, _ = together(tmp_path / "ranks", "loop", "data", world=4, codes=(0,) * 4, **ALLOWED)
    assert len({one["digest"] for one in results}) == 1
    assert math.isclose(results[0]["loss"], reference["loss"], abs_tol=1e-5)
    (row,), (report,) = incidents(tmp_path / "ranks")
    assert (row["code"], row["rank"], row["step"], row["module"]) == ("NS501", 3, 1, "first")
    assert report["incident"]["born_on"] == [3]


def test_a_rank_that_dies_in_a_trial(tmp_path):
    """The others go on until they miss it in an exchange of the script's own."""
    waits = {"NANSTOP_RANKS_SECONDS": "3"}
    _, told = together(tmp_path / "ranks", "loop", "dies", codes=(1, 9), **waits)
    assert "failures are observed only: rank 1 did not answer within" in told
    assert "Connection closed by peer" in told


LATE = {"NANSTOP_RANKS_SECONDS": "1", "LATE_SECONDS": "5", "LATE_AT": "3"}


@pytest.mark.slow
def test_ranks_that_come_apart_each_leave_out_what_is_bad_for_all(tmp_path):
    results, told = together(tmp_path / "ranks", "loop", "late", **LATE, **ALLOWED)
    assert "failures are observed only: rank 1 did not answer within 1 s" in told
    assert results[0]["digest"] == results[1]["digest"]
    left_out, _ = together(tmp_path / "skip", "loop", "unclipped", NANSTOP_ON_FAILURE="skip")
    assert results == left_out
    rows, _ = incidents(tmp_path / "ranks")
    assert {row["action"] for row in rows} == {"skip"}


@pytest.mark.slow
@pytest.mark.parametrize("program", ["loop", "sharded"])
def test_ranks_that_come_apart_over_a_long_look(tmp_path, program):
    """One still looks into the failure when the other has left."""
    results, told = together(tmp_path / "ranks", program, "dawdles", NANSTOP_RANKS_SECONDS="1")
    assert "failures are observed only: rank 1 did not answer within 4 s" in told
    assert results[0]["digest"] == results[1]["digest"]
    left_out, _ = together(tmp_path / "skip", program, "data", NANSTOP_ON_FAILURE="skip")
    assert results == left_out
    rows, _ = incidents(tmp_path / "ranks")
    assert {row["action"] for row in rows} == {"skip"}


@pytest.mark.slow
def test_ranks_that_come_apart_before_they_know_each_other_stop_with_weights_that_broke(tmp_path):
    given = {**LATE, "LATE_AT": "1", "NANSTOP_ALLOW": "optimizer_eps"}
    _, told = together(tmp_path / "ranks", "loop", "eps", codes=(3, 3), **given)
    assert "the weights themselves are not finite" in told


@pytest.mark.slow
def test_ranks_that_come_apart_only_observe_where_that_is_the_policy(tmp_path):
    results, _ = together(tmp_path / "ranks", "loop", "late", NANSTOP_ON_FAILURE="observe", **LATE)
    assert "nan" in results[0]["losses"]
    rows, _ = incidents(tmp_path / "ranks")
    assert {row["action"] for row in rows} == {"observe"}


@pytest.mark.slow
def test_a_rank_that_ends_early(tmp_path):
    together(tmp_path / "ranks", "loop", "early", codes=(1, 0))


@pytest.mark.slow
def test_ranks_that_cannot_agree_observe(tmp_path):
    results, told = together(tmp_path / "ranks", "loop", "policies")
    assert "ranks 0 and 1 have different policies" in told
    rows, _ = incidents(tmp_path / "ranks")
    assert {row["action"] for row in rows} <= {"observe"}
    assert results[0]["digest"] == results[1]["digest"]


@pytest.mark.slow
def test_ranks_with_different_versions_each_leave_out_what_is_bad_for_all(tmp_path):
    results, told = together(tmp_path / "ranks", "loop", "versions", **ALLOWED)
    assert "ranks 0 and 1 have different versions of nanstop: " in told
    rows, _ = incidents(tmp_path / "ranks")
    assert {row["action"] for row in rows} == {"skip"}
    assert results[0]["digest"] == results[1]["digest"]
    assert math.isfinite(results[0]["loss"])


@pytest.mark.slow
def test_clocks_that_are_a_day_apart(tmp_path):
    """The time of a failure is that of the rank it was born on; nobody waits by it."""
    results, _ = together(tmp_path / "ranks", "loop", "clocks", **ALLOWED)
    assert results[0]["digest"] == results[1]["digest"]
    (row,), (report,) = incidents(tmp_path / "ranks")
    assert (row["code"], row["rank"], row["action"]) == ("NS501", 1, "quarantine")
    assert 86000 < time.time() - report["incident"]["time"] < 87400


@pytest.mark.slow
def test_a_folder_that_ranks_do_not_share(tmp_path):
    """Whoever has looked into the failure has written of it, and says where."""
    results, told = together(tmp_path / "ranks", "loop", "elsewhere", **ALLOWED)
    assert results[0]["digest"] == results[1]["digest"]
    assert "full record elsewhere/0000/report.json" in told
    assert "details: `nanstop report elsewhere`" in told
    load_summary(tmp_path / "ranks" / "out" / "summary.json")
    (row,) = load_summary(tmp_path / "ranks" / "elsewhere" / "summary.json").incidents
    assert (row.code, row.rank, row.action) == ("NS501", 1, "quarantine")


@pytest.mark.slow
def test_what_one_rank_alone_comes_to_waits_for_no_other(tmp_path):
    """An evaluation that fails on rank 0, of what is wrapped."""
    plain, _ = together(tmp_path / "plain", "loop", "evaluates", watched=False)
    results, _ = together(tmp_path / "ranks", "loop", "evaluates", seconds=60)
    assert results == plain
    (row,), (report,) = incidents(tmp_path / "ranks")
    assert (row["code"], row["rank"], row["action"]) == ("NS501", 0, "observe")
    assert report["incident"]["phase"] == "evaluate"


@pytest.mark.slow
def test_an_exception_that_one_rank_catches(tmp_path):
    """It makes one backward less than the others, which miss it as they would without nanstop."""
    _, told = together(tmp_path / "ranks", "classes", "caught", codes=(1, 0), seconds=60)
    assert "by peer" in told
    (row,), _ = incidents(tmp_path / "ranks")
    assert (row["code"], row["rank"], row["action"]) == ("NS502", 1, "observe")


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", ["1", "2"])
def test_a_loop_on_accelerate(tmp_path, accumulate):
    is_healthy(tmp_path, "accelerated", "none", accumulate)
    reference = alone(tmp_path / "alone", "accelerated", "data", accumulate, **ALLOWED)
    results, _ = together(tmp_path / "ranks", "accelerated", "data", accumulate, **ALLOWED)
    assert_alike(results, reference)


def calls_of_each(folder, *step):
    """Return how many functions each rank calls in a run, or while one step is looked at: the one
    that looks into the failure calls more.
    """
    folder.mkdir()
    at = " ".join(map(str, (int(signal.SIGKILL), -1, *step)))
    ranks = range(2)
    jobs = [
        job(folder / str(rank), "loop", "data", DISTURB=f"{rank} {at}", **ALLOWED) for rank in ranks
    ]
    ended = run_each(jobs)
    return [ended[rank][1][rank]["calls"] for rank in ranks]


def disturbed(folder, seed, num_calls):
    """Return a run of which one rank gets a signal at one of its function calls."""
    draw = random.Random(seed)
    rank, number = draw.randrange(2), draw.choice([signal.SIGKILL, signal.SIGSTOP])
    return job(
        folder / str(seed),
        "loop",
        "data",
        DISTURB=f"{rank} {int(number)} {draw.randrange(num_calls[rank])}",
        NANSTOP_RANKS_SECONDS="3",
        GLOO_SECONDS="10",
        **ALLOWED,
    )


@pytest.mark.slow
def test_a_rank_that_is_killed_or_stopped_at_any_time(tmp_path):
    """The others end, and what is written is whole."""
    num_calls = calls_of_each(tmp_path / "counted")
    jobs = [disturbed(tmp_path, seed, num_calls) for seed in range(20)]
    for ended, (codes, _, told) in zip(jobs, run_each(jobs), strict=True):
        folder = Path(ended["folder"])
        assert "hung" not in codes, told
        assert {*codes} & {-signal.SIGKILL, "stopped"}, (codes, told)
        for report in (folder / "out").glob("*/report.json"):
            load_report(report)
        if (folder / "out" / "summary.json").exists():
            load_summary(folder / "out" / "summary.json")


@pytest.mark.slow
def test_a_rank_that_is_killed_while_a_failure_is_looked_into(tmp_path):
    """The other has its patience with it, ends with the exchange that it misses, and has no bad
    weights; what is written is whole.
    """
    waits = {"NANSTOP_RANKS_SECONDS": "3", "GLOO_SECONDS": "10", **ALLOWED}
    killed = [f"{rank} {int(signal.SIGKILL)}" for rank in range(2)]
    num_calls = calls_of_each(tmp_path / "counted", 3)
    jobs = []
    for seed in range(10):
        at = random.Random(seed).randrange(num_calls[seed % 2])
        disturb = {"DISTURB": f"{killed[seed % 2]} {at} 3"}
        jobs.append(job(tmp_path / f"seed{seed}", "loop", "data", **disturb, **waits))
    for seed, (codes, results, told) in enumerate(run_each(jobs)):
        assert codes[seed % 2] == -signal.SIGKILL, told
        assert codes[1 - seed % 2] == 1, told
        assert results == [None, None]
        for report in (tmp_path / f"seed{seed}" / "out").glob("*/report.json"):
            load_report(report)
        load_summary(tmp_path / f"seed{seed}" / "out" / "summary.json")


@pytest.mark.slow
@pytest.mark.parametrize("program", ["sft", "dpo"])
def test_trainers_of_trl(tmp_path, program):
    """Their losses gather what they log."""
    is_healthy(tmp_path, program, "none", "2")
    results, _ = together(tmp_path / "ranks", program, "data", "2", NANSTOP_ALLOW="form")
    assert results[0]["digest"] == results[1]["digest"]
    (row,), (report,) = incidents(tmp_path / "ranks")
    assert (row["rank"], row["step"], row["module"]) == (0, 1, "model.embed_tokens")
    assert row["action"] == "redo"
    assert report["audit"][-1]["outcome"] == "done"


@pytest.mark.slow
def test_a_trainer(tmp_path):
    is_healthy(tmp_path, "trainer", "none")
    reference = alone(tmp_path / "alone", "trainer", "data", **ALLOWED)
    results, _ = together(tmp_path / "ranks", "trainer", "data", **ALLOWED)
    assert_alike(results, reference)
    (row,), _ = incidents(tmp_path / "ranks")
    assert (row["code"], row["rank"], row["step"], row["module"]) == ("NS501", 1, 3, "first")
