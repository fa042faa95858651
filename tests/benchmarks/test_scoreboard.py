"""The scoreboard: its arithmetic, the lines that it prints last, and a few cases run as it runs
all of them.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path += [str(BENCHMARKS), str(BENCHMARKS / "cases")]  # after the tests: both have a `tiny`

import scoreboard_runs  # noqa: E402
import scoreboard_table  # noqa: E402
from scoreboard_said import record, said_in  # noqa: E402
from scoring import COLUMNS, Said, certain_and_wrong, rates, score  # noqa: E402
from truth import Truth, load_truths  # noqa: E402

FAST = (
    "clip-before-unscale",
    "cross-entropy-of-no-token",
    "eager-attention-overflow",
    "bf16-weights-stand-still",
)
QUIET = Said(final_loss=4.0)


def truth(**more: Any) -> Truth:
    given: dict[str, Any] = {
        "name": "some",
        "title": "a product overflows",
        "class": "fp16_range_forward",
        "codes": ("NS201", "NS101"),
        "kind": "loud",
        "phase": "forward",
        "op": ("aten.mm*",),
        "module": ("model.layers.1",),
        "step": 2,
        "micro": 1,
        "cure": "precision",
        "in_run": True,
    }
    return Truth.model_validate(given | more)


def said(**more: Any) -> Said:
    given: dict[str, Any] = {
        "alarms": 1,
        "incidents": 1,
        "answers": (("NS201", "certain"),),
        "step": 2,
        "micro": 1,
        "phase": "forward",
        "ops": ("aten.mm.default",),
        "modules": ("model.layers.1",),
        "proven": True,
        "final_loss": 4.01,
    }
    return Said(**(given | more))


def wrong(row: dict[str, bool | None]) -> set[str]:
    return {name for name, value in row.items() if value is False}


def test_a_right_answer_is_right_in_every_column() -> None:
    assert score(truth(), said(), QUIET, 4.0) == dict.fromkeys(COLUMNS, True)


def test_no_answer_is_a_miss_in_every_column_but_quiet() -> None:
    assert wrong(score(truth(), Said(), QUIET, 4.0)) == {*COLUMNS} - {"quiet"}


def test_a_run_that_nanstop_fails_on_is_a_miss_and_not_left_out() -> None:
    failed = Said(failed="no summary.json was written")
    assert wrong(score(truth(), failed, QUIET, 4.0)) == {*COLUMNS} - {"quiet"}


def test_a_run_that_a_peer_fails_on_is_left_out() -> None:
    row = score(truth(), Said(failed="cannot be imported"), QUIET, 4.0, names_causes=False)
    assert set(row.values()) == {None}


@pytest.mark.parametrize(
    ("more", "missed"),
    [
        ({"step": 3}, {"step"}),
        ({"micro": None}, {"micro"}),
        ({"phase": "backward"}, {"phase"}),
        ({"ops": ("aten.add.Tensor",)}, {"op"}),
        ({"modules": ("model.layers.10",)}, {"module"}),
        ({"modules": ()}, {"module"}),
        ({"answers": (("NS205", "certain"), ("NS201", "likely"))}, {"cause", "strict"}),
        ({"answers": (("NS101", "likely"),)}, {"strict"}),
        ({"cure": "isolated"}, {"proven"}),
        ({"proven": None}, {"proven"}),
        ({"final_loss": 4.2}, {"parity"}),
        ({"final_loss": math.nan}, {"parity"}),
    ],
)
def test_one_wrong_word_is_one_miss(more: dict[str, Any], missed: set[str]) -> None:
    assert wrong(score(truth(), said(**more), QUIET, 4.0)) == missed


def test_a_column_is_left_out_only_where_the_truth_has_no_answer() -> None:
    bare = truth(phase=None, op=(), module=(), step=None, micro=None, in_run=False)
    row = score(bare, said(), QUIET, 4.0)
    left_out = {name for name, value in row.items() if value is None}
    assert left_out == {"phase", "op", "module", "step", "micro", "proven", "parity"}


def test_the_module_of_the_scripts_own_code_has_to_be_named_too() -> None:
    own_code = truth(module=("",))
    assert score(own_code, said(modules=("",)), QUIET, 4.0)["module"] is True
    assert score(own_code, said(modules=()), QUIET, 4.0)["module"] is False


def test_an_unrelated_finding_is_no_detection() -> None:
    other = Said(alarms=1, answers=(("NS110", "possible"),))
    assert score(truth(), other, QUIET, 4.0)["detected"] is False
    assert (
        score(truth(kind="silent"), said(answers=(("NS110", "likely"),)), QUIET, 4.0)["detected"]
        is False
    )


def test_a_silent_alarm_of_a_peer_counts_if_its_twin_has_none() -> None:
    silent, alarm = truth(kind="silent"), Said(alarms=3)
    assert score(silent, alarm, QUIET, 4.0, names_causes=False)["detected"] is True
    assert score(silent, alarm, Said(alarms=3), 4.0, names_causes=False)["detected"] is False
    more = Said(alarms=3, beyond_twin=True)
    assert score(silent, more, Said(alarms=70), 4.0, names_causes=False)["detected"] is True


def test_an_alarm_on_a_twin_or_on_a_scary_case_is_false() -> None:
    assert score(truth(), said(), Said(alarms=1), 4.0)["quiet"] is False
    scary = truth(kind="scary", codes=("NS802",), in_run=False)
    assert score(scary, said(), QUIET, 4.0)["quiet"] is False
    known = Said(alarms=1, answers=(("NS802", "certain"),))
    assert score(scary, known, QUIET, 4.0)["quiet"] is True
    assert score(scary, Said(alarms=1), QUIET, 4.0, names_causes=False)["quiet"] is False


def test_a_twin_may_be_told_that_its_loss_of_zero_is_by_design() -> None:
    reassured = Said(alarms=1, answers=(("NS802", "certain"),))
    assert score(truth(), said(), reassured, 4.0)["quiet"] is True
    assert certain_and_wrong(truth(), said(), reassured) == ()
    both = Said(alarms=2, answers=(("NS802", "certain"), ("NS102", "possible")))
    assert score(truth(), said(), both, 4.0)["quiet"] is False


def test_an_open_case_is_answered_by_its_code_or_by_doubt_with_what_was_ruled_out() -> None:
    undecided = truth(kind="open", codes=("NS000",), in_run=False)
    ruled_out = ("ruled out: the data; the batch is finite",)

    def cause(**more: Any) -> bool | None:
        return score(undecided, said(**more), QUIET, 4.0)["cause"]

    assert cause(answers=(("NS000", "possible"),)) is True
    assert cause(answers=(("NS304", "likely"),), ruled_out=ruled_out) is True
    assert cause(answers=(("NS304", "likely"),)) is False
    assert cause(answers=(("NS304", "certain"),), ruled_out=ruled_out) is False


def test_what_is_said_at_certain_and_wrong_is_counted() -> None:
    guess = said(answers=(("NS205", "certain"),))
    assert certain_and_wrong(truth(), said(), QUIET) == ()
    assert certain_and_wrong(truth(), guess, QUIET) == ("NS205",)
    assert certain_and_wrong(truth(), said(), guess) == ("NS205",)
    assert certain_and_wrong(truth(), said(answers=(("NS205", "likely"),)), QUIET) == ()
    beside = said(answers=(("NS201", "certain"), ("NS301", "certain")))
    assert certain_and_wrong(truth(), beside, QUIET) == ("NS301",)
    assert certain_and_wrong(truth(also=("NS301",)), beside, QUIET) == ()


def test_leaving_out_what_fails_counts_where_nothing_else_can_be_done() -> None:
    only = truth(remedies=("drop_micro", "drop_sample"))
    assert score(only, said(cure="isolated"), QUIET, 4.0)["proven"] is True


def kept(runs: dict[str, Said], **more: Any) -> dict[str, Any]:
    def written(one: Said) -> dict[str, Any]:
        fields = {name: getattr(one, name) for name in Said.__dataclass_fields__}
        return {"said": fields, "code": 0, "stdout": f"final_loss={one.final_loss}", "command": ""}

    return {"runs": {name: written(one) for name, one in runs.items()}, **more}


def test_the_page_and_the_last_lines_come_from_what_is_kept(tmp_path: Path) -> None:
    results = tmp_path / "scoreboard"
    results.mkdir()
    healthy = {f"healthy.{number}": QUIET for number in range(100)}
    found = {
        "plain": kept({"some.healthy": QUIET}),
        "nanstop": kept({"some.case": said(), "some.healthy": QUIET, **healthy}, minutes=3.0),
        "msprobe": kept({"some.case": Said(failed="no such thing"), "some.healthy": QUIET}),
    }
    for tool, all_of_it in found.items():
        (results / f"{tool}.json").write_text(json.dumps(all_of_it))
    board = scoreboard_table.write_table([truth()], results, tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    missed = [line.text.partition(":")[0] for line in board.missed if line.holds is False]
    assert missed == ["cases"]  # one is fewer than 60
    assert "| msprobe | ? | 0 | 1 |" in page.replace("torch ?", "?")
    assert "no such thing" in page
    assert "| some | loud | NS201, NS101 | NS201 certain | - |" in page


def test_a_false_alarm_on_a_healthy_run_is_printed_and_missed(tmp_path: Path) -> None:
    results = tmp_path / "scoreboard"
    results.mkdir()
    runs = {f"healthy.{number}": QUIET for number in range(100)} | {
        "healthy.llama.bf16.SFT": said()
    }
    (results / "nanstop.json").write_text(json.dumps(kept(runs)))
    board = scoreboard_table.write_table([], results, tmp_path / "page.md")
    (line,) = [one for one in board.missed if "further healthy runs" in one.text]
    assert "1 of 101" in line.text
    assert "llama.bf16.SFT (NS201)" in line.text


@pytest.fixture(scope="module")
def fast_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Said]:
    """Each fast case and its twin under ``nanstop run``, and the twin alone, forked from a warm
    process.
    """
    truths = load_truths(FAST)
    found: dict[str, Said] = {}

    def done(run: scoreboard_runs.Run, made: dict[str, Any]) -> None:
        found[f"{run.tool}/{run.name}"] = said_in(json.loads(json.dumps(made)))

    runs = [run for tool in ("plain", "nanstop") for run in scoreboard_runs.runs_of(tool, truths)]
    scoreboard_runs.run_all(runs, tmp_path_factory.mktemp("runs"), 1, done)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_a_fast_case_is_right_in_every_column(name: str, fast_runs: dict[str, Said]) -> None:
    (case_truth,) = load_truths((name,))
    case, twin = (fast_runs[f"nanstop/{name}.{one}"] for one in ("case", "healthy"))
    row = score(case_truth, case, twin, fast_runs[f"plain/{name}.healthy"].final_loss)
    assert wrong(row) == set(), case
    assert rates([row])["quiet"] == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_a_watched_twin_ends_with_the_loss_of_the_unwatched_one(
    name: str, fast_runs: dict[str, Said]
) -> None:
    alone, watched = (fast_runs[f"{tool}/{name}.healthy"] for tool in ("plain", "nanstop"))
    assert alone.final_loss == watched.final_loss


@pytest.mark.parametrize(("code", "failed"), [(-8, False), (1, True), (None, True)])
def test_a_peer_whose_case_dies_by_a_signal_has_said_nothing(
    tmp_path: Path, code: int | None, failed: bool
) -> None:
    for name, text in (
        ("stdout", ""),
        ("stderr", "Traceback"),
        ("ended.json", json.dumps({"code": code, "seconds": 1.0})),
    ):
        (tmp_path / name).write_text(text)
    found = said_in(record("msprobe", ["under.py"], tmp_path))
    assert bool(found.failed) is failed
    assert found.alarms == 0


def test_the_first_finding_of_a_run_that_has_not_failed_says_where(tmp_path: Path) -> None:
    found = {"code": "NS209", "title": "overflow in `mm`", "confidence": "certain", "where": "mlp"}
    seen = {"step": 3, "micro": 1, "phase": "forward", "op": "aten.mm.default"}
    expected = {"code": "NS101", "title": "in `add`", "confidence": "likely", "where": "t5"}
    nowhere = dict.fromkeys(seen)

    def read(*findings: dict[str, Any]) -> Said:
        (tmp_path / "found").mkdir(exist_ok=True)
        summary = {"incidents": [], "findings": findings}
        for name, text in (
            ("found/summary.json", json.dumps(summary)),
            ("stdout", ""),
            ("stderr", ""),
            ("ended.json", json.dumps({"code": 0, "seconds": 1.0})),
        ):
            (tmp_path / name).write_text(text)
        return said_in(record("nanstop", ["case.py"], tmp_path))

    first = read(found | seen, expected | nowhere)
    assert (first.step, first.micro, first.phase) == (3, 1, "forward")
    assert (first.ops, first.modules) == (("aten.mm.default",), ("mlp",))
    assert first.answers[0] == ("NS209", "certain")
    only = read(expected | nowhere)
    assert (only.step, only.phase, only.ops, only.modules) == (None, None, (), ("t5",))
