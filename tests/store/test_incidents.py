"""Incidents on disk: what is written can be read, and what strangers wrote is not trusted."""

import concurrent.futures
import dataclasses
import json
import logging
import math
import multiprocessing
import os
import resource

import pytest

from incident_records import ISLAND, report
from nanstop.errors import NanstopError
from nanstop.records import Atom, PrecisionPlan, Report
from nanstop.records.codec import to_json
from nanstop.store import files
from nanstop.store.incidents import (
    Store,
    incident_folders,
    load_report,
    load_summary,
)
from nanstop.store.plan_file import load_plan, save_plan
from nanstop.store.summary import FindingRow, Summary, merge, quiet_summary, summary_row


def stored(folder, **options):
    """A folder with one incident; the path of its report."""
    store = Store(folder)
    incident_id, path = store.open_incident()
    store.write_report(report(incident_id, **options))
    assert store.problem is None
    return path / "report.json"


def test_report_comes_back_as_it_was(tmp_path):
    file = stored(tmp_path, value=-math.inf)
    assert load_report(file) == load_report(file.parent) == report(value=-math.inf)


def test_ids_grow_across_runs_and_survive_gaps(tmp_path):
    assert Store(tmp_path).open_incident()[0] == "0000"
    (tmp_path / "0007").mkdir()
    (tmp_path / "notes").mkdir()
    assert Store(tmp_path).open_incident() == ("0008", tmp_path / "0008")


def _open_many(folder):
    store = Store(folder)
    return [store.open_incident()[0] for _ in range(20)]


def test_processes_never_get_the_same_id(tmp_path):
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(4, mp_context=context) as pool:
        ids = [one for batch in pool.map(_open_many, [tmp_path] * 4) for one in batch]
    assert sorted(ids) == [f"{number:04d}" for number in range(80)]


def test_a_later_report_of_an_incident_replaces_the_first_and_leaves_nothing_behind(tmp_path):
    store = Store(tmp_path)
    incident_id, path = store.open_incident()
    store.write_report(report(incident_id))
    store.write_report(dataclasses.replace(report(incident_id), count=9))
    assert load_report(path).count == 9
    assert [one.name for one in path.iterdir()] == ["report.json"]


