"""The inverse of the Trainer's log filter, held against the Trainer's own arithmetic in float32
tensors.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnose.evidence import series
from nanstop.diagnose.evidence.log_filter import decode_logged, explain_number, filtered
from nanstop.diagnose.findings.logs.ns801_log_hides_failure import RULE
from nanstop.records import Evidence, RunFacts

FACTS = RunFacts(nan_inf_filter=True, num_micro=2)
LOSS = st.floats(min_value=0.0625, max_value=20.0, width=32)
BAD = st.sampled_from([math.nan, math.inf, -math.inf])


def trainer_logs(windows, divide=False):
    """What transformers' Trainer logs:
    its running tensor, its counters and its order of operations.
    """
    tr_loss = torch.tensor(0.0)
    global_step = last_logged = 0
    logs = []
    for window in windows:
        for losses in window:
            for loss in losses:
                tr_loss_step = torch.tensor(loss / len(losses) if divide else loss)
                if torch.isnan(tr_loss_step) or torch.isinf(tr_loss_step):
                    tr_loss += tr_loss / (1 + global_step - last_logged)
                else:
                    tr_loss += tr_loss_step
            global_step += 1
        logs.append(tr_loss.item() / (global_step - last_logged))
        tr_loss -= tr_loss
        last_logged = global_step
    return logs


@st.composite
def failing_windows(draw):
    num_micro = draw(st.integers(1, 4))
    one = st.one_of(LOSS, BAD)
    step = st.lists(one, min_size=num_micro, max_size=num_micro)
    window = draw(st.lists(step, min_size=1, max_size=6))
    window[draw(st.integers(0, len(window) - 1))][0] = draw(BAD)
    return window


@settings(deadline=None)
@given(failing_windows(), st.booleans())
def test_decoded_number_is_what_the_trainer_logged(window, divide):
    (logged,) = trainer_logs([window], divide)
    decoded = decode_logged(logged, window)
    bad = [
        (s, m)
        for s, losses in enumerate(window)
        for m, x in enumerate(losses)
        if not math.isfinite(x)
    ]
    assert (decoded.first_step, decoded.first_micro) == bad[0]
    assert (decoded.num_bad, decoded.num_losses) == (len(bad), len(window) * len(window[0]))
    assert (decoded.before is None) == (bad[0] == (0, 0))


@settings(deadline=None)
@given(st.lists(st.lists(LOSS, min_size=2, max_size=2), min_size=1, max_size=6))
def test_a_window_without_failures_hides_nothing(window):
    assert decode_logged(trainer_logs([window])[0], window) is None


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), LOSS, st.data())
def test_number_alone_gives_the_step_and_the_loss_before(num_steps, num_micro, loss, data):
    first = data.draw(st.integers(0, num_steps - 1))
    window = [[loss if step < first else math.nan] * num_micro for step in range(num_steps)]
    (logged,) = trainer_logs([window], divide=True)
    readings = explain_number(logged, num_steps=num_steps, num_micro=num_micro)
    match = [reading for reading in readings if reading.first_step == first]
    assert len(match) == 1
    if first:
        assert match[0].before == pytest.approx(loss, rel=1e-4)
    else:
        assert match[0].before is None


def test_the_number_of_trl_issue_2367():
    assert pytest.approx(1.19e34, rel=1e-3) == 13**32 * 0.672 / 25
    (reading,) = explain_number(1.19e34, num_steps=25, num_micro=32)
    assert reading.first_step == 1
    assert reading.before == pytest.approx(0.672, rel=1e-3)
    assert reading.num_bad == 24 * 32


def test_a_replaced_loss_is_not_taken_for_the_filter():
    window = [[1.0, math.nan], [3.0, 4.0]]
    honest = (1.0 + 2.0 + 3.0 + 4.0) / 2
    assert filtered(window) != pytest.approx(honest)
    assert decode_logged(honest, window) is None


def test_a_log_of_nan_hides_nothing():
    assert decode_logged(math.nan, [[math.nan]]) is None


def run(windows, **facts):
    logs = trainer_logs(windows)
    raw = [(step, loss) for step, losses in enumerate(itertools.chain(*windows)) for loss in losses]
    ends, end = [], 0
    for window in windows:
        end += len(window)
        ends.append(end)
    return Evidence(
        facts=RunFacts(**({"nan_inf_filter": True, "num_micro": 2} | facts)),
        series=(
            series("loss_logged", logs, ends),
            series("loss_raw", [loss for _, loss in raw], [step for step, _ in raw]),
        ),
    )


HEALTHY = [[1.0, 2.0], [3.0, 4.0]]
BROKEN = [[1.0, 2.0], [math.nan, math.nan]]
DEAD = [[math.nan, math.nan], [math.nan, math.nan]]


def test_finding_names_the_first_failure_and_the_last_real_loss():
    diagnosis = RULE.check(run([HEALTHY, BROKEN]))
    assert diagnosis.confidence == "certain"
    assert "2 of 4 losses were not finite, the first at step 3, micro-batch 0" in diagnosis.cause
    assert "which made their sum 2.25 times as large" in diagnosis.cause
    assert diagnosis.lines[0] == "the real loss before it was 3 on average"


def test_finding_explains_zero():
    diagnosis = RULE.check(run([HEALTHY, DEAD]))
    assert diagnosis.title.startswith("the logged loss 0 is not the real one")
    assert "and there was none: 0" in diagnosis.cause


def test_finding_without_raw_losses_is_only_likely():
    evidence = Evidence(
        facts=RunFacts(nan_inf_filter=True, num_micro=32),
        series=(series("loss_logged", [1.19e34], [25]),),
    )
    diagnosis = RULE.check(evidence)
    assert diagnosis.confidence == "likely"
    assert diagnosis.lines[0] == "the real loss before it was 0.6719 on average"


@pytest.mark.parametrize(
    "evidence",
    [
        run([HEALTHY, HEALTHY]),
        run([HEALTHY, BROKEN], nan_inf_filter=False),
        Evidence(
            facts=FACTS, series=(series("loss_logged", [0.0], [4]), series("grad_norm", [0.4], [4]))
        ),
        Evidence(facts=FACTS, series=(series("loss_logged", [0.7], [4]),)),
        Evidence(facts=FACTS),
    ],
    ids=["healthy", "filter off", "zero with a gradient", "ordinary", "no log"],
)
def test_nothing_hidden(evidence):
    assert RULE.check(evidence) is None
