"""The page that a run leaves: after an incident only, of the run's own numbers, and at no risk."""

import logging
import math
import time
from dataclasses import replace

import pytest

from incident_records import report
from nanstop.cli import main
from nanstop.records import Atom, PrecisionPlan, Series
from nanstop.report.page_file import write_folder_page, write_page
from nanstop.report.text.runs import render_runs
from nanstop.store.incidents import Store, load_series
from nanstop.store.summary import FindingRow, Summary, summary_row

KEPT = (Series(name="loss_raw", steps=(0, 1, 2), values=(3.0, 2.0, math.nan)),)


def store_with(folder, *reports):
    store = Store(folder)
    for _ in reports:
        store.open_incident()
    for one in reports:
        store.write_report(one)
    rows = tuple(summary_row(one) for one in reports)
    store.write_summary(Summary(incidents=rows, steps=3, seconds=1.0, exit=0))
    return store


def test_a_run_without_an_incident_leaves_and_reads_nothing(tmp_path):
    store = store_with(tmp_path)
    write_page(store, lambda: pytest.fail("numbers were read"))
    assert [one.name for one in tmp_path.iterdir()] == ["summary.json"]


def test_a_run_with_an_incident_leaves_its_page_and_its_last_numbers(tmp_path):
    plan = PrecisionPlan(remedies=(Atom(remedy="island", target="norm", value="float32"),))
    write_page(store_with(tmp_path, report()), lambda: KEPT, plan)
    page = (tmp_path / "report.html").read_text()
    assert "error[NS201]: overflow" in page
    assert "3 steps in 1 s, ended well, 1 incident" in page
    assert "keep `norm` in float32" in page
    assert str(tmp_path / "0000" / "report.json") in page
    (kept,) = load_series(tmp_path / "series.json")
    assert kept.steps == (0, 1, 2)


def test_a_finding_alone_leaves_a_page_too(tmp_path, capsys):
    store = Store(tmp_path)
    row = FindingRow(code="NS102", title="half head", where="w", confidence="certain", cause="why")
    store.write_summary(Summary(findings=(row,), steps=3, seconds=1.0, exit=0))
    write_page(store, lambda: KEPT)
    page = (tmp_path / "report.html").read_text()
    assert "warning[NS102]: half head" in page
    assert "= why" in page
    file = tmp_path / "again.html"
    assert main(["report", str(tmp_path), "--html", str(file)]) == 0
    assert "each micro-batch" in file.read_text()
    capsys.readouterr()


def test_the_first_of_several_ranks_writes_what_another_met(tmp_path):
    first, other = Store(tmp_path, "run"), Store(tmp_path, "run")
    first.reset()
    other.open_incident()
    met = report("0000", at=replace(report().incident.at, rank=1))
    other.write_report(met)
    other.write_summary(Summary(incidents=(summary_row(met),)))
    first.write_summary(Summary(steps=3, seconds=1.0, exit=0))
    plan = PrecisionPlan(remedies=(Atom(remedy="island", target="norm", value="float32"),))
    write_page(first, lambda: KEPT, plan)
    page = (tmp_path / "report.html").read_text()
    assert "error[NS201]: overflow" in page
    assert "each micro-batch" in page
    assert "keep `norm` in float32" in page


def test_a_run_begins_without_the_page_of_another(tmp_path):
    write_page(store_with(tmp_path, report()), lambda: KEPT)
    Store(tmp_path).reset()
    assert not (tmp_path / "report.html").exists()


def test_what_goes_wrong_is_one_line_of_the_log(tmp_path, caplog):
    def lost():
        raise RuntimeError("the device is gone")

    with caplog.at_level(logging.WARNING, "nanstop"):
        write_page(store_with(tmp_path, report()), lost)
    (line,) = caplog.messages
    assert "RuntimeError: the device is gone" in line
    assert not (tmp_path / "report.html").exists()


def test_a_disk_that_failed_is_not_asked_again(tmp_path, caplog):
    store = store_with(tmp_path, report())
    store.problem = "cannot write"
    write_page(store, lambda: pytest.fail("numbers were read"))
    assert caplog.messages == []


def test_a_run_whose_process_died_is_told_from_its_folder(tmp_path):
    write_page(store_with(tmp_path, report()), lambda: KEPT)
    (tmp_path / "report.html").unlink()
    write_folder_page(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "each micro-batch" in page


def test_the_command_writes_what_the_run_left(tmp_path, capsys):
    later = report("0001", at=replace(report().incident.at, step=500))
    store_with(tmp_path, report(), later)
    file = tmp_path / "out" / "page.html"
    assert main(["report", str(tmp_path), "--html", str(file)]) == 0
    assert f"written: {file}" in capsys.readouterr().err
    assert file.read_text().count('<h2 id="incident-') == 2
    main(["report", str(tmp_path / "0001"), "--html", str(file)])
    page = file.read_text()
    assert page.count('<h2 id="incident-') == 1
    assert "Incident 0001" in page
    assert "3 steps in 1 s" in page


def test_incidents_of_other_runs_are_named_and_their_numbers_left_alone(tmp_path):
    old, new = report("0000"), report("0001")
    noted = Series(name="lr", steps=(1, 2), values=(1.0, 2.0))
    old = replace(old, incident=replace(old.incident, history=(noted,)))
    store = store_with(tmp_path, old, new)
    store.write_summary(Summary(incidents=(summary_row(new),), steps=3))
    file = tmp_path / "page.html"
    main(["report", str(tmp_path), "--html", str(file)])
    page = file.read_text()
    assert "0000: error[NS201]: overflow, step 412" in page
    assert page.count('<h2 id="incident-') == 1
    assert "Learning rate" not in page


def test_a_page_that_cannot_be_written_is_said(tmp_path, capsys):
    store_with(tmp_path, report())
    assert main(["report", str(tmp_path), "--html", str(tmp_path)]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_an_issue_is_of_the_newest(tmp_path, capsys):
    store_with(tmp_path, report(), report("0001"))
    main(["report", str(tmp_path), "--issue"])
    out = capsys.readouterr().out
    assert out.startswith("## error")
    assert out.count("### Environment") == 1


def test_a_run_without_an_incident_says_when_and_what_it_was():
    summary = Summary(steps=30, seconds=4.0, exit=0, began=1.8e9, script="train.py")
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(1.8e9))
    said = render_runs(".nanstop", (), summary)
    assert said == f"{day}  train.py  30 steps in 4 s, ended well, nothing found"
    older = replace(summary, began=None, script=None)
    assert render_runs(".nanstop", (), older).startswith("30 steps in 4 s")
