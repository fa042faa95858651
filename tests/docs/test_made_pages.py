"""Pages of the site that are made from the code: from any symptom to its finding."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def made(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import site_pages

    yield site_pages
    for module in ("site_pages", "generate_docs"):
        sys.modules.pop(module, None)


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_every_finding_is_behind_a_symptom_and_leads_back_to_it(made, lang):
    sections = made.symptom_sections(lang)
    anchors = set(re.findall(r"\{ #(\S+) \}", sections))
    assert set(re.findall(r"\(#(\S+?)\)", made.symptom_table(lang))) == anchors
    for rule in made.CATALOGUE:
        assert f"(../findings/{rule.code}.md)" in sections
        back = re.findall(r"troubleshooting/index\.md#(\S+?)\)", made.finding(rule, lang))
        assert back
        assert set(back) <= anchors


def test_a_symptom_has_what_explain_has_in_that_order(made):
    from nanstop.diagnose.symptoms import findings_that_log

    section = (
        made.symptom_sections("en").partition("{ #loss-0-grad_norm-nan }")[2].partition("## ")[0]
    )
    codes = [fit.rule.code for fit in findings_that_log("loss 0, grad_norm nan")]
    assert re.findall(r"findings/(NS\d+)\.md", section) == codes
    assert "{'loss': 0.0, 'grad_norm': nan}" in section


def test_errors_of_examples_lead_to_their_findings(made):
    row = next(line for line in made.message_table("en").splitlines() if "FP16 gradients" in line)
    assert "NS102" in row


def test_the_command_line_has_every_command_and_option(made):
    import typer.main

    from nanstop.cli import app

    page = made.command_line()
    for name, command in typer.main.get_command(app).commands.items():
        if command.hidden:
            continue
        assert f"## nanstop {name} " in page
        for parameter in command.params:
            if not getattr(parameter, "hidden", False):
                assert parameter.opts[0].lower() in page.lower() or parameter.metavar in page


def test_the_comparison_is_the_scoreboards(made):
    rows = [line.split("|") for line in made.comparison().splitlines()]
    assert {len(row) for row in rows} == {len(made.KEPT) + 3}
    assert rows[2][1].strip() == "nanstop"


def test_what_is_named_of_silent_faults_is_what_the_page_of_results_says(made):
    first, last = map(int, made.silent_named())
    text = (ROOT / "docs" / "silent.md").read_text()
    assert first < last
    assert text.index(f"| all | {first}/") < text.index(f"| all | {last}/")
    marked = made.markers("en")
    page = (ROOT / "docs" / "site" / "comparison.md").read_text()
    assert {one for one in marked if "silent" in one} <= set(re.findall("<!-- .*? -->", page))


def test_the_search_knows_what_people_say_of_each_finding(made):
    for rule in made.CATALOGUE:
        known = made.searched(f"findings/{rule.code}.md", "en")
        assert known["search"]["boost"] > 1
        assert rule.code == "NS000" or known["tags"]
    assert "loss 0.0 grad_norm nan" in made.searched("troubleshooting/index.md", "en")["tags"]
    assert made.searched("results/silent.md", "en") == {"search": {"boost": 0.3}}
    assert made.searched("tutorial.md", "zh") == {}
