"""Real processes under gloo, each of which has a part of every weight: ``fully_shard``."""

import math
import random
import signal
from pathlib import Path

import pytest

from hosts.sharded.two_ranks import end, incidents, job, run, run_each
from nanstop.store.incidents import load_report, load_summary
from versions import needs

ALLOWED = {"NANSTOP_ALLOW": "drop_sample"}
pytestmark = needs("torch", "2.8", "fully_shard on a CPU")


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
    """All ranks have the same weights, and the loss of the run in one process."""
    assert len({one["digest"] for one in results}) == 1
    assert all(math.isclose(one["loss"], reference["loss"], abs_tol=1e-5) for one in results)


@pytest.mark.parametrize(
    "what",
    [
        ("none", "2"),
        pytest.param(("scaler",), marks=pytest.mark.slow),
        pytest.param(("in_half", "2"), marks=pytest.mark.slow),
    ],
)
def test_a_healthy_run_is_bitwise_equal(tmp_path, what):
    plain, _ = together(tmp_path / "plain", "sharded", *what, watched=False)
    watched, told = together(tmp_path / "watched", "sharded", *what)
    assert watched == plain
    rows, _ = incidents(tmp_path / "watched")
    assert rows == [], told


@pytest.mark.slow
def test_copies_of_what_lies_on_several_ranks_are_bitwise_equal(tmp_path):
    four = {"world": 4, "codes": (0,) * 4}
    plain, _ = together(tmp_path / "plain", "sharded", "hybrid_healthy", watched=False, **four)
    watched, told = together(tmp_path / "watched", "sharded", "hybrid_healthy", **four)
    assert watched == plain
    assert incidents(tmp_path / "watched")[0] == [], told


@pytest.mark.slow
def test_data_of_one_rank(tmp_path):
    reference = alone(tmp_path / "alone", "loop", "data", **ALLOWED)
    results, told = together(tmp_path / "ranks", "sharded", "data", **ALLOWED)
    assert_alike(results, reference)
    (row,), (report,) = incidents(tmp_path / "ranks")
    assert (row["code"], row["rank"], row["step"], row["module"]) == ("NS501", 1, 3, "first")
    assert row["action"] == "quarantine"
    assert report["incident"]["born_on"] == [1]
    assert report["audit"][-1]["outcome"] == "done"
    assert told.count("error[") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("world", "fault", "accumulate"), [(3, "data", "1"), (4, "hybrid", "2")])
def test_more_ranks(tmp_path, world, fault, accumulate):
    what, many = ("data", accumulate), {"world": world, "codes": (0,) * world}
    reference = alone(tmp_path / "alone", "loop", *what, ALIKE=str(world), **ALLOWED)
    results, _ = together(tmp_path / "ranks", "sharded", fault, accumulate, **many, **ALLOWED)
    assert_alike(results, reference)
    (row,), _ = incidents(tmp_path / "ranks")
    assert (row["code"], row["module"], row["action"]) == ("NS501", "first", "quarantine")
    assert row["rank"] == 29 // 4 % world


@pytest.mark.slow
def test_what_only_another_rank_can_see(tmp_path):
    """Rank 1 gives one row a bad gradient; that row lies on rank 0, and nothing is clipped."""
    results, _ = together(tmp_path / "ranks", "sharded", "one_row")
    assert_alike(results, alone(tmp_path / "alone", "loop", "one_row"))
    (row,), (report,) = incidents(tmp_path / "ranks")
    assert (row["code"], row["rank"], row["step"], row["action"]) == ("NS304", 1, 3, "skip")
    assert report["incident"]["born_on"] == [1]


@pytest.mark.slow
def test_gradients_that_are_summed_up_before_they_are_exchanged(tmp_path):
    reference = alone(tmp_path / "alone", "loop", "data", "2", **ALLOWED)
    results, _ = together(tmp_path / "ranks", "sharded", "data", "2", **ALLOWED)
    assert_alike(results, reference)
    (row,), _ = incidents(tmp_path / "ranks")
    assert (row["rank"], row["step"], row["micro"]) == (1, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["half", "mixed"])
