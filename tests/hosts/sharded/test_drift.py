"""Real processes under gloo whose copies of a model drift apart, and those whose do not."""

import json

import pytest

from hosts.sharded.two_ranks import end, incidents, run


@pytest.fixture(scope="module", autouse=True)
def _parent_of_ranks():
    yield
    end()


def findings(folder, *what, **variables):
    """Return the findings of a run on two ranks, and what was written on stderr."""
    codes, _, told = run(folder, *what, seconds=120, **variables)
    assert codes == [0, 0], told
    found = json.loads((folder / "out" / "summary.json").read_text())["findings"]
    return [(one["code"], one["where"], one["confidence"], one["step"]) for one in found], told


def is_left_in_peace(folder, *what):
    _, plain, told = run(folder / "plain", *what, watched=False, seconds=120)
    codes, watched, told = run(folder / "watched", *what, seconds=120)
    assert codes == [0, 0], told
    assert watched == plain
    assert "NS607" not in told
    assert "no longer compared" not in told


PARTED = [
    ("initial", "last.weight", "certain", 0, "the ranks have begun with other weights"),
    ("gradients", "last.weight", "certain", 2, "what is done to it in between differs"),
    ("last_alone", "first.weight", "certain", 1, "added each rank's own after the exchange"),
    ("past_wrapper", "first.weight", "likely", 3, "calls the model inside"),
]
MORE = [
    ("skips", "first.weight", "certain", 4, "since step 2 it was rank 0 2, rank 1 1"),
    ("late", "late", "certain", 1, "registered after the model was wrapped"),
    ("frozen", "frozen.weight", "certain", 0, "at [0, 5]"),
    ("rates", "first.weight", "likely", 1, "`lr` is 0.02 on rank 0, 0.03 on rank 1"),
    ("state", "first.weight", "likely", 1, "`step of first.weight` differed in step 0"),
    ("local", "first.weight", "possible", 2, "1 update since step 0 took gradients"),
    ("writes", "last.bias", "likely", 2, "in step 1 the update took the same gradient"),
]


@pytest.mark.parametrize(
    ("fault", "weight", "confidence", "step", "cause"),
    [*PARTED, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE)],
    ids=lambda one: one if one in {row[0] for row in PARTED + MORE} else "",
)
def test_copies_that_part(tmp_path, fault, weight, confidence, step, cause):
    found, told = findings(tmp_path / "ranks", "drifts", fault)
    assert ("NS607", weight, confidence, step) in found, told
    assert cause in told
    assert ("the largest difference in step" in told) == (fault != "past_wrapper")
    assert told.count("NS607]") == 1


@pytest.mark.parametrize(
    "kind",
    [
        "none",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ("zero", "ignored", "clipped", "local_sgd", "averaged")
        ),
    ],
)
def test_copies_that_are_alike(tmp_path, kind):
    is_left_in_peace(tmp_path, "drifts", kind)


def test_ranks_that_are_given_the_same_batches(tmp_path):
    found, told = findings(tmp_path / "ranks", "drifts", "same")
    assert [(code, confidence) for code, _, confidence, _ in found] == [("NS505", "likely")], told
    assert "the first batches of 2 ranks are the same" in told


@pytest.mark.slow
def test_statistics_of_each_rank_are_its_own(tmp_path):
    is_left_in_peace(tmp_path, "drifts", "local_statistics")


@pytest.mark.slow
def test_ranks_with_other_numbers_of_batches(tmp_path):
    is_left_in_peace(tmp_path, "joins", "none")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "allow", "action"),
    [("data", "drop_sample", "quarantine"), ("data", "", "skip"), ("alone", "drop_sample", "skip")],
)
def test_a_fault_of_ranks_with_other_numbers_of_batches(tmp_path, fault, allow, action):
    given = {"NANSTOP_ALLOW": allow} if allow else {}
    codes, results, told = run(tmp_path / "ranks", "joins", fault, seconds=60, **given)
    assert codes == [0, 0], told
    assert "observed only" not in told
    assert results[0]["weights"] == results[1]["weights"]
    assert "nan" not in str(results[1]["losses"][-6:])
    rows, reports = incidents(tmp_path / "ranks")
    assert [(row["code"], row["rank"], row["action"]) for row in rows] == [("NS501", 1, action)]
    assert reports[0]["localization"]["key"]["module"] == "first"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "fault", "weight", "confidence", "said"),
    [
        (
            "drifting_accelerated",
            "skips",
            "first.weight",
            "certain",
            "since step 1 it was rank 0 1, rank 1 0",
        ),
        (
            "drifting_trainer",
            "writes",
            "last.weight",
            "likely",
            "in step 1 the update took the same gradient",
        ),
    ],
)
def test_other_hosts(tmp_path, program, fault, weight, confidence, said):
    is_left_in_peace(tmp_path, program, "none")
    found, told = findings(tmp_path / "ranks", program, fault)
    assert found == [("NS607", weight, confidence, 2)], told
    assert said in told
