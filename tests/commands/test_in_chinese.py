"""What the commands that try a training say, in Chinese to the last word."""

import pytest

from nanstop.commands.bisect.result import BisectResult, KeyDifference
from nanstop.commands.bisect.result import render as of_bisect
from nanstop.commands.doctor.result import INJECTED, Doctor, Guard, GuardRow, InjectedRow
from nanstop.commands.doctor.text import render as of_doctor
from nanstop.commands.lr_range.curve import LrRange
from nanstop.commands.lr_range.lr_range import render as of_lr_range
from nanstop.commands.plan.text import render as of_plan
from nanstop.language.translate import translated, untranslated
from nanstop.records import Agreement, Calibration, PlanCost, PrecisionPlan
from nanstop.report.text.wrapping import columns

DOCTOR = Doctor(
    host="the loop",
    failures=tuple(
        InjectedRow(
            injected=case,
            tried=True,
            reaches_weights=case != "norm_overflow",
            outcome="212 weights are not finite, training goes on",
        )
        for case in INJECTED
    ),
    guards=(
        GuardRow(
            guard=Guard(name="gradient clipping (max_norm=1)", kind="clip"),
            acts=("does nothing", "does nothing", "makes it worse", "only logs", "stops the write"),
        ),
        GuardRow(guard=Guard(name="the loop", kind="host"), acts=("does nothing",) * 5),
    ),
    trials=(),
)
LR_RANGE = LrRange(
    status="found",
    low=1e-3,
    high=2e-2,
    begins=1e-3,
    steepest=1e-2,
    lowest=3e-2,
    lowest_loss=0.2,
    first_loss=1.3,
    noise=0.01,
    diverges=0.5,
    rates=(1e-3, 0.5),
    losses=(1.3, 0.2),
)
BISECT = BisectResult(
    status="found",
    minimal=("--scale",),
    sufficient_fix=("--scale",),
    inseparable=("--scale",),
    flaky=(("--lr",),),
    differences=(
        KeyDifference(key="--scale", bad="1e4", good="1"),
        KeyDifference(key="--lr", bad="0.1", good="0.01"),
    ),
    folder="/tmp/x",
)
PLAN = PrecisionPlan(
    agreement=Agreement(
        loss_gap=1e-3,
        grad_cosine=0.9999,
        num_updates=3,
        update_loss_gap=1e-4,
        update_loss_bound=2e-3,
        update_share=0.99,
        headroom_bits=3.1,
        headroom_at="a.b",
        matmul_share=0.96,
    ),
    cost=PlanCost(casts=-2, bytes=4096),
    calibration=Calibration(
        num_batches=3,
        num_tokens=960,
        num_padded=1,
        num_unseen=1,
        trials=5,
        seconds=3.2,
        complete=False,
        data="the first window of the training",
    ),
)


@pytest.mark.parametrize(
    "text",
    [of_lr_range(LR_RANGE, "plot.json"), of_bisect(BISECT), of_plan(PLAN)],
    ids=["lr-range", "bisect", "plan"],
)
def test_a_command_says_no_english_word(text):
    lines = translated(text, "zh").splitlines()
    assert not {word for line in lines for word in untranslated(line)} - {"plot"}
    assert len(lines) == len(text.splitlines())


def test_doctor_says_no_english_word_in_columns(monkeypatch):
    english = of_doctor(DOCTOR)
    assert "REACHES THE WEIGHTS: 212" in english
    monkeypatch.setenv("NANSTOP_LANG", "zh")
    lines = of_doctor(DOCTOR).splitlines()
    assert not {word for line in lines for word in untranslated(line)}
    became = [line for line in lines if "212" in line]
    assert len(became) == 5
    assert len({columns(line[: line.index("212")].rpartition("  ")[0]) for line in became}) == 1
    assert len(lines) == len(english.splitlines())
