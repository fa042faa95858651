"""A run's folder as it is followed: what it says at each stage, whoever has written it."""

import json
import math
import time

import pytest

from incident_records import report
from nanstop.commands.view.followed import FollowedRun, run_folders
from nanstop.commands.view.parts import run_parts, shell
from nanstop.records import Series
from nanstop.store.incidents import Store
from nanstop.store.live_file import LIVE, WANTED, LiveFile
from nanstop.store.summary import FindingRow, Summary, summary_row
from report.hostile import MARKUP


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def followed(folder):
    return FollowedRun(folder, "run", Clock())


def said(run):
    return " ".join(" ".join(run_parts(run, "run-0", "/report").values()).split())


def begun(folder, **header):
    return LiveFile(folder, {"host": "SFTTrainer", **header})


def test_a_folder_without_a_run_waits_for_one(tmp_path):
    run = followed(tmp_path)
    assert "waiting for a run" in said(run.look())
    assert (tmp_path / WANTED).exists()
    run.close()
    assert not (tmp_path / WANTED).exists()


def test_a_folder_that_is_not_there_yet_is_not_made(tmp_path):
    run = followed(tmp_path / "later")
    assert "waiting for a run" in said(run.look())
    assert not (tmp_path / "later").exists()
    (tmp_path / "later").mkdir()
    run.look()
    assert (tmp_path / "later" / WANTED).exists()


def test_numbers_grow(tmp_path):
    run, file = followed(tmp_path), begun(tmp_path)
    for step in range(3):
        file.append({"step": step, "series": {"loss_raw": [[step, 3.0 - step]]}})
        now = run.look()
        assert now.series["loss_raw"] == [(at, 3.0 - at) for at in range(step + 1)]
        assert (now.steps, now.host) == (step + 1, "SFTTrainer")
    assert "training" in said(now)
    assert "3 steps" in said(now)
    assert said(now).count("<svg") == 1
    file.close()


def test_another_training_begins_anew(tmp_path):
    run = followed(tmp_path)
    for value in (1.0, 2.0):
        file = begun(tmp_path)
        file.append({"step": 0, "series": {"lr": [[0, value]]}})
        assert run.look().series == {"lr": [(0, value)]}
        file.close()


def test_incidents_and_findings_come_as_they_are_written(tmp_path):
    run, store = followed(tmp_path), Store(tmp_path)
    store.write_summary(Summary(steps=1))
    assert run.look().reports == ()
    store.open_incident()
    one = report()
    store.write_report(one)
    row = FindingRow(code="NS101", title="narrow", where="model", confidence="likely", step=3)
    store.write_summary(Summary(incidents=(summary_row(one),), findings=(row,), steps=2))
    now = run.look()
    assert [each.incident.id for each in now.reports] == ["0000"]
    assert "error[NS201]: overflow" in said(now)
    assert 'href="/report"' in said(now)
    assert "NS101" in said(now)


def test_a_file_that_cannot_be_read_leaves_what_was_known(tmp_path):
    run, store = followed(tmp_path), Store(tmp_path)
    store.write_summary(Summary(steps=5))
    assert run.look().steps == 5
    (tmp_path / "summary.json").write_text("{")
    assert run.look().steps == 5


def test_a_search_says_what_it_has_come_to_and_how_long_it_may_take(tmp_path):
    clock = Clock()
    run, file = FollowedRun(tmp_path, "run", clock), begun(tmp_path)
    file.append({"stage": "replay", "of": 7})
    run.look()
    assert "Step 7: running the step again" in said(run.look())
    file.append({"stage": "proof", "of": 7, "trials": 40, "seconds": 60.0})
    file.append({"stage": "proof", "of": 7, "tried": 3, "best": "keep `norm` in float32"})
    assert "3 trials of at most 40; passes so far: keep `norm` in float32" in said(run.look())
    clock.now += 20.0
    now = run.look()
    assert now.stage.seconds_left == pytest.approx(40.0, abs=1.0)
    assert "at most 40 s left" in said(now)
    assert "investigating" in said(now)
    file.append({"stage": "", "of": 7})
    assert run.look().stage is None
    file.close()


def test_silence_is_told(tmp_path):
    clock = Clock()
    run, file = FollowedRun(tmp_path, "run", clock), begun(tmp_path)
    for step in range(3):
        file.append({"step": step, "series": {}})
        run.look()
    clock.now += 400.0
    assert "no news for 7 min" in said(run.look())
    file.append({"step": 3, "series": {}})
    run.look()
    assert "training" in said(run.look())
    file.close()


def test_a_run_that_died_yesterday_is_not_said_to_train(tmp_path):
    file = begun(tmp_path)
    file.append({"step": 3, "series": {}})
    file.close()
    day = time.time() + 86400.0
    assert "no news for 24 h" in said(FollowedRun(tmp_path, "run", Clock(), lambda: day).look())


@pytest.mark.parametrize(("code", "word"), [(0, "over"), (1, "failed")])
def test_the_end_is_told(code, word, tmp_path):
    run, file = followed(tmp_path), begun(tmp_path)
    file.append({"step": 0, "series": {}})
    file.append({"end": code, "series": {}})
    file.close()
    Store(tmp_path).write_summary(Summary(steps=1, seconds=2.0, exit=code))
    now = run.look()
    assert now.is_over
    assert f">{word}</span>" in said(now)


def test_a_run_that_nobody_followed_shows_the_numbers_that_it_left(tmp_path):
    store = Store(tmp_path)
    store.write_summary(Summary(steps=3, exit=0))
    store.write_series((Series(name="lr", steps=(0, 1), values=(1.0, 2.0)),))
    assert followed(tmp_path).look().series == {"lr": [(0, 1.0), (1, 2.0)]}


def test_a_folder_that_cannot_be_written_says_so(tmp_path, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("nanstop.store.live_file.Wish.renew", refuse)
    now = followed(tmp_path).look()
    assert "numbers cannot be asked for: Permission denied" in said(now)


WRONG = (
    {"step": "x", "series": 3, "stage": 5, "of": "a", "at": "b", "host": 7},
    {"series": {"loss_raw": [["a", 1]], "lr": 4, MARKUP: [[0, 1.0], [1, 2.0]]}},
    {"series": {"loss_raw": [[0, "nan"], [1, 1e400], [10**30, 5]]}, "step": 10**40},
    {"stage": MARKUP, "best": MARKUP, "tried": 1e300, "trials": math.inf, "seconds": math.nan},
)


def test_what_anybody_may_have_written_does_no_harm(tmp_path):
    run, file = followed(tmp_path), begun(tmp_path, host=MARKUP)
    for line in WRONG:
        file.append(line)
    with (tmp_path / LIVE).open("ab") as stream:
        stream.write(b"\xff\xfe\n" + json.dumps([1]).encode() + b"\n")
    html = said(run.look())
    assert "<script" not in html
    assert "<img" not in html
    file.close()


def test_runs_below_a_folder_are_found_as_they_come(tmp_path):
    assert run_folders([tmp_path]) == {tmp_path: tmp_path.name}
    for name in ("b", "a"):
        Store(tmp_path / name).write_summary(Summary())
    assert list(run_folders([tmp_path]).values()) == ["a", "b"]
    other = tmp_path / "elsewhere" / "a"
    Store(other).write_summary(Summary())
    found = run_folders([tmp_path, other])
    assert list(found.values()) == [str(tmp_path / "a"), "b", str(other)]


def test_the_shell_runs_its_own_script_alone():
    page = shell("/token")
    assert "default-src 'none'" in page
    assert "connect-src 'self'" in page
    assert "unsafe" not in page
