from dataclasses import replace

import pytest

from diagnose import training_cases as training
from diagnose.evidence import (
    batch_fact,
    event,
    evidence,
    half_head,
    localization,
    series,
    state_row,
    stats,
)
from diagnose.test_checks import COUNT, NO_TOKEN, NONE_KEPT, NORMS, TOO_LONG
from nanstop.diagnose.catalogue import CATALOGUE
from nanstop.diagnose.diagnose import diagnose, examine
from nanstop.records import Evidence, Experiment, Replay, RunFacts, Signal

CODES = {rule.code for rule in CATALOGUE}
LOG_OF_ZERO = event(op="aten.log.default", dtype="float32", wider="nonfinite", bad={"neginf": 1})
OVERFLOW = localization(event(wider="finite"))


def codes(given, when="incident"):
    return [diagnosis.code for diagnosis in diagnose(given, when)]


def test_rules_name_known_codes_only():
    assert {code for rule in CATALOGUE for code in (*rule.yields_to, *rule.beside)} <= CODES
    assert all(rule.code not in (*rule.yields_to, *rule.beside) for rule in CATALOGUE)


def test_cause_comes_with_the_standing_fact_that_made_it():
    facts = RunFacts(autocast="float16", model_type="gemma3_text")
    overflow, narrow = diagnose(evidence(OVERFLOW, facts), "incident")
    assert (overflow.code, overflow.accompanied_by) == ("NS201", ("NS101",))
    assert (narrow.code, narrow.accompanied_by) == ("NS101", ())


def test_update_comes_with_half_trainables():
    found = localization(event(phase="optimizer"), reaches=("score.weight",))
    update, *beside = diagnose(evidence(found, half_head()), "incident")
    assert update.accompanied_by == ("NS102", "NS110")
    assert [one.code for one in beside] == ["NS102", "NS110"]


def test_an_update_that_is_too_long_is_of_the_moments_that_were_seen_to_vanish():
    fused = half_head(fused=True)
    seen = evidence(TOO_LONG, fused, lost_moments=(state_row(500),))
    first, update, beside = diagnose(seen, "incident")
    assert (first.code, first.confidence, first.accompanied_by) == ("NS110", "certain", ("NS102",))
    assert (update.code, update.confidence, beside.code) == ("NS402", "likely", "NS102")


@pytest.mark.parametrize("rows", [(), (state_row(5),), (replace(state_row(500), parameter="k"),)])
def test_moments_that_were_not_seen_to_vanish_made_no_update_too_long(rows):
    given = evidence(TOO_LONG, half_head(fused=True), lost_moments=rows)
    assert codes(given)[:2] == ["NS402", "NS102"]


def test_moments_that_vanish_are_beside_weights_that_are_broken():
    broken = localization(event(phase="optimizer"), reaches=("q.weight",))
    given = evidence(broken, half_head(), lost_moments=(state_row(500),))
    assert codes(given) == ["NS402", "NS102", "NS110"]


def test_a_gradient_that_overflows_under_a_scale_that_nothing_takes_off_is_no_formats_fault():
    """A scaler that is used leaves such updates out and lowers its scale."""
    misused = RunFacts(host="loop", autocast="float16", scaler=65536.0, sinks=("update",))
    overflown = localization(event(phase="backward", wider="finite"))
    assert codes(evidence(overflown, misused)) == ["NS112"]
    assert codes(evidence(overflown, replace(misused, scaler=1.0)))[0] == "NS301"
    assert codes(evidence(OVERFLOW, misused)) == ["NS112", "NS201"]


def test_specific_withdraws_general():
    empty = [batch_fact("labels", num_supervised=0)]
    read = (stats("float32"), stats("int64"))
    division = event(
        op="aten.nll_loss_forward.default", dtype="float32", wider="nonfinite", inputs=read
    )
    assert codes(evidence(localization(division), batch=empty)) == ["NS503"]
    masked = event(fully_masked_rows=1, bad={"nan": 2}, wider="nonfinite")
    assert codes(evidence(localization(masked))) == ["NS202"]
    kernel = event(wider="finite", reference="finite")
    assert codes(evidence(localization(kernel))) == ["NS602"]


