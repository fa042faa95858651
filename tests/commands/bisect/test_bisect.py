"""Bisects of real scripts in real child processes:
every way to end, resumed, in parallel, and with bad input.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanstop.commands.bisect.bisect import run_bisect
from nanstop.commands.bisect.configs import read_pair
from nanstop.commands.bisect.result import BisectResult, render
from nanstop.commands.bisect.trial_store import Failure, Finished
from nanstop.commands.bisect.trials import Limits
from nanstop.errors import NanstopError
from nanstop.process.children.isolate import End
from nanstop.records.codec import from_json, to_json
from processes import commands_with

SCRIPT = """
import json, os, signal, sys, time
config = json.load(open(sys.argv[1]))
with open("runs.log", "a") as log:
    log.write(json.dumps(config) + "\\n")
if config.get("child") and not config.get("parent"):
    raise ValueError(f"child {config['child']} needs parent")
time.sleep(config.get("seconds", 0))
"""
FPE = "if config['a'] == 1 and config['b'] == 1: signal.raise_signal(signal.SIGFPE)\n"
GOOD = {f"k{n}": 0 for n in range(8)} | {"a": 0, "b": 0}
BAD = {f"k{n}": 1 for n in range(8)} | {"a": 1, "b": 1}


@pytest.fixture
def bisect_it(tmp_path, monkeypatch):
    """Bisect a script whose last lines are given, in a fresh folder."""
    monkeypatch.chdir(tmp_path)

    def run(ending, bad=BAD, good=GOOD, where="fork", **limits):
        write(tmp_path, ending, bad, good)
        pair = read_pair("bad.json", "good.json", "train.py")
        lines = []
        limits = Limits(**limits)
        result = run_bisect(pair, limits=limits, where=where, announce=lines.append)
        assert len(lines) == len(result.trials)
        assert from_json(BisectResult, to_json(result)) == result
        return result

    return run


def write(folder, ending, bad=BAD, good=GOOD):
    (folder / "train.py").write_text(SCRIPT + ending)
    (folder / "bad.json").write_text(json.dumps(bad))
    (folder / "good.json").write_text(json.dumps(good))


def runs():
    return Path("runs.log").read_text().splitlines()


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_signal_is_bisected_to_the_keys_that_cause_it(bisect_it, jobs):
    result = bisect_it(FPE, jobs=jobs)
    assert (result.status, result.minimal) == ("found", ("a", "b"))
    assert result.sufficient_fix in (("a",), ("b",))
    assert (result.failure.kind, result.failure.name) == ("signal", "SIGFPE")
    assert len(runs()) == len(result.trials) <= (16 if jobs == 1 else 24)
    assert {row.outcome for row in result.trials} == {"pass", "same_failure"}
    assert [row.number for row in result.trials] == list(range(1, len(result.trials) + 1))
    text = render(result)
    assert "failure: SIGFPE" in text
    assert "  a: 1, not 0" in text


@pytest.mark.slow
def test_the_confirming_run_names_the_operation_that_a_signal_came_in(bisect_it):
    ending = """
import torch
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(2):
    loss = net(torch.ones(2, 4)).sum()
    loss.backward()
    if config["a"] and step: loss.cosh(); signal.raise_signal(signal.SIGFPE)
    optimizer.step()
    optimizer.zero_grad()
"""
    result = bisect_it(ending, bad={"a": 1}, good={"a": 0})
    assert (result.minimal, result.sufficient_fix) == (("a",), ("a",))
    assert (result.failure.name, result.failure.key.op) == ("SIGFPE", "aten.cosh.default")
    assert [row.failure.key is None for row in result.trials if row.failure] == [True, False]
    assert "in `aten.cosh.default`" in render(result)


def test_an_exception_with_other_numbers_is_the_same_one_and_another_message_is_not(bisect_it):
    ending = """
