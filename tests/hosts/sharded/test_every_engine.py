"""The same faults in every way of training with several processes: all act alike, and end where one
process ends. DeepSpeed's own are in ``test_engine``.
"""

import math
from importlib.util import find_spec

import pytest

from hosts.sharded.two_ranks import end, incidents, run
from versions import needs

ALLOWED = {"NANSTOP_ALLOW": "drop_sample"}
LIGHTNING = pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")
PARTS = needs("torch", "2.8", "fully_shard on a CPU")
ENGINES = [
    pytest.param(("loop",), id="ddp"),
    pytest.param(("sharded",), id="fsdp2", marks=[pytest.mark.slow, PARTS]),
    pytest.param(("trainer",), id="trainer", marks=pytest.mark.slow),
    pytest.param(("sharded_trainer",), id="trainer-fsdp", marks=[pytest.mark.slow, PARTS]),
    pytest.param(("accelerated",), id="accelerate", marks=pytest.mark.slow),
    pytest.param(("sharded_accelerated",), id="accelerate-fsdp", marks=[pytest.mark.slow, PARTS]),
    pytest.param(("fabric",), id="fabric", marks=[pytest.mark.slow, LIGHTNING]),
    pytest.param(("lightning", "clips"), id="lightning", marks=[pytest.mark.slow, LIGHTNING]),
    pytest.param(("lightning",), id="lightning-unclipped", marks=[pytest.mark.slow, LIGHTNING]),
]
ALONE = {"sharded": "loop", "sharded_trainer": "trainer", "sharded_accelerated": "accelerated"}
OF_LIGHTNING = [("fabric",), ("lightning",), ("lightning", "clips")]
OF_LIGHTNING += [("lightning", "accumulates"), ("lightning", "clips", "accumulates")]


@pytest.fixture(scope="module", autouse=True)
def _parent_of_ranks():
    yield
    end()


def train(folder, engine, fault, *, codes=(0, 0), **options):
    program, *modes = engine
    found, results, told = run(folder, program, fault, *modes, **options)
    assert tuple(found) == codes, told
    return results


def alone(folder, engine, fault):
    """What the same run comes to in one process, and the row of its incident."""
    options = {"world": 1, "codes": (0,), **ALLOWED}
    program, *modes = engine
    (result,) = train(folder, (ALONE.get(program, program), *modes), fault, **options)
    return result, incidents(folder)[0]


def assert_alike(results, reference):
    assert len({one["digest"] for one in results}) == 1
    assert all(math.isclose(one["loss"], reference["loss"], abs_tol=1e-5) for one in results)


def digests(results):
    return [one["digest"] for one in results]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("fault", "code"),
    [pytest.param("once", "NS603", marks=pytest.mark.slow), ("exchange", "NS606")],
)
def test_what_fails_once_is_made_anew_bitwise(tmp_path, engine, fault, code):
    """A kernel of rank 1 is wrong; or what it brings to an exchange is."""
    plain = train(tmp_path / "plain", engine, "none", watched=False)
    results = train(tmp_path / "ranks", engine, fault)
    assert digests(results) == digests(plain)
    (row,), (report,) = incidents(tmp_path / "ranks")
    assert (row["code"], row["step"], row["action"]) == (code, 3, "redo")
    assert row["rank"] == 1 or fault == "exchange"
    assert report["audit"][-1]["outcome"] == "done"
    assert report["incident"]["born_on"] == []


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_made_anew_ends_where_one_process_ends(tmp_path, engine):
    reference, _ = alone(tmp_path / "alone", engine, "none")
    assert_alike(train(tmp_path / "ranks", engine, "once"), reference)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_an_optimizer_that_breaks_the_weights_stops_every_rank(tmp_path, engine):
    train(tmp_path / "ranks", engine, "eps", codes=(3, 3))
    (row,), (report,) = incidents(tmp_path / "ranks")
    assert (row["code"], row["action"]) == ("NS402", "stop")
    assert report["incident"]["born_on"] == [0, 1]


@LIGHTNING
@pytest.mark.slow
@pytest.mark.parametrize("engine", OF_LIGHTNING, ids="-".join)
def test_lightning_in_health_is_bitwise_equal(tmp_path, engine):
    plain = train(tmp_path / "plain", engine, "none", watched=False)
    assert train(tmp_path / "watched", engine, "none") == plain
    assert incidents(tmp_path / "watched")[0] == []


@LIGHTNING
@pytest.mark.slow
@pytest.mark.parametrize("engine", OF_LIGHTNING, ids="-".join)
def test_data_of_one_rank_of_lightning(tmp_path, engine):
    reference, (known,) = alone(tmp_path / "alone", engine, "data")
    results = train(tmp_path / "ranks", engine, "data", **ALLOWED)
    assert_alike(results, reference)
    (row,), (report,) = incidents(tmp_path / "ranks")
    assert (row["code"], row["rank"], row["action"]) == ("NS501", 1, known["action"])
    assert report["incident"]["born_on"] == [1]


@LIGHTNING
@pytest.mark.slow
def test_what_an_evaluation_of_lightning_logs_is_watched(tmp_path):
    """A loss that is NaN on one rank; an accuracy over no row is NaN too, and no failure."""
    engine = ("lightning", "validates")
    plain = train(tmp_path / "plain", engine, "held_out", watched=False)
    assert train(tmp_path / "healthy", engine, "none") == plain
    assert incidents(tmp_path / "healthy")[0] == []
    assert train(tmp_path / "ranks", engine, "held_out") == plain
    (row,), (report,) = incidents(tmp_path / "ranks")
    assert (row["code"], row["module"], row["rank"]) == ("NS501", "net.first", 0)
    assert (report["incident"]["phase"], row["action"]) == ("evaluate", "observe")


@pytest.mark.slow
def test_what_one_rank_alone_receives_is_left_out_there_and_told(tmp_path):
    """The others see nothing of it: their weights have one update more, which is told, too."""
    waits = {"NANSTOP_RANKS_SECONDS": "3"}
    results = train(tmp_path / "ranks", ("loop",), "received", **waits)
    assert all(math.isfinite(one["loss"]) for one in results)
    (row,), _ = incidents(tmp_path / "ranks")
    assert (row["code"], row["rank"], row["action"]) == ("NS606", 1, "skip")