def test_a_remedy_is_adopted_by_every_rank(tmp_path, fault):
    results, _ = together(tmp_path / "ranks", "sharded", fault)
    reference = alone(tmp_path / "alone", "loop", fault)
    assert results[0]["digest"] == results[1]["digest"]
    assert math.isclose(results[0]["loss"], reference["loss"], rel_tol=1e-3)
    (row,), (report,) = incidents(tmp_path / "ranks")
    assert (row["code"], row["rank"], row["module"]) == ("NS201", 1, "loud")
    assert [entry["action"]["kind"] for entry in report["audit"]] == ["redo", "adopt"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["skip", "stop"])
def test_what_the_policy_says_is_done_by_every_rank(tmp_path, policy):
    codes = {"skip": (0, 0), "stop": (3, 3)}[policy]
    policies = {"NANSTOP_ON_FAILURE": policy}
    results, told = together(tmp_path / "ranks", "sharded", "data", codes=codes, **policies)
    assert told.count("error[NS501]: batch not finite") == 1
    (row,), _ = incidents(tmp_path / "ranks")
    assert (row["action"], row["rank"]) == (policy, 1)
    assert policy == "stop" or results[0]["digest"] == results[1]["digest"]


@pytest.mark.slow
def test_weights_that_an_update_has_broken_stop_every_rank(tmp_path):
    together(tmp_path / "ranks", "sharded", "eps", codes=(3, 3))
    (row,), (report,) = incidents(tmp_path / "ranks")
    assert (row["code"], row["step"], row["action"]) == ("NS402", 1, "stop")
    assert report["incident"]["born_on"] == [0, 1]


@pytest.mark.slow
def test_a_rank_that_leaves_an_update_out_by_itself_is_not_waited_for_for_long(tmp_path):
    """Nothing of nanstop takes part in the script's own exchanges, which would be out of step."""
    plain, _ = together(tmp_path / "plain", "sharded", "own_skip", watched=False)
    few = {"NANSTOP_RANKS_SECONDS": "1"}
    watched, told = together(tmp_path / "watched", "sharded", "own_skip", seconds=60, **few)
    assert watched == plain, told


@pytest.mark.slow
def test_parts_of_ranks_that_have_come_apart_stay_finite(tmp_path):
    late = {"NANSTOP_RANKS_SECONDS": "1", "LATE_SECONDS": "5", "LATE_AT": "3"}
    _, told = together(tmp_path / "ranks", "sharded", "late", codes=(3, 3), **late)
    assert "this update would ruin the weights of all of them" in told


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["gathers", "centred"])
def test_collectives_of_the_script_inside_a_loss(tmp_path, fault):
    results, _ = together(tmp_path / "ranks", "sharded", fault, **ALLOWED)
    assert results[0]["digest"] == results[1]["digest"]
    (row,), (report,) = incidents(tmp_path / "ranks")
    actions = {"gathers": "quarantine", "centred": "skip"}
    assert (row["code"], row["rank"], row["action"]) == ("NS501", 1, actions[fault])
    assert report["incident"]["born_on"] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", ["1", "2"])
def test_a_window_that_is_made_anew_is_bitwise_the_same(tmp_path, accumulate):
    """A kernel of rank 1 is wrong once."""
    plain, _ = together(tmp_path / "plain", "sharded", "none", accumulate, watched=False)
    results, _ = together(tmp_path / "ranks", "sharded", "once", accumulate)
    assert [one["digest"] for one in results] == [one["digest"] for one in plain]
    (row,), (report,) = incidents(tmp_path / "ranks")
    assert (row["code"], row["action"]) == ("NS603", "redo")
    assert report["audit"][-1]["outcome"] == "done"