if config["a"]: raise RuntimeError(f"lost {time.time()} rows")
if config["b"]: raise RuntimeError("no rows")
"""
    result = bisect_it(ending)
    assert (result.minimal, result.failure.name) == (("a",), "RuntimeError")
    assert result.sufficient_fix == ("a", "b")
    assert {row.outcome for row in result.trials} == {"pass", "same_failure", "invalid"}


def test_a_trial_that_cannot_run_decides_nothing(bisect_it):
    bad = {"child": 1, **BAD, "parent": 1}
    result = bisect_it("if config['a'] and config.get('child'): os.abort()\n", bad=bad)
    assert result.minimal == ("child", "a", "parent")
    assert result.inseparable == ("parent",)
    assert "note: without parent the trial cannot run" in render(result)
    assert "invalid" in {row.outcome for row in result.trials}


@pytest.mark.slow
def test_a_hang_is_a_failure_like_any_other(bisect_it):
    result = bisect_it("if config['b']: time.sleep(600)\n", timeout=0.8, jobs=2)
    assert (result.minimal, result.failure.kind) == (("b",), "timeout")
    assert all(row.seconds < 10 for row in result.trials)


@pytest.mark.slow
def test_a_mixture_that_hangs_is_given_up_without_any_timeout(bisect_it, monkeypatch):
    monkeypatch.setattr("nanstop.commands.bisect.trials._LEAST_SECONDS", 0.5)
    ending = FPE + "if config['k0'] and not config['b']: time.sleep(600)\n"
    result = bisect_it(ending, bad={**BAD, "seconds": 0.1})
    assert (result.status, result.minimal) == ("found", ("a", "b"))
    assert "timeout" in {row.end for row in result.trials}
    known = bisect_it(ending, bad={**BAD, "seconds": 0.1})
    assert all(row.known for row in known.trials)


def test_memory_is_a_failure_like_any_other(bisect_it):
    ending = "if config['b']: time.sleep(0.2); x = bytearray(600 * 2**20)\n"
    result = bisect_it(ending, memory_bytes=300 * 2**20)
    assert (result.minimal, result.failure.kind) == (("b",), "oom")


def test_only_one_of_the_two_may_fail(bisect_it):
    result = bisect_it("")
    assert (result.status, result.minimal, len(result.trials)) == ("bad_passes", (), 3)
    assert "BAD does not fail: it was run twice" in render(result)
    result = bisect_it("os.abort()\n")
    assert (result.status, len(result.trials)) == ("good_fails", 3)
    assert "GOOD fails as well (SIGABRT)" in result.message
    result = bisect_it("os.abort() if config['a'] else sys.exit(3)\n")
    assert "GOOD fails as well (exit code 3)" in result.message


def test_swapped_configurations_are_said_to_be_and_their_trials_are_kept(bisect_it):
    result = bisect_it(FPE, bad=GOOD, good=BAD)
    assert (result.status, result.minimal, len(result.trials)) == ("swapped", (), 4)
    assert "BAD passes and GOOD fails (SIGFPE), each twice: are they swapped?" in render(result)
    other = bisect_it(FPE)
    assert other.minimal == ("a", "b")
    assert [row.known for row in other.trials[:2]] == [True, True]


HEAVY = "import numpy\n"


@pytest.mark.slow
def test_mixtures_are_forked_and_what_confirms_is_not(bisect_it):
    result = bisect_it(HEAVY + FPE)
    plain = bisect_it(HEAVY + FPE + "# spawned\n", where="spawn")
    for one in (result, plain):
        assert (one.status, one.minimal, one.failure.name) == ("found", ("a", "b"), "SIGFPE")
    outcomes = [[(row.keys, row.outcome, row.end) for row in one.trials] for one in (result, plain)]
    assert outcomes[0] == outcomes[1]
    alone = [row for row in result.trials if row.attempt or len(row.keys) in (0, len(BAD))]
    assert len(alone) == 4
    assert not any(row.forked for row in alone)
    assert all(row.forked for row in result.trials if row not in alone)
    assert not any(row.forked for row in plain.trials)
    again = bisect_it(HEAVY + FPE, where="spawn")
    assert [row.known for row in again.trials] == [not row.forked for row in result.trials]


def test_where_forks_deceive_only_processes_of_their_own_count(bisect_it):
    """A fork, which is a child of the fork server, would have ``k0`` decide."""
    ending = """
