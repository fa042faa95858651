"""The page of a run: what is on it, that nothing in it runs, and how large it gets."""

import math
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanstop.errors import NanstopError
from nanstop.records import Action, AuditEntry, Environment, RunFacts, Series, Signal
from nanstop.records.of_commands.plan import PrecisionPlan, Region
from nanstop.report.html import charts, incident
from nanstop.report.html.charts import Chart, drawn
from nanstop.report.html.headroom import heat_map
from nanstop.report.html.incident import BATCH_COLUMNS, PROOF_COLUMNS
from nanstop.report.html.labels import CHINESE, labels
from nanstop.report.html.module_tree import Fact, module_tree
from nanstop.report.html.page import FOLDER, html_page
from nanstop.report.html.run_record import RunRecord
from nanstop.report.html.series import run_series, thinned
from nanstop.report.html.templates import template
from nanstop.report.html.timeline import CHARTS, COLUMNS, marked
from nanstop.report.text.terminal import render
from nanstop.rewrite.change import Rewrite
from nanstop.store.summary import FindingRow, Summary, summary_row
from report.hostile import MARKUP, RUNS, spoiled
from report.specimens import AT, EVENT, INCIDENT, LOCALIZATION, REPORT, UNSOLVED

NUMBERS = (Series(name="lr", steps=(0, 1), values=(1.0, 2.0)),)
FILTERS = template("page.html.jinja").environment.filters
VOID = {"meta", "path", "circle", "rect", "line"}