@pytest.mark.slow
@pytest.mark.parametrize("program", ["loop", "sharded"])
def test_a_model_inside_another(tmp_path, program):
    reference = alone(tmp_path / "alone", "loop", "data", **ALLOWED)
    results, _ = together(tmp_path / "ranks", program, "wrapped", **ALLOWED)
    assert_alike(results, reference)
    (row,), _ = incidents(tmp_path / "ranks")
    assert (row["code"], row["rank"], row["module"]) == ("NS501", 1, "first")


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", ["1", "2"])
def test_a_trainer(tmp_path, accumulate):
    plain, _ = together(tmp_path / "plain", "sharded_trainer", "none", accumulate, watched=False)
    watched, told = together(tmp_path / "watched", "sharded_trainer", "none", accumulate)
    assert watched == plain
    assert incidents(tmp_path / "watched")[0] == [], told
    reference = alone(tmp_path / "alone", "trainer", "data", accumulate, **ALLOWED)
    results, _ = together(tmp_path / "ranks", "sharded_trainer", "data", accumulate, **ALLOWED)
    assert_alike(results, reference)
    (row,), _ = incidents(tmp_path / "ranks")
    assert (row["code"], row["rank"], row["module"]) == ("NS501", 1, "first")
    assert row["action"] == "quarantine"


@pytest.mark.slow
def test_a_checkpoint_that_one_rank_must_not_write_is_written_by_none(tmp_path):
    """One row of a weight is bad, on rank 0; saving takes both."""
    saves = {"STEPS": "4", "SAVE_AT": "4", "NANSTOP_ON_FAILURE": "observe"}
    _, told = together(tmp_path / "ranks", "sharded_trainer", "one_row", **saves)
    assert "checkpoint trained/checkpoint-4 was not written" in told
    assert not list((tmp_path / "ranks" / "trained").glob("checkpoint-*"))


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", ["1", "2"])
def test_a_loop_on_accelerate(tmp_path, accumulate):
    what = ("sharded_accelerated", "none", accumulate)
    plain, _ = together(tmp_path / "plain", *what, watched=False)
    watched, _ = together(tmp_path / "watched", *what)
    assert watched == plain
    reference = alone(tmp_path / "alone", "accelerated", "data", accumulate, **ALLOWED)
    what = ("sharded_accelerated", "data", accumulate)
    results, _ = together(tmp_path / "ranks", *what, **ALLOWED)
    assert_alike(results, reference)
    (row,), _ = incidents(tmp_path / "ranks")
    assert (row["code"], row["rank"], row["action"]) == ("NS501", 1, "quarantine")


def disturbed(folder, seed, num_calls):
    """Return a run of which one rank gets a signal at one of its function calls."""
    draw = random.Random(seed)
    rank, number = draw.randrange(2), draw.choice([signal.SIGKILL, signal.SIGSTOP])
    waits = {"NANSTOP_RANKS_SECONDS": "3", "GLOO_SECONDS": "10"}
    at = f"{rank} {int(number)} {draw.randrange(num_calls[rank])}"
    return job(folder / str(seed), "sharded", "data", DISTURB=at, seconds=120, **waits, **ALLOWED)


@pytest.mark.slow
def test_a_rank_that_is_killed_or_stopped_at_any_time(tmp_path):
    """The others end, and what is written is whole."""
    num_calls = []
    for rank in range(2):
        counted = {"DISTURB": f"{rank} {int(signal.SIGKILL)} -1"}
        results, _ = together(tmp_path / f"rank{rank}", "sharded", "data", **counted, **ALLOWED)
        num_calls.append(results[rank]["calls"])
    jobs = [disturbed(tmp_path, seed, num_calls) for seed in range(30)]
    for ended, (codes, _, told) in zip(jobs, run_each(jobs), strict=True):
        folder = Path(ended["folder"])
        assert "hung" not in codes, told
        for report in (folder / "out").glob("*/report.json"):
            load_report(report)
        if (folder / "out" / "summary.json").exists():
            load_summary(folder / "out" / "summary.json")