def test_a_write_that_is_cut_short_leaves_the_old_file(tmp_path):
    file = stored(tmp_path)
    store = Store(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # no file may grow beyond 100 bytes
    try:
        store.write_report(dataclasses.replace(report(), count=9))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large" in store.problem
    assert load_report(file).count == 2
    assert [one.name for one in file.parent.iterdir()] == ["report.json"]


def test_a_disk_that_refuses_is_reported_once_and_the_run_goes_on(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    store = Store(blocked / "incidents")
    with caplog.at_level(logging.WARNING, logger="nanstop"):
        ids = [store.open_incident()[0] for _ in range(2)]
        for one in ids:
            store.write_report(report(one))
        store.write_summary(Summary(steps=3))
        store.save_plan((ISLAND,))
    assert ids == ["0000", "0001"]
    assert list(store.reports) == ids
    assert store.summary.steps == 3
    assert len(caplog.records) == 1
    assert "memory only" in caplog.text


def test_an_id_that_the_store_did_not_give_is_refused(tmp_path):
    with pytest.raises(NanstopError, match="was not given by open_incident"):
        Store(tmp_path).write_report(report("../evil"))
    assert list(tmp_path.iterdir()) == []


def test_summary_row_has_what_a_reader_of_the_summary_wants():
    row = summary_row(report("0003"))
    assert dataclasses.asdict(row) == {
        "code": "NS201",
        "codes": ("NS201", "NS101"),
        "title": "overflow",
        "phase": "forward",
        "op": "aten.mul.Tensor",
        "module": "model.layers.2.norm",
        "source": "modeling.py:149",
        "step": 412,
        "micro": 3,
        "rank": 0,
        "confidence": "certain",
        "verdict": "proven",
        "remedy": "keep `model.layers.2.norm` in float32",
        "action": "redo",
        "count": 2,
        "folder": "0003",
    }


def test_summary_row_of_an_incident_that_was_not_investigated():
    bare = Report(incident=report().incident)
    row = summary_row(bare)
    assert (row.code, row.codes, row.op, row.verdict, row.action) == (
        "NS000",
        ("NS000",),
        None,
        None,
        None,
    )


def test_summary_on_disk(tmp_path):
    store = Store(tmp_path / "new")
    summary = Summary(incidents=(summary_row(report()),), exit=0, steps=5, seconds=1.5)
    store.write_summary(summary)
    assert load_summary(tmp_path / "new" / "summary.json") == summary
    store.write_summary(Summary())
    assert json.loads((tmp_path / "new" / "summary.json").read_text()) == {
        "schema": 1,
        "incidents": [],
        "findings": [],
        "exit": None,
        "steps": 0,
        "seconds": 0.0,
        "ended": None,
        "began": None,
        "script": None,
        "trained_nothing": False,
    }


def test_a_run_that_met_nothing_is_read_as_it_was_written():
    quiet = [
        Summary(),
        Summary(exit=0, steps=5, seconds=0.5, ended="stopped", began=1.0, script="a.py"),
        Summary(trained_nothing=True),
    ]
    assert [quiet_summary(to_json(one)) for one in quiet] == quiet
    met = Summary(incidents=(summary_row(report()),))
    assert quiet_summary(to_json(met)) is None


def test_ranks_of_one_run_share_the_summary_and_a_new_run_starts_afresh(tmp_path):
    launcher, first, second = (Store(tmp_path, run_id="r") for _ in range(3))
    finding = FindingRow(code="NS102", title="half head", where="score", confidence="certain")
    launcher.reset()
    first.write_summary(
        Summary(incidents=(summary_row(report("0001")),), steps=4, findings=(finding,))
    )
    second.write_summary(
        Summary(incidents=(summary_row(report("0000")),), steps=5, findings=(finding,))
    )
    launcher.write_summary(Summary(exit=1, seconds=9.0))
    whole = load_summary(tmp_path / "summary.json")
    assert [row.folder for row in whole.incidents] == ["0000", "0001"]
    assert (whole.findings, whole.exit, whole.steps, whole.seconds) == ((finding,), 1, 5, 9.0)
    launcher.reset()
    assert load_summary(tmp_path / "summary.json") == Summary()


def test_what_was_measured_comes_first_and_in_place_of_what_was_expected(tmp_path):
    def row(code, confidence, step=None, where="score"):
        return FindingRow(code=code, title=code, where=where, confidence=confidence, step=step)

    store = Store(tmp_path, run_id="r")
    expected = (row("NS101", "certain"), row("NS109", "likely"), row("NS112", "likely"))
    store.write_summary(Summary(findings=expected))
    overflow, unsure = row("NS209", "certain", 3), row("NS208", "likely", 1)
    refused = row("NS109", "certain", 4)
    store.write_summary(Summary(findings=(unsure, overflow, refused, *expected[::2])))
    later = dataclasses.replace(overflow, step=5)
    Store(tmp_path, run_id="r").write_summary(Summary(findings=(later,)))
    found = load_summary(tmp_path / "summary.json").findings
    assert found == (overflow, refused, unsure, *expected[::2])


def _write_rows(folder, number):
    store = Store(folder, run_id="r")
    for count in range(1, 6):
        row = dataclasses.replace(summary_row(report(f"{number:04d}")), count=count)
        store.write_summary(Summary(incidents=(row,)))


def test_no_rank_loses_anothers_rows(tmp_path):
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(3, mp_context=context) as pool:
        list(pool.map(_write_rows, [tmp_path] * 3, range(3)))
    rows = load_summary(tmp_path / "summary.json").incidents
    assert [(row.folder, row.count) for row in rows] == [("0000", 5), ("0001", 5), ("0002", 5)]


def edited(file, change):
    plain = json.loads(file.read_text())
    change(plain)
    file.write_text(json.dumps(plain))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.unlink(), "cannot read .*No such file"),
        (lambda file: file.write_text("{"), "not JSON"),
        (lambda file: file.write_text("[]"), "not a nanstop record"),
        (lambda file: file.write_text("[" * 200_000), "not JSON"),
        (lambda file: file.write_bytes(b"\xff\xfe{}"), "not UTF-8"),
        (
            lambda file: edited(file, lambda p: p.update(schema=99)),
            "schema 99, and this nanstop reads schema 1",
        ),
        (lambda file: edited(file, lambda p: p.pop("schema")), "schema None"),
        (lambda file: edited(file, lambda p: p.pop("incident")), "report.json: "),
        (lambda file: edited(file, lambda p: p.update(surprise=1)), "report.json: "),
        (lambda file: edited(file, lambda p: p["incident"].update(phase="lunch")), "report.json: "),
        (lambda file: file.rename(file.with_name("x")) and file.symlink_to("x"), "is a link"),
        (lambda file: (file.unlink(), os.mkfifo(file)), "not a plain file"),
    ],
)
def test_damaged_reports_are_refused(tmp_path, damage, message):
    file = stored(tmp_path)
    damage(file)
    with pytest.raises(NanstopError, match=message) as caught:
        load_report(file.parent)
    assert caught.value.code == "NS001"