class Elements(HTMLParser):
    """The elements of a page, its text, and what stands in scripts; raises where tags cross."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.open, self.scripts, self.text = [], set(), [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.update(attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.update(attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.open and self.open[-1] != "style":
            self.text.append(data)

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


def page_of(*reports, **run):
    return html_page(RunRecord(reports=reports, **run))


def test_the_terminal_s_sentences_are_on_the_page():
    words = Elements(page_of(REPORT)).words
    for line in render(REPORT).splitlines():
        assert " ".join(line.split()) in words


@pytest.mark.parametrize("report", [REPORT, UNSOLVED], ids=["proven", "unsolved"])
def test_a_page_is_one_file_that_loads_nothing(report):
    found = Elements(page_of(report))
    assert "link" not in found.tags
    assert {value for name, value in found.attributes if name == "href"} <= {
        f"#{value}" for name, value in found.attributes if name == "id"
    }
    assert not {name for name, _ in found.attributes} & {"src", "style", "onclick", "srcset"}
    policy = next(value for _, value in found.attributes if value and "default-src" in value)
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


def test_every_id_is_given_once():
    page = page_of(REPORT, UNSOLVED, series=(Series(name="lr", steps=(0, 1), values=(1.0, 2.0)),))
    ids = re.findall(r' id="([^"]*)"', page)
    assert len(ids) == len(set(ids))


def test_the_proof_is_told_in_turn():
    words = Elements(page_of(REPORT)).words
    assert words.count("as it is micro-batch 0 fails") == 3
    assert "Proof: proven" in words


def test_a_trial_says_what_failed_in_it_and_what_it_cost():
    trial = replace(
        REPORT.proof.baseline, key=LOCALIZATION.key, grad_gap=0.25, peak_bytes=3 * 2**20
    )
    words = Elements(
        page_of(replace(REPORT, proof=replace(REPORT.proof, ablations=(trial,))))
    ).words
    key = LOCALIZATION.key
    assert f"what failed {key.kind} in `_to_copy`, {key.phase} at {key.module}" in words
    assert "to float32 0.25 memory at its peak 3 MiB fails" in words


def test_a_run_says_how_it_went_and_what_else_was_found():
    row = FindingRow(code="NS101", title="narrow", where="model", confidence="likely", step=3)
    summary = Summary(
        incidents=(summary_row(REPORT),),
        findings=(row,),
        steps=24,
        seconds=1.25,
        ended="oom_killed",
    )
    words = Elements(page_of(REPORT, summary=summary)).words
    assert "24 steps in 1.2 s, killed for its memory, 1 incident and 1 warning" in words
    assert "warning[NS101]: narrow, step 3 --> model = this finding is likely, not certain" in words


def test_a_plan_is_shown_over_the_modules():
    region = Region(modules=("model.layers.2.norm", "model.layers.3.norm"), reason="overflows")
    words = Elements(page_of(REPORT, plan=PrecisionPlan(dtype="float16", regions=(region,)))).words
    assert "the model: float16" in words
    assert "2.norm float32: overflows 3.norm float32: overflows" in words


def test_messages_of_exceptions_are_shown_when_asked_for():
    signal = Signal(source="exception", message="ValueError: the secret row", at=AT)
    report = replace(REPORT, incident=replace(INCIDENT, signals=(signal,)))
    run = RunRecord(reports=(report,))
    assert "secret" not in html_page(run)
    assert "the secret row" in html_page(run, show_text=True)


def test_an_incident_beyond_the_first_dozen_has_a_line():
    reports = [replace(REPORT, incident=replace(INCIDENT, id=f"{i:04d}")) for i in range(14)]
    words = Elements(page_of(*reports)).words
    assert words.count("Proof: proven") == 12
    assert "0013: error[NS201]: float16 overflow in _to_copy , step 412" in words


def test_without_the_library_that_draws_the_numbers_are_there(monkeypatch):
    monkeypatch.setattr(charts, "find_spec", lambda _: None)
    page = page_of(REPORT, series=(Series(name="lr", steps=(0, 1), values=(1.0, 2.0)),))
    assert "pip install nanstop[report]" in page
    assert "<svg" not in page
    assert "<details open>" in page


def test_a_page_needs_no_torch():
    code = (
        "import sys; from report.specimens import REPORT; from nanstop.report.html.page import *;"
        "html_page(RunRecord(reports=(REPORT,))); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=FOLDER, env=_environment())


def test_drawing_does_not_change_how_a_process_imports():
    code = (
        "import sys; finders = list(sys.meta_path); from nanstop.report.html.charts import *;"
        "drawn(Chart(name='a', title='', described='', lines=(('lr', ((0, 1.0), (1, 2.0))),)));"
        "assert 'pygal' in sys.modules and sys.meta_path == finders; import wave;"
        "assert 'importlib_metadata' not in sys.modules;"
        "from importlib.metadata import version; assert version('jinja2')"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


@pytest.mark.parametrize("kind", ["_py_etree", "_lxml_etree"])
def test_a_chart_is_drawn_with_the_elements_of_either_library(kind, monkeypatch):
    lines = (("lr", ((0, 1.0), (1, 2.0), (2, None), (3, 1.5))), ("nonfinite", ((2, 1.0),)))
    chart = Chart(name="a", title="A & b", described="<", lines=lines)
    expected = _elements(drawn(chart))
    etree = sys.modules["pygal.etree"].etree  # a process draws with lxml where it is installed
    monkeypatch.setattr(etree, "lxml", kind == "_lxml_etree")
    monkeypatch.setattr(etree, "_etree", getattr(etree, kind))
    assert _elements(drawn(chart)) == expected
    assert ("title", {"id": "a-title"}, "A & b") in expected


def _elements(svg):
    found = ElementTree.fromstring(svg).iter()
    return [(one.tag.partition("}")[2], dict(one.attrib), one.text) for one in found]


def _environment():
    import os
    from pathlib import Path

    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}


@pytest.mark.parametrize("name", RUNS)
def test_the_worst_runs_make_a_page_of_a_megabyte(name):
    page = html_page(RUNS[name]())
    found = Elements(page)
    assert len(page.encode()) <= 2**20
    assert found.scripts == [(FOLDER / "copy.js").read_text() + "addCopies(document);\n"]
    assert "img" not in found.tags
    assert not re.search("nan|inf", " ".join(re.findall(r' (?:d|cx|cy|x|y)="([^"]*)"', page)))


OF_A_RUN = {
    "earlier": (UNSOLVED,),
    "summary": Summary(
        findings=(FindingRow(code="NS101", title="t", where="w", confidence="likely"),)
    ),
    "series": (Series(name="range 0000 a", steps=(0, 1), values=(1.0, 2.0)),),
    "plan": PrecisionPlan(dtype="float16", regions=(Region(modules=("a.b",), reason="r"),)),
}


@settings(max_examples=15, deadline=None)
@given(st.text(min_size=1, max_size=40) | st.just(MARKUP))
def test_no_text_of_a_record_becomes_markup(text):
    command = replace(Environment(nanstop="0", python="3"), packages=(("a", "1"),))
    report = replace(REPORT, incident=replace(INCIDENT, environment=command))
    run = RunRecord(reports=(report,), **OF_A_RUN)
    plain, found = (Elements(html_page(spoiled(run, each), show_text=True)) for each in ("x", text))
    assert set(found.tags) == set(plain.tags)
    assert {name for name, _ in found.attributes} == {name for name, _ in plain.attributes}
    assert found.scripts == plain.scripts


def test_of_many_points_the_extremes_and_the_incidents_stay():
    points = [(step, math.sin(step)) for step in range(10_000)]
    points[4321], points[5678], points[777] = (4321, 1e6), (5678, -1e6), (777, math.nan)
    few = thinned(points, keep=(5001,), most=300)
    assert len(few) <= 310
    assert {0, 4321, 5678, 777, 5001, 9999} <= {step for step, _ in few}
    assert list(few) == sorted(few, key=lambda point: point[0])
    assert thinned(points[:300], most=300) == tuple(points[:300])


def test_a_step_is_told_once_and_an_incident_s_own_with_what_followed():
    noted = Series(name="loss_raw", steps=(410, 411, 412), values=(1.0, 2.0, math.nan))
    kept = Series(name="loss_raw", steps=(411, 412, 413), values=(2.0, 3.0, 4.0))
    report = replace(REPORT, incident=replace(INCIDENT, history=(noted,)))
    points = run_series((report,), (kept,))["loss_raw"]
    assert [step for step, _ in points] == [410, 411, 412, 412, 413]
    assert math.isnan(points[2][1])
    assert points[3:] == [(412, 3.0), (413, 4.0)]


def test_left_out_updates_are_marked_as_such():
    skip = AuditEntry(at=replace(AT, step=500), action=Action(kind="skip"))
    marks = marked((replace(REPORT, audit=(*REPORT.audit, skip)),))
    assert marks == {"incident": (412,), "skip-mark": (500,)}


def test_headroom_is_read_against_the_run_s_format():
    points = {
        "range 0000 model.a.x": [(0, 65504.0), (1, math.inf)],
        "range 0001 model.b": [(0, 1023.5), (2, 0.0)],
        "lr": [(0, 1.0)],
    }
    found = heat_map(points, RunFacts(autocast="float16"))
    assert (found.dtype, found.steps) == ("float16", (0, 1, 2))
    (first, (full, beyond, unseen)), (second, (free, _, zero)) = found.rows
    assert (found.parent, first, second) == ("model.", "a.x", "b")
    assert (full.text, beyond.text, beyond.level, unseen) == ("0.0", "not finite", 0, None)
    assert (free.text, free.level, zero.text) == ("6.0", 4, "all 0")
    assert heat_map({"lr": [(0, 1.0)]}, RunFacts()) is None


def test_modules_with_one_child_share_a_node():
    tree = module_tree([("model.layers.0.mlp", Fact("a")), ("model.layers.1", Fact("b"))])
    (layers,) = tree.children
    assert layers.name == "model.layers"
    assert [(node.name, node.facts[0].text) for node in layers.children] == [
        ("0.mlp", "a"),
        ("1", "b"),
    ]


def test_a_chart_without_a_finite_point_is_none():
    chart = Chart(name="a", title="t", described="d", lines=(("lr", ((0, None),)),))
    assert drawn(chart) == ""
    assert 'role="img"' in drawn(replace(chart, lines=(("lr", ((0, 1.0), (1, 1.0))),)))


def test_operands_are_drawn_by_exponent_where_they_were_counted():
    counts = ((-3, 7), (15, 2), (17, 1))
    read = replace(EVENT.inputs[0], exponents=counts, zeros=1)
    found = replace(LOCALIZATION, first_bad=replace(EVENT, inputs=(read,)))
    page = page_of(replace(REPORT, localization=found))
    assert "10 values from 2^-3 to 2^18, most near 2^-3; 1 zero" in page
    words = Elements(page).words
    assert "input: float32 [2, 32, 64]" in words
    assert "end of fp8 e4m3 end of fp8 e5m2 end of fp16" in words
    assert "by exponent" not in page_of(REPORT)


def test_one_step_is_no_line():
    page = page_of(REPORT, series=(Series(name="lr", steps=(3,), values=(0.5,)),))
    assert "<svg" not in page
    assert "of the first group: 1 value, first 0.5 at step 3" in Elements(page).words


SAID = re.compile(r'\bsay\((?:"((?:[^"\\]|\\.)*)"|\'((?:[^\'\\]|\\.)*)\')\)')
TABLE = re.compile(r'table\("([^"]*)", \(((?:"[^"]*"(?:, )?)+)\)')


def test_every_label_of_the_templates_has_its_chinese():
    said, columns = set(), {*PROOF_COLUMNS, *BATCH_COLUMNS, *COLUMNS}
    for file in FOLDER.glob("*.jinja"):
        text = file.read_text()
        said |= {(one or other).replace("\\'", "'") for one, other in SAID.findall(text)}
        for caption, names in TABLE.findall(text):
            columns |= {caption, *re.findall('"([^"]*)"', names)}
    charts = {title for title, _ in CHARTS} | {label for _, lines in CHARTS for _, label in lines}
    assert len(said) > 40
    in_chinese = labels("zh")
    assert sorted(one for one in said | columns if one not in CHINESE) == []
    assert sorted(one for one in charts if in_chinese(one) == one) == []


def test_a_page_in_chinese_is_one_and_reads_no_less():
    run = RunRecord(reports=(REPORT, UNSOLVED), series=NUMBERS)
    english, chinese = Elements(html_page(run)), Elements(html_page(run, lang="zh"))
    assert ("lang", "zh") in chinese.attributes
    headings = [
        [tag for tag in one.tags if tag in ("h1", "h2", "h3")] for one in (chinese, english)
    ]
    assert headings[0] == headings[1]
    for words in ("首先应做的改动", "时间线", "学习率", "动作记录", "发生了什么"):
        assert words in chinese.words
    assert "The change to make first" not in chinese.words
    with pytest.raises(NanstopError, match="language"):
        html_page(run, lang="de")


def test_what_a_code_means_is_on_the_page_and_leads_nowhere():
    found = Elements(page_of(REPORT))
    assert "What happened" in found.words
    assert "Fix safety" in found.words
    assert "https://github.com/" in found.words
    assert not [value for name, value in found.attributes if name == "href" and "http" in value]


def test_without_a_cure_the_page_of_the_finding_says_what_to_do():
    report = replace(REPORT, proof=None, diagnoses=(replace(REPORT.diagnoses[0], remedies=()),))
    words = Elements(page_of(report)).words
    assert "What to do about it No change of code is known here." in words
    assert "What to do about it" not in Elements(page_of(REPORT)).words


def test_a_run_that_found_something_and_met_nothing_has_a_page():
    row = FindingRow(
        code="NS112",
        title="scaled gradients are clipped",
        where="train.py:13",
        confidence="certain",
        step=0,
        cause="clipping came before `unscale_`",
        lines=("scaler.unscale_(optimizer) first",),
    )
    words = Elements(html_page(RunRecord(summary=Summary(findings=(row,)), series=NUMBERS))).words
    assert words.startswith("scaled gradients are clipped - nanstop")
    assert "= clipping came before `unscale_` = scaler.unscale_(optimizer) first" in words
    assert "What to do about it" in words
    assert "Learning rate" in words
    assert "Incident" not in words
    with pytest.raises(ValueError, match="there is none"):
        html_page(RunRecord())


def test_a_cell_of_the_heat_map_says_its_step_and_its_largest_value():
    ranges = Series(name="range 0000 model.norm", steps=(0, 8), values=(1.0, 40000.0))
    page = page_of(REPORT, series=(ranges,))
    assert 'title="step 8, largest 4e+04">0.7</td>' in page


def test_a_diff_is_copied_as_it_is_whatever_it_is_coloured_by():
    made = FILTERS["diff"]("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a < b\n+a > b\n c\n")
    text = Elements(f"<pre>{made}</pre>").text
    assert "".join(text) == "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a < b\n+a > b\n c\n"
    assert '<span class="removed">-a &lt; b\n</span>' in made


def test_a_change_that_was_written_is_shown_as_such(tmp_path, monkeypatch):
    record = tmp_path / "0000" / "report.json"
    record.parent.mkdir()
    run = RunRecord(reports=(REPORT,), records=(str(record),))
    stale = Rewrite(atoms=REPORT.proof.minimal, stale=("/x/train.py:12",))
    monkeypatch.setattr(incident, "change_for", lambda *_: stale)
    words = Elements(html_page(run)).words
    assert "The line has another text now than when it failed: train.py:12" in words
    (record.parent / "fix.diff").write_text("--- a/t\n+++ b/t\n-x\n+y\n")
    words = Elements(html_page(run)).words
    assert "The change that was written --- a/t +++ b/t -x +y" in words
    assert "to make first" not in words


def test_what_is_logged_after_a_step_stands_at_that_step():
    noted = (
        Series(name="loss_raw", steps=(0, 1, 2), values=(3.0, 2.0, 1.0)),
        Series(name="loss_logged", steps=(1, 2, 3), values=(3.0, 2.0, 1.0)),
    )
    words = Elements(page_of(UNSOLVED, series=noted)).words
    assert words.count("3 at step 0") == words.count("1 at step 2") == 4  # drawn and in the table