import numpy
forked = "fork_server" in open(f"/proc/{os.getpid()}/cmdline").read()
if config["k0" if forked else "a"]: os.abort()
"""
    result = bisect_it(ending)
    assert (result.status, result.minimal, result.sufficient_fix) == ("found", ("a",), ("a",))
    assert any(row.forked for row in result.trials)
    assert result.not_forked == "a forked trial ended otherwise than one started by itself"
    assert all(row.known for row in bisect_it(ending).trials if not row.forked)


def test_a_script_that_must_not_be_forked_is_not(bisect_it):
    result = bisect_it("import numpy\nos.environ['A'] = str(config['a'])\n" + FPE)
    assert result.minimal == ("a", "b")
    assert not any(row.forked for row in result.trials)
    assert "does to its environment is unknown" in result.not_forked


def test_a_trial_whose_parent_is_killed_is_run_again(bisect_it):
    ending = """
import numpy
if "fork_server" in open(f"/proc/{os.getppid()}/cmdline").read():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
"""
    result = bisect_it(ending + FPE)
    assert (result.status, result.minimal) == ("found", ("a", "b"))
    assert result.not_forked == "the process to fork from is gone"
    assert not any(row.forked for row in result.trials)
    assert all(row.seconds < 30 for row in result.trials)


def test_executors_that_are_none(bisect_it, monkeypatch):
    with pytest.raises(NanstopError, match="unknown executor: `rey`") as raised:
        bisect_it(FPE, where="rey")
    assert "did you mean `ray`?" in raised.value.hint
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(NanstopError, match="needs Ray, which is not installed") as raised:
        bisect_it(FPE, where="ray")
    assert raised.value.hint == 'pip install "nanstop[ray]"'
    assert not Path("runs.log").exists()


def test_a_flaky_script_is_reported_not_guessed(bisect_it):
    ending = """