@pytest.mark.parametrize(("outcome", "code"), [("finite", "NS207"), ("nonfinite", "NS204")])
def test_what_grows_as_an_exponential_is_told_by_a_smaller_argument(outcome, code):
    read = (stats("float32", absmax=900.0),)
    grown = event(op="aten.special_i1.default", dtype="float32", wider="nonfinite", inputs=read)
    given = evidence(localization(grown))
    ((asked, change),) = examine(given, "incident").open
    assert asked == "NS207"
    made = Experiment(code=asked, change=change, outcome=outcome)
    assert codes(replace(given, experiments=(made,))) == [code]


@pytest.mark.parametrize(
    ("given", "code"), [(COUNT, "NS205"), (NORMS, "NS206"), (LOG_OF_ZERO, "NS207")]
)
def test_division_and_logarithm_have_codes_of_their_own(given, code):
    assert codes(evidence(localization(given))) == [code]


def test_symptom_follows_the_cause_even_when_it_is_more_certain():
    falling = series("scale", [2.0**-n for n in range(12)])
    given = evidence(
        localization(event(phase="backward")), RunFacts(scaler=65536.0), series=(falling,)
    )
    first, second = diagnose(given, "incident")
    assert (first.code, first.confidence) == ("NS301", "likely")
    assert (second.code, second.confidence) == ("NS302", "certain")
    assert first.accompanied_by == ("NS302",)


def test_certain_before_likely():
    given = evidence(
        localization(event(), "from_batch", culprit="batch[x]"),
        batch=[batch_fact(minimum=-1.0)],
        signals=(Signal(source="exception", message="index out of range in self"),),
    )
    assert codes(given) == ["NS501", "NS502"]


def test_unexplained_incident_is_not_established():
    (only,) = diagnose(evidence(), "incident")
    assert only.code == "NS000"
    assert only.page == "docs/rules/NS000.md"


def test_not_established_gives_way_to_any_cause():
    replay = Replay(incident="0001", fidelity="not_reproduced", runs=2)
    assert codes(evidence(replay=replay)) == ["NS603"]


def test_log_artefact_alone_establishes_no_cause():
    raw = series("loss_raw", [1.0, float("nan")])
    logged = series("loss_logged", [0.75], [2])
    facts = RunFacts(nan_inf_filter=True)
    assert codes(evidence(facts=facts, series=(raw, logged))) == ["NS000", "NS801"]


def test_kinds_are_kept_apart():
    given = evidence(OVERFLOW, half_head())
    assert codes(given, "static") == ["NS102", "NS110"]
    assert "NS102" not in codes(given, "incident")
    assert codes(Evidence(), "static") == codes(Evidence(), "gauge") == codes(Evidence()) == []


def test_a_rule_that_raises_loses_no_other():
    def broken(_):
        raise KeyError("old record")

    catalogue = [
        replace(rule, check=broken) if rule.code == "NS501" else rule for rule in CATALOGUE
    ]
    given = evidence(OVERFLOW, batch=[batch_fact("x", "float32", num_bad=1)])
    examination = examine(given, "incident", catalogue)
    assert [one.code for one in examination.diagnoses] == ["NS201"]
    assert examination.failures == ("NS501: KeyError: 'old record'",)


def test_scaler_signal_without_localization_is_the_collapse():
    assert codes(evidence(signals=(Signal(source="scaler"),))) == ["NS302"]


def test_masks_that_overflow_are_no_masks_without_a_key():
    assert codes(training.masked(training.sum_of_masks())) == ["NS203"]
    assert codes(training.masked()) == ["NS202"]


