"""Scripts that know nothing of nanstop:
bitwise the same watched and not, and never the worse for it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from foreign import compare  # noqa: E402
from foreign_runs import POLICIES, Left, Run, scripts  # noqa: E402
from foreign_verdict import wrong  # noqa: E402

LINE = {"step": 0, "loss": 2.0, "random": 7, "crc": 1, "finite": True}
END = {"end": True, "loss": 0.5, "random": 7, "crc": 9, "finite": True}


def left(**more: object) -> Left:
    given = {
        "code": 0,
        "steps": (LINE, LINE | {"step": 1}),
        "end": END,
        "raised": (),
        "said": (),
        "own": (),
        "stdout": "",
        "stderr": "",
        "unwatched": False,
        "seconds": 1.0,
    }
    return Left(**(given | more))  # type: ignore[arg-type]


def run(*, fault: str = "none", policy: str = "repair") -> Run:
    return Run(scripts(["ema"])[0], "fp32", fault, policy)


def test_there_are_25_scripts_and_each_has_a_fault():
    assert len(scripts()) >= 25
    assert all(script.faults and "fp32" in script.dtypes for script in scripts())


def test_a_script_that_names_nanstop_is_not_foreign():
    assert not [s.name for s in scripts() if "nanstop" in s.path.read_text()]


@pytest.mark.parametrize(
    ("watched", "seen"),
    [
        (left(), []),
        (left(code=1), ["exit 1, plain 0"]),
        (left(steps=(LINE, LINE | {"step": 1, "crc": 2})), ["differs from step 1 on: crc"]),
        (left(steps=(LINE,)), ["1 steps, plain 2"]),
        (left(end=END | {"crc": 8}), ["outputs differ"]),
        (left(said=("NS117 (finding)",)), ["said NS117 (finding)"]),
        (left(stderr="nanstop: hm\n"), ["stderr differs: 'nanstop: hm\\n'"]),
    ],
)
def test_in_health_nothing_may_differ(watched, seen):
    assert wrong(run(), left(), watched) == seen


def test_two_nans_are_no_difference():
    broken = left(steps=(LINE | {"loss": float("nan")},))
    again = left(steps=(LINE | {"loss": float("nan")},), said=("NS501",))
    assert wrong(run(fault="nan-in-batch", policy="observe"), broken, again) == []


@pytest.mark.parametrize(
    ("policy", "watched", "seen"),
    [
        ("repair", left(end=END | {"loss": 0.4}), []),
        ("repair", left(end=END | {"loss": 0.9}), ["loss 0.9 at the end, plain 0.5"]),
        ("repair", left(code=3, end=None), []),
        (
            "repair",
            left(code=3, end=None, steps=(LINE | {"crc": 3},)),
            ["stopped a run that ends well without nanstop"],
        ),
        ("stop", left(code=3, end=None, raised=("nanstop.TrainingStopped: x",)), []),
        ("skip", left(raised=("KeyError: 1",)), ["raised ['KeyError: 1'], plain nothing"]),
        (
            "repair",
            left(steps=(LINE, LINE | {"step": 1, "finite": False})),
            ["weights not finite after step 1, finite in the plain run"],
        ),
    ],
)
def test_with_a_fault_nothing_may_get_worse(policy, watched, seen):
    assert wrong(run(fault="nan-in-batch", policy=policy), left(), watched)[:1] == seen


def bad(rows):
    return {name: row["wrong"] for name, row in rows.items() if row["wrong"]}


@pytest.mark.slow
def test_scripts_are_none_the_worse_for_being_watched():
    runs = [
        Run(script, "fp32", "none", policy)
        for script in scripts(["two_optimizers", "wgan_gp"])
        for policy in ("plain", "observe", "repair")
    ]
    faulty = [Run(scripts(["ema"])[0], "fp32", "nan-in-batch", p) for p in ("plain", "repair")]
    rows = compare([*runs, *faulty], at_once=2)
    assert len(rows) == 5
    assert bad(rows) == {}
    assert rows["ema.fp32.nan-in-batch.repair"]["said"]


@pytest.mark.slow
@pytest.mark.parametrize("script", [s for s in scripts() if s.is_installed], ids=lambda s: s.name)
def test_every_script_is_none_the_worse_for_being_watched(script):
    runs = [
        Run(script, dtype, fault, policy)
        for dtype in script.dtypes
        for fault in ("none", *script.faults)
        for policy in ("plain", *POLICIES)
    ]
    assert bad(compare(runs, at_once=2)) == {}


def test_there_are_100_healthy_programs_that_name_no_tool_and_say_what_they_are():
    programs = scripts(folder=BENCHMARKS / "healthy")
    assert len(programs) + len(scripts()) >= 100
    assert not [one.name for one in programs if "nanstop" in one.path.read_text() or one.faults]
    assert all(one.path.read_text().startswith('"""') for one in programs)


@pytest.mark.slow
def test_a_program_without_options_is_watched_like_any_other():
    (program,) = scripts(["low_rank_adapters"], BENCHMARKS / "healthy")
    rows = compare([Run(program, "fp32", "none", policy) for policy in ("plain", "repair")])
    assert bad(rows) == {}
    assert rows["low_rank_adapters.fp32.none.repair"]["plain"]["steps"] == 30