again = open("runs.log").readlines().count(json.dumps(config) + "\\n") > 1
if config["a"] and not again: os.abort()
"""
    result = bisect_it(ending)
    assert result.status == "flaky"
    assert result.flaky
    assert "ended differently" in render(result)


def test_finished_trials_are_not_repeated_until_something_changes(bisect_it):
    first = bisect_it(FPE)
    second = bisect_it(FPE)
    assert len(runs()) == len(first.trials)
    assert (second.minimal, second.sufficient_fix) == (first.minimal, first.sufficient_fix)
    assert all(row.known for row in second.trials)
    bisect_it(FPE + "# another script\n")
    assert len(runs()) == 2 * len(first.trials)


def test_a_damaged_trial_is_run_again(bisect_it):
    first = bisect_it(FPE)
    files = sorted(Path(first.folder).glob("*/trial.json"))
    files[0].write_text(files[0].read_text()[:-9])
    second = bisect_it(FPE)
    assert len(runs()) == len(first.trials) + 1
    assert second.minimal == first.minimal


def test_a_limit_keeps_what_it_found_and_more_trials_go_on_from_there(bisect_it):
    limited = bisect_it(FPE, trials=5)
    assert (limited.status, len(limited.trials)) == ("limit", 5)
    assert {"a", "b"} <= set(limited.minimal)
    assert "stopped after 5 trials" in render(limited)
    whole = bisect_it(FPE)
    assert whole.minimal == ("a", "b")
    assert len(runs()) == len(whole.trials)


BISECT = """
from nanstop.commands.bisect.bisect import run_bisect
from nanstop.commands.bisect.trials import Limits
from nanstop.commands.bisect.configs import read_pair
pair = read_pair("bad.json", "good.json", "train.py")
result = run_bisect(pair, limits=Limits(jobs=2), announce=lambda line: print(line, flush=True))
print(result.minimal)
"""


@pytest.mark.slow  # real signals against a real clock: they need an idle machine
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interrupted_it_resumes_without_repeating_a_finished_trial(tmp_path, monkeypatch, number):
    monkeypatch.chdir(tmp_path)
    seconds = {"seconds": 0.2}
    write(tmp_path, FPE, {**BAD, **seconds}, {**GOOD, **seconds})
    process = subprocess.Popen(
        [sys.executable, "-c", BISECT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    for line in process.stdout:
        if line.startswith("trial  4"):
            process.send_signal(number)
            break
    rest = process.stdout.read()
    process.stdout.close()
    assert process.wait(timeout=30) != 0
    assert ("trials are kept in" in rest) is (number != signal.SIGKILL)
    time.sleep(0.5)
    interrupted = runs()
    assert commands_with(tmp_path) == []
    finished = len(list(Path(os.environ["NANSTOP_DIR"]).glob("bisect/*/trial.json")))
    assert finished >= 4
    done = subprocess.run(
        [sys.executable, "-c", BISECT], capture_output=True, text=True, timeout=60, check=True
    )
    assert "('a', 'b')" in done.stdout
    assert done.stdout.count("known from before") == finished
    num_trials = done.stdout.count("trial ")
    assert len(runs()) == len(interrupted) + num_trials - finished


def test_a_folder_that_cannot_be_written_is_said_before_any_trial(bisect_it, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NANSTOP_DIR", str(tmp_path / "file" / "inside"))
    with pytest.raises(NanstopError, match=r"cannot write .*inside/bisect: Not a directory"):
        bisect_it(FPE)
    assert not Path("runs.log").exists()


def test_a_disk_that_fails_on_the_way_costs_the_record_not_the_answer(bisect_it, monkeypatch):
    def refuse(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nanstop.commands.bisect.trial_store.write_whole", refuse)
    result = bisect_it(FPE)
    assert result.minimal == ("a", "b")
    assert "No space left on device" in result.problem
    assert "warning: cannot write" in render(result)


def test_two_bisects_do_not_share_a_folder_at_a_time(bisect_it, tmp_path, monkeypatch):
    import fcntl

    folder = Path(os.environ["NANSTOP_DIR"]) / "bisect"
    folder.mkdir(parents=True)
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(NanstopError, match="another bisect is at work"):
        bisect_it(FPE)
    os.close(handle)
    assert bisect_it(FPE).status == "found"


@pytest.mark.parametrize(
    "limits", [{"timeout": 0}, {"jobs": 0}, {"memory_bytes": -1}, {"trials": 0}]
)
def test_limits_are_more_than_nothing(limits):
    with pytest.raises(NanstopError, match=f"{next(iter(limits))} must be more than 0"):
        Limits(**limits)


def test_what_ended_by_a_limit_holds_under_that_limit_only():
    late = Finished(end=End(kind="timeout", seconds=10.0))
    assert late.holds(timeout=10, memory_bytes=None)
    assert not late.holds(timeout=20, memory_bytes=None)
    assert not late.holds(timeout=None, memory_bytes=None)
    full = Finished(end=End(kind="oom"), memory_bytes=5)
    assert full.holds(timeout=1, memory_bytes=5)
    assert not full.holds(timeout=1, memory_bytes=6)
    assert Finished(end=End(kind="clean")).holds(timeout=1, memory_bytes=1)


def test_which_failures_are_the_same():
    def exception(message, name="ValueError"):
        return Failure(kind="exception", name=name, message=message)

    assert exception("row 7 at 0x7f").same_as(exception("row 12 at 0x8a"))
    assert not exception("row").same_as(exception("column"))
    assert not exception("row").same_as(exception("row", name="KeyError"))
    assert not Failure(kind="signal", name="SIGFPE").same_as(Failure(kind="signal", name="SIGSEGV"))
    assert Failure(kind="oom", name="MemoryError").same_as(Failure(kind="oom", name="SIGKILL"))