def test_an_oversized_report_is_refused_unread(tmp_path, monkeypatch):
    file = stored(tmp_path)
    with file.open("r+b") as stream:
        stream.truncate(files.MAX_JSON_BYTES + 1)  # sparse: takes no room on the disk
    with pytest.raises(NanstopError, match="larger than 64 MiB"):
        load_report(file)


@pytest.mark.parametrize("incident_id", ["../../etc", "/etc", "", "1", "0000/.."])
def test_an_id_that_leaves_the_folder_is_refused(tmp_path, incident_id):
    file = stored(tmp_path)
    file.write_text(file.read_text().replace('"id":"0000"', f'"id":"{incident_id}"'))
    with pytest.raises(NanstopError, match="is no id of an incident"):
        load_report(file)


def test_incident_folders(tmp_path):
    home = tmp_path / "incidents"
    first = stored(home).parent
    second = stored(home).parent
    (home / "0005").mkdir()  # opened, never written
    assert incident_folders(home) == (first, second)
    assert incident_folders(first) == (first,)
    assert incident_folders(first / "report.json") == (first / "report.json",)
    with pytest.raises(NanstopError, match="unknown incident folder") as caught:
        incident_folders(home / "0010")
    assert str(home / "0001") in caught.value.hint or str(home / "0000") in caught.value.hint
    with pytest.raises(NanstopError, match="no incident in"):
        incident_folders(home / "0005")


def test_plan_can_be_read_by_people_and_by_us(tmp_path):
    atoms = (ISLAND, Atom(remedy="clip", value="1.0"), Atom(remedy="optimizer_eps", value="1e-05"))
    Store(tmp_path).save_plan(atoms)
    text = (tmp_path / "plan.yaml").read_text()
    assert "# " in text
    assert "keep `model.layers.2.norm` in float32" in text
    assert load_plan(tmp_path / "plan.yaml").remedies == atoms
    (tmp_path / "plan.yaml").write_text(
        text.replace("'1.0'", "1.0")
    )  # a person leaves the quotes out
    assert load_plan(tmp_path / "plan.yaml").remedies == atoms


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("remedies: [", "not YAML"),
        ("- a", "has no key `schema`"),
        ("schema: 2\nremedies: []", "schema 2"),
        ("schema: 1\nremedies: [x]", "expected the keys remedy, target and value"),
        ("schema: 1\nremedies: [{remedy: iland}]", "unknown remedy in .*`iland`"),
        ("schema: 1\nremedies: [{remedy: [a]}]", "unknown remedy"),
        ("schema: 1\nremedies: [{remedy: clip, valu: 1}]", "unknown key in .*`valu`"),
        ("schema: 1\nremedies: !!python/object/apply:os.system [ls]", "not YAML"),
    ],
)
def test_a_wrong_plan_is_refused(tmp_path, text, message):
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(NanstopError, match=message):
        load_plan(tmp_path / "plan.yaml")


def test_a_missing_plan_is_an_error_of_ours(tmp_path):
    with pytest.raises(NanstopError, match="cannot read"):
        load_plan(tmp_path / "plan.yaml")


def test_save_plan_outside_a_store(tmp_path):
    plan = PrecisionPlan(remedies=(ISLAND,))
    save_plan(plan, tmp_path / "checkpoint-4" / "plan.yaml")
    assert load_plan(tmp_path / "checkpoint-4" / "plan.yaml") == plan


def test_a_merged_summary_began_with_the_first_of_its_processes():
    own, other = Summary(began=20.0), Summary(began=10.0, script="train.py")
    assert (merge(own, other).began, merge(own, other).script) == (10.0, "train.py")
    assert merge(own, Summary()).began == 20.0
