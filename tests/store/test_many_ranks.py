"""A run of many ranks on one disk: what it writes, and how it is read."""

from dataclasses import replace

from incident_records import report
from nanstop.report.text.runs import render_runs
from nanstop.store.incidents import Store, incident_folders, load_report, load_summary
from nanstop.store.summary import FindingRow, Summary, summary_row

NUM_RANKS = 256
FINDING = FindingRow(code="NS102", title="half head", where="score", confidence="certain")


def seen_by(rank, folder):
    found = report(folder)
    incident = replace(found.incident, at=replace(found.incident.at, rank=rank))
    return replace(found, incident=incident)


def test_healthy_ranks_leave_one_file_and_write_it_once(tmp_path, monkeypatch):
    Store(tmp_path, "r").write_summary(Summary(findings=(FINDING,)))
    written = (tmp_path / "summary.json").stat().st_mtime_ns
    for rank in range(1, NUM_RANKS):
        monkeypatch.setenv("RANK", str(rank))
        store = Store(tmp_path, "r")
        store.write_summary(Summary(findings=(FINDING,)))
        store.write_summary(Summary(findings=(FINDING,), steps=20, seconds=3.0, exit=0))
    assert [one.name for one in tmp_path.iterdir()] == ["summary.json"]
    assert (tmp_path / "summary.json").stat().st_mtime_ns == written


def test_what_one_rank_alone_has_to_say_is_written(tmp_path, monkeypatch):
    Store(tmp_path, "r").write_summary(Summary(exit=0))
    monkeypatch.setenv("RANK", "700")
    store = Store(tmp_path, "r")
    own = replace(FINDING, where="head")
    store.write_summary(Summary(findings=(own,)))
    assert load_summary(tmp_path / "summary.json").findings == (own,)
    store.write_summary(Summary(findings=(own,), exit=1))
    assert load_summary(tmp_path / "summary.json").exit == 1


def test_what_all_ranks_have_seen_is_one_line(tmp_path):
    """Ranks that cannot agree each write an incident of their own."""
    store = Store(tmp_path, "r")
    rows = []
    for rank in range(NUM_RANKS):
        folder, _ = store.open_incident()
        store.write_report(seen_by(rank, folder))
        rows.append(replace(summary_row(report(folder)), rank=rank))
    store.write_summary(Summary(incidents=tuple(rows)))
    summary = load_summary(tmp_path / "summary.json")
    reports = [load_report(one) for one in incident_folders(tmp_path)]
    told = render_runs(str(tmp_path), reports, summary)
    first, failure = told.splitlines()[:2]
    assert "256 incidents" in first
    assert "on 256 ranks (0-255), until 0255" in failure