def test_what_clipping_would_have_done_stands_beside_the_cause():
    bad = (training.bad_gradients(1),)
    cause, beside = diagnose(
        evidence(training.ONE_SPOILED, training.CLIPPED, signals=bad), "incident"
    )
    assert (cause.code, beside.code) == ("NS304", "NS305")
    assert cause.accompanied_by == ("NS305",)


def test_what_clipping_has_done_is_all_that_is_known_where_nothing_can_be_run_again():
    assert codes(evidence(signals=(training.bad_gradients(1, num_zero=4),))) == ["NS305"]


def test_state_explains_the_update_that_it_broke():
    broken = localization(training.SQRT_OF_STATE)
    assert codes(evidence(broken, half_head(dtype="float32"))) == ["NS403"]
    assert "NS403" in codes(Evidence(facts=training.RESTORED), "static")


@pytest.mark.parametrize(
    "first_bad",
    [
        event(dtype="float32", wider="finite"),
        event(phase="backward", dtype="float32", wider="finite"),
        event(dtype="bfloat16", wider="finite"),
        event(dtype="float64", wider="nonfinite"),
    ],
)
def test_a_climb_explains_the_overflow_that_it_ends_in(first_bad):
    found = localization(first_bad)
    assert codes(training.climbing(training.LOSSES, training.GRADIENT_NORMS, found)) == ["NS404"]


def test_a_climb_explains_an_exponential_that_no_format_holds():
    """That of 4e5 is beyond float64 as well: it was no function without a value."""
    read = (stats("float32", absmax=4e5),)
    first_bad = event(op="aten.exp.default", dtype="float32", wider="nonfinite", inputs=read)
    given = training.climbing(training.LOSSES, training.GRADIENT_NORMS, localization(first_bad))
    assert codes(given) == ["NS207", "NS404"]


def test_a_climb_that_left_a_dead_model_is_told_by_its_peak():
    """Weights that an overflow was kept out of may give less than there was at the beginning."""
    found = localization(event(phase="backward", dtype="float32", wider="finite"))
    given = training.climbing((5.1, 8.6, 38.0, 190.0, 3.7), (4.2, 11.0, 52.0, 491.0, 5e4), found)
    (climb,) = (one for one in diagnose(given, "incident") if one.code == "NS404")
    assert "from 8.6 to 190 " in climb.cause


def test_a_climb_does_not_take_the_place_of_a_narrow_format():
    given = training.climbing(training.NARROW_LOSSES, training.NARROW_NORMS, OVERFLOW)
    assert codes(given) == ["NS201", "NS404"]


def test_bad_data_explains_an_outlier():
    spoiled = replace(training.FAR, num_bad=1)
    assert codes(evidence(training.IN_SAMPLE, batch=[spoiled]))[0] == "NS501"
    assert codes(evidence(training.IN_SAMPLE, batch=[training.FAR]))[0] == "NS504"


def test_one_rank_cannot_tell_a_race_from_another_rank():
    assert codes(training.reduced()) == ["NS606"]
    assert codes(training.reduced(facts=RunFacts())) == ["NS603"]


def test_every_finding_has_a_usual_cure_in_one_line():
    for rule in CATALOGUE:
        assert rule.usual_cure, rule.code
        assert "\n" not in rule.usual_cure
        assert "Cost:" not in rule.usual_cure
        assert f"1. {rule.usual_cure[:20]}" in rule.page


@pytest.mark.parametrize(("shape", "what"), [((8,), "sample"), ((2, 4), "token")])
def test_what_is_not_supervised_has_its_name(shape, what):
    kept = replace(NONE_KEPT, shape=shape)
    given = evidence(localization(NO_TOKEN, counted=("kept",)), batch=[kept])
    first = diagnose(given, "incident")[0]
    assert first.title == f"no supervised {what} in the micro-batch"
    assert any("decode" in line for line in first.lines) == (what == "token")
