"""What a page leaves out because it says nothing, and what it says in Chinese to the last word."""

import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from nanstop.language.translate import untranslated
from nanstop.records import Action, Atom, AuditEntry, Position, RunFacts, Series
from nanstop.report.html.charts import Scale
from nanstop.report.html.exponents import histograms
from nanstop.report.html.headroom import heat_map
from nanstop.report.html.page import html_page
from nanstop.report.html.run_record import RunRecord
from nanstop.report.html.sheet import Sheet, lines_of, sheet_page
from nanstop.report.html.timeline import marked
from nanstop.store.summary import Summary, summary_row
from report.specimens import AT, EVENT, GROWTH, INCIDENT, LOCALIZATION, REPORT, UNSOLVED

STEPS = tuple(range(8))
SERIES = (
    Series(name="loss_raw", steps=STEPS, values=tuple(1.0 + step for step in STEPS)),
    Series(name="grad_norm", steps=STEPS, values=(math.nan, *STEPS[1:])),
)
UNSAID = ("pre", "code", "script", "style", "dd", "span")
"""Elements of names, of the user's own code, and of what other libraries are called."""
VOID = {"meta", "path", "circle", "rect", "line"}


class Prose(HTMLParser):
    """The texts of a page that are no code, no part of the manual, and no finding's own."""

    def __init__(self, page):
        super().__init__()
        self.open, self.texts = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append((tag, dict(attrs).get("class", "")))

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        self.open.pop()

    def handle_data(self, data):
        tags = {tag for tag, _ in self.open}
        kinds = {kind.partition(" ")[0] for _, kind in self.open}
        if data.strip() and not tags & {*UNSAID, "td"} and not kinds & {"manual", "block"}:
            self.texts.append(data.strip())


def page_of(*reports, lang="en", **run):
    return html_page(RunRecord(reports=reports, **run), lang=lang)


def proof_columns(page):
    table = re.search(r'<table class="trials">.*?</thead>', page, re.DOTALL)[0]
    return re.findall(r'<th scope="col">([^<]*)</th>', table)


def test_a_column_in_which_nothing_stands_is_left_out():
    whole = ["run", "outcome", "loss", "loss to float32", "gradient cosine", "seconds"]
    assert proof_columns(page_of(REPORT)) == whole
    proof = REPORT.proof
    bare = [replace(one, loss_gap=None, grad_cosine=None) for one in proof.passing]
    baseline = replace(proof.baseline, grad_cosine=None)
    bare = replace(
        proof, passing=tuple(bare), alternatives=(), ablations=(baseline,), baseline=baseline
    )
    assert proof_columns(page_of(replace(REPORT, proof=bare))) == [*whole[:3], "seconds"]
    found = replace(LOCALIZATION, positions=(Position(sample=2),))
    page = page_of(replace(REPORT, localization=found))
    assert '<th scope="col">sample</th>' in page
    assert "first token" not in page


def test_a_failure_that_comes_again_is_marked_each_time():
    again = [replace(AT, step=step) for step in (500, 600)]
    audit = [AuditEntry(at=at, action=Action(kind="continue")) for at in again]
    skip = AuditEntry(at=replace(AT, step=600), action=Action(kind="skip"))
    marks = marked((replace(REPORT, audit=(*REPORT.audit, *audit, skip)),))
    assert marks == {"incident": (412, 500), "skip-mark": (600,)}


def test_of_very_many_failures_the_first_of_each_kind_are_marked():
    entries = (
        AuditEntry(at=replace(AT, step=step), action=Action(kind="continue")) for step in range(300)
    )
    often = replace(REPORT, audit=tuple(entries))
    steps = marked((often, REPORT))["incident"]
    assert len(steps) == 100
    assert AT.step in steps


@pytest.mark.parametrize(
    ("exponents", "ends"),
    [
        (((81, 3), (99, 1)), ["end of bf16 and fp32"]),
        (((2, 9), (3, 9)), ["end of fp8 e4m3", "end of fp8 e5m2", "end of fp16"]),
        (((125, 1),), ["end of bf16 and fp32"]),
    ],
)
def test_values_are_drawn_against_the_end_that_they_may_meet(exponents, ends):
    event = replace(EVENT, inputs=(replace(EVENT.inputs[0], exponents=exponents),), outputs=())
    (found,) = histograms(event, "name", draw=False)
    assert [label for _, label in found.key] == ends


def test_counts_are_whole_numbers():
    ticks = Scale.of((0.5, 1.0)).ticks(whole=True)
    assert [tick["label"] for tick in ticks] == ["1"]


def test_a_mask_is_no_step_of_growth():
    full = replace(GROWTH.outputs[0], dtype="float32", absmax=3.4028234663852886e38)
    mask = replace(GROWTH, op="aten.add.Tensor", outputs=(full,))
    found = replace(LOCALIZATION, growth=(mask, GROWTH))
    page = page_of(replace(REPORT, localization=found))
    assert "add, forward" not in page
    assert "1. mul, forward" in page


def test_modules_that_were_looked_at_are_a_heat_map_of_their_own_format():
    points = {
        "room 0000 float16 model.a": [(1, 1.0), (9, 0.25)],
        "room 0001 bfloat16 model.b": [(1, 60.0)],
        "room 0002 float16 model.c": [(1, 9.0)],
        "room of nothing": [(1, 9.0)],
    }
    found = heat_map(points, RunFacts())
    assert (found.dtype, found.steps) == ("float16", (1, 9))
    assert [(name, [cell and cell.text for cell in cells]) for name, cells in found.rows] == [
        ("a", ["1.0", "0.2"]),
        ("c", ["9.0", None]),
    ]


def test_where_no_code_is_known_the_manual_stands_beside_what_is():
    atom = Atom(remedy="drop_sample", target="0:2")
    report = replace(REPORT, proof=replace(REPORT.proof, minimal=(atom,)))
    page = page_of(report)
    assert "leave sample 2 of micro-batch 0 out where the data is loaded" in page
    assert "<code>dataset.filter(...)</code>" in page
    assert "What the page of the finding says:" in page
    assert "What the page of the finding says:" not in page_of(REPORT)


def test_a_page_in_chinese_is_chinese_to_the_last_word():
    summary = Summary(incidents=(summary_row(REPORT),), steps=24, seconds=35.3, ended="clean")
    counted = replace(EVENT.inputs[0], exponents=((-3, 7), (15, 2)), zeros=2)
    report = replace(
        REPORT,
        incident=replace(INCIDENT, batch=()),
        localization=replace(LOCALIZATION, first_bad=replace(EVENT, inputs=(counted,))),
    )
    page = page_of(report, UNSOLVED, summary=summary, series=SERIES, lang="zh")
    left = {text: words for text in Prose(page).texts if (words := untranslated(text))}
    names = {"nanstop", "python", "autocast", "mul"}
    assert {text: words for text, words in left.items() if not set(words) <= names} == {}


def test_other_pages_are_in_the_language_that_is_asked_for(monkeypatch):
    sheet = Sheet(title="Precision plan", said=(lines_of("at most 30 s left"),))
    assert "<h1>Precision plan</h1>" in sheet_page(sheet)
    monkeypatch.setenv("NANSTOP_LANG", "zh")
    page = sheet_page(sheet)
    assert "<h1>精度方案</h1>" in page
    assert "至多还需 30 秒" in page
