"""What a notebook shows of runs, findings and plans: pages in frames of their own."""

import re
from dataclasses import replace
from html import unescape

import nanstop
from nanstop.commands.plan.plan import Plan
from nanstop.records import Atom, PrecisionPlan, Series
from nanstop.report.html.notebook import report_html
from nanstop.report.run_report import Findings, RunReport
from nanstop.store.incidents import Store
from report.hostile import MARKUP, spoiled
from report.specimens import FINDING, REPORT

LOSSES = Series(name="loss_raw", steps=tuple(range(9)), values=tuple(9.0 - i for i in range(9)))


def page(html):
    """The page in a frame, which may run no script."""
    found = re.fullmatch(
        r'<iframe sandbox="" title="[^"]*" style="[^"]*" srcdoc="([^"]*)">\s*</iframe>', html
    )
    assert found is not None, html[:300]
    return unescape(found[1])


def test_a_run_with_an_incident_is_the_page_of_its_report():
    shown = page(RunReport((REPORT,), (FINDING,), 9, 1.0, exit=0, series=(LOSSES,))._repr_html_())
    assert "error[NS201]" in shown
    assert "9 steps in 1 s, ended well, 1 incident" in shown
    assert shown.count("<svg") >= 1
    assert FINDING.code in shown
    assert "<script" not in shown
    assert "<a " not in shown  # a fragment's base is the page around the frame


def test_a_run_without_one_is_its_numbers_and_what_was_found():
    shown = page(RunReport((), (FINDING,), 9, 1.0, series=(LOSSES,))._repr_html_())
    assert "9 steps in 1 s, no incident, 1 finding" in shown
    assert f"warning[{FINDING.code}]" in shown
    assert "<svg" in shown
    assert "<script" not in shown


def test_findings_are_a_tuple_and_a_page():
    found = Findings((FINDING,))
    assert found == (FINDING,)
    assert repr(found) == repr((FINDING,))
    assert f"warning[{FINDING.code}]" in page(found._repr_html_())
    assert "nothing found" in page(Findings()._repr_html_())


def test_a_plan_hangs_over_the_modules():
    island = Atom(remedy="island", target="model.layers.1.norm", value="float32")
    shown = page(Plan(PrecisionPlan(dtype="float16", remedies=(island,)))._repr_html_())
    assert "the model: float16" in shown
    assert '<div class="fact wide">float32' in shown
    assert "model.layers.1.norm" in shown


def test_hostile_texts_leave_neither_page_nor_frame():
    html = report_html(spoiled(REPORT))
    assert MARKUP not in html
    assert "<script" not in html
    assert "alert(1)</script>" not in page(html)


def test_two_runs_share_their_charts_and_say_where_they_part(tmp_path):
    for name, factor in (("a", 1.0), ("b", 2.0)):
        values = tuple(v * (factor if i > 4 else 1.0) for i, v in enumerate(LOSSES.values))
        (tmp_path / name).mkdir()
        Store(tmp_path / name).write_series((replace(LOSSES, values=values),))
    found = nanstop.compare(tmp_path / "a", tmp_path / "b")
    assert found.record.step == 5
    assert "they part at step 5, in loss_raw" in str(found)
    shown = page(found._repr_html_())
    assert shown.count("<svg") == 1
    assert "they part at step 5" in shown
    for kind in ("run-a", "run-b", "parts"):
        assert f'class="swatch {kind}"' in shown


def test_every_text_is_escaped():
    hostile = replace(FINDING, title="<script>alert(1)</script>", cause="a & b")
    made = report_html(replace(REPORT, diagnoses=(hostile,)))
    assert "<script>" not in made
    assert "&lt;script&gt;" in page(made)
    assert "a &amp; b" in page(made)
