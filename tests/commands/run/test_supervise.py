"""How an end is told: every kind, from the exit code, what processes left, and the kernel's
counters.
"""

import time
from dataclasses import replace

import pytest
import torch

from nanstop.commands.run.supervise import ARMED, supervised
from nanstop.process.crash.crash_report import crash_report
from nanstop.process.crash.exchange import exchange_of
from nanstop.process.crash.flight_file import Exchange, FlightFile, read
from nanstop.process.crash.left_files import ProcessFiles, collect
from nanstop.process.crash.process_end import ProcessEnd, classify
from nanstop.process.crash.standing_still import Still
from nanstop.process.crash.training_facts import TrainingFacts
from nanstop.process.oom import kernel_line, num_oom_kills
from nanstop.process.signals import signal_name
from nanstop.records import Environment, RunFacts
from nanstop.records.vocabulary import RANK_ELSEWHERE, RANK_ENDED
from nanstop.store.incidents import Store, load_report
from nanstop.store.summary import summary_row

FACTS = TrainingFacts(facts=RunFacts(), environment=Environment(nanstop="0", python="3"), rank=1)
DUMP = """Fatal Python error: {}

Thread 0x00007f0000000001 (most recent call first):
  File "/lib/threading.py", line 5 in wait

Current thread 0x00007f0000000002 (most recent call first):
  File "/lib/functional.py", line 7 in linear
  File "/user/train.py", line 9 in <module>

Extension modules: a, b (total: 2)
"""


@pytest.fixture
def files(tmp_path):
    """Make what a process leaves: its steps and operations, how it ended, whether it trained."""
    made = iter(range(1000))

    def make(*, steps=0, ops=(), ended=None, trained=True, stacks="", rank=None):
        file = FlightFile(tmp_path / f"{next(made)}.flight", num_ops=8)
        for step in range(steps):
            file.step(step)
        for name, done in ops:
            place = file.op("backward", name, "model.layers.0", "t.py:3 f", [("bfloat16", (2, 3))])
            if done:
                file.done(place)
        if ended is not None:
            file.ended(*ended)
        known = FACTS if trained else None
        if rank is not None:
            facts = RunFacts(world_size=2, ranks_agree=True)
            known = replace(FACTS, facts=facts, rank=rank)
        return ProcessFiles(flight=read(file.path), known=known, stacks=stacks)

    return make


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (-8, "SIGFPE"),
        (136, "SIGFPE"),
        (137, "SIGKILL"),
        (139, "SIGSEGV"),
        (143, "SIGTERM"),
        *((code, "") for code in (0, 1, 128, 138, 255)),
        (-200, "signal 200"),
    ],
)
def test_signal_of_an_exit_code(code, name):
    assert signal_name(code) == name


@pytest.mark.parametrize(
    ("code", "options", "kind", "signal"),
    [
        (0, {}, "clean", ""),
        (1, {}, "exception", ""),
        (1, {"failed": True}, "nonfinite", ""),
        (0, {"failed": True}, "clean", ""),
        (-2, {}, "interrupted", "SIGINT"),
        (130, {}, "interrupted", "SIGINT"),
        (-15, {}, "interrupted", "SIGTERM"),
        (1, {"interrupted": True}, "interrupted", ""),
        (-8, {}, "signal", "SIGFPE"),
        (139, {}, "signal", "SIGSEGV"),
        (-6, {}, "signal", "SIGABRT"),
        (-7, {}, "signal", "SIGBUS"),
        (-4, {}, "signal", "SIGILL"),
        (-9, {}, "signal", "SIGKILL"),
        (-9, {"killed_for_memory": True}, "oom_killed", "SIGKILL"),
        (-8, {"killed_for_memory": True}, "signal", "SIGFPE"),
    ],
)
def test_an_exit_code_alone(code, options, kind, signal):
    assert classify(code, (), **options) == ProcessEnd(kind=kind, signal=signal)


@pytest.mark.parametrize(
    ("words", "signal"),
    [
        ("Floating point exception", "SIGFPE"),
        ("Floating-point exception", "SIGFPE"),
        ("Segmentation fault", "SIGSEGV"),
        ("Aborted", "SIGABRT"),
        ("Bus error", "SIGBUS"),
        ("Illegal instruction", "SIGILL"),
    ],
)
def test_a_launcher_that_outlives_its_child_is_judged_by_the_child(files, words, signal):
    launcher = files(ended=("ChildFailedError", "rank 0 failed"), trained=False)
    rank = files(steps=3, stacks=DUMP.format(words))
    end = classify(1, (launcher, rank))
    assert (end.kind, end.signal, end.files) == ("signal", signal, rank)
    assert rank.frames == (("/lib/functional.py", 7, "linear"), ("/user/train.py", 9, "<module>"))


def test_a_rank_that_vanished_was_killed(files):
    launcher = files(ended=("ChildFailedError", ""), trained=False)
    first, second = files(steps=3), files(steps=4)
    end = classify(1, (launcher, second, first))
    assert (end.kind, end.signal, end.files) == ("signal", "SIGKILL", first)
    assert classify(1, (launcher, first), killed_for_memory=True).kind == "oom_killed"


def test_a_rank_that_raised_explains_the_end_of_the_others(files):
    raised, ended_with_it = files(steps=3, ended=("ValueError", "mine")), files(steps=3)
    assert classify(1, (raised, ended_with_it)).kind == "exception"


BACKWARD = Exchange(within="backward", at="/user/train.py:9 in <module>")
BARRIER = Exchange(within="collective", at="/user/train.py:12 in <module>")
LOST = ("RuntimeError", "Connection closed by peer")


@pytest.mark.parametrize(
    ("other", "its_steps", "signal"),
    [
        ((), 3, RANK_ENDED),
        ((), 2, RANK_ENDED),
        ((), 4, ""),
        ((*LOST, BARRIER), 3, RANK_ELSEWHERE),
        ((*LOST, BACKWARD), 3, ""),
        (("ValueError", "a bad row"), 3, ""),
    ],
)
def test_a_rank_that_waits_for_another_one(files, other, its_steps, signal):
    launcher = files(ended=("ChildFailedError", ""), trained=False)
    ranks = (
        files(steps=its_steps, ended=other, rank=0),
        files(steps=3, ended=(*LOST, BACKWARD), rank=1),
    )
    end = classify(1, (launcher, *ranks))
    assert (end.kind, end.signal) == ("exception", signal)
    if signal:
        report = crash_report(end, incident_id="0000", run_id="r")
        (found,) = report.diagnoses
        assert (found.code, found.source.line) == ("NS605", 9)
        assert "rank 0 has made " in found.cause


def test_ranks_that_share_no_model_do_not_wait_for_each_other(files):
    ended = files(steps=3, ended=())
    assert classify(1, (ended, files(steps=3, ended=(*LOST, BACKWARD)))).signal == ""


def test_what_an_exception_was_raised_in():
    weight = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError) as refused:
        (weight * 2).backward()
    assert exchange_of(refused.value).within == "backward"
    assert exchange_of(refused.value).at.endswith("in test_what_an_exception_was_raised_in")
    with pytest.raises(ValueError, match="process group") as missing:
        torch.distributed.barrier()
    assert exchange_of(missing.value).within == "collective"
    with pytest.raises(RuntimeError) as other:
        torch.ones(2) @ torch.ones(3)
    assert exchange_of(other.value) is None


def test_a_run_that_somebody_ends_after_it_has_stood_still(files):
    ranks = [files(steps=3, stacks=DUMP.format("x"), rank=rank) for rank in (0, 1)]
    still = Still(ranks[0], "no step for 60 s", ("rank 0 is here", "rank 1 is there"))
    end = classify(-2, ranks, still=still, interrupted=True)
    assert end.kind == "interrupted"
    (found,) = crash_report(end, incident_id="0000", run_id="r").diagnoses
    assert (found.code, found.lines[:2]) == ("NS605", still.places)
    assert (found.source.line, found.source.function) == (7, "linear")
    assert classify(0, ranks, still=still, interrupted=True).kind == "clean"


def test_a_training_that_was_stopped_is_told_from_other_exceptions(files):
    launcher = files(ended=("CalledProcessError", ""), trained=False)
    rank = files(steps=3, ended=("TrainingStopped", "error[NS000]: training stopped"))
    assert classify(1, (launcher, rank), failed=True).kind == "stopped"
    assert classify(0, (), stopped=True).kind == "stopped"
    # Stopped and caught, then another exception.
    own = files(steps=3, ended=("KeyError", "'mine'"))
    assert classify(1, (own,), stopped=True, failed=True).kind == "nonfinite"


def test_a_script_that_leaves_by_os_exit_was_not_killed(files):
    own = files(steps=3)
    assert classify(1, (own,), direct=own.flight.pid).kind == "exception"
    assert classify(-9, (own,), direct=own.flight.pid).kind == "signal"


@pytest.mark.parametrize(
    ("kind", "message", "short"),
    [
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB", True),
        ("MemoryError", "", True),
        ("RuntimeError", "[enforce fail] DefaultCPUAllocator: can't allocate memory", True),
        ("RuntimeError", "CUDA error: out of memory", True),
        ("ValueError", "no room", False),
    ],
)
def test_an_exception_for_want_of_memory(files, kind, message, short):
    one = files(steps=1, ended=(kind, message))
    end = classify(1, (one,), failed=True)
    assert end.kind == ("out_of_memory" if short else "nonfinite")


def test_a_report_names_the_operation_that_never_returned(files):
    one = files(steps=2, ops=[("aten.mul.Tensor", True), ("aten.mm.default", False)])
    end = ProcessEnd(kind="signal", signal="SIGFPE", files=one)
    report = crash_report(end, incident_id="0000", run_id="r", recorded=True)
    row = summary_row(report)
    assert (row.code, row.op, row.phase) == ("NS601", "aten.mm.default", "backward")
    assert (row.module, row.step, row.rank) == ("model.layers.0", 2, 1)
    (last,) = report.localization.growth[-1].inputs
    assert (last.dtype, last.shape) == ("bfloat16", (2, 3))
    assert report.localization.blind_spots == ()


@pytest.mark.parametrize(
    ("kind", "signal", "code"),
    [
        ("signal", "SIGFPE", "NS601"),
        ("oom_killed", "SIGKILL", "NS604"),
        ("out_of_memory", "OutOfMemoryError", "NS604"),
        ("hang", "", "NS605"),
    ],
)
def test_every_kind_has_its_finding_without_any_files(kind, signal, code, tmp_path):
    store = Store(tmp_path, "r")
    incident_id, path = store.open_incident()
    report = crash_report(ProcessEnd(kind=kind, signal=signal), incident_id=incident_id, run_id="r")
    store.write_report(report)
    assert [one.code for one in load_report(path).diagnoses] == [code]


def test_what_cannot_be_read_is_left_out(tmp_path):
    FlightFile(tmp_path / "1.flight").step(4)
    (tmp_path / "1.facts.json").write_text('{"schema": 1, "fac')
    (tmp_path / "1.stacks").write_bytes(b"\xff")
    (tmp_path / "2.flight").write_bytes(b"half")
    (found,) = collect(tmp_path)
    assert (found.flight.step, found.known, found.stacks) == (5, None, "")


def test_the_next_run_is_recorded_until_one_ends_cleanly(tmp_path):
    store = Store(tmp_path, "r")
    with supervised(store) as first:
        assert "NANSTOP_RECORD" not in first.variables
        first.ended(-11)
    assert (tmp_path / ARMED).exists()
    with supervised(store) as second:
        assert second.variables["NANSTOP_RECORD"] == "1"
        second.ended(1)
    assert (tmp_path / ARMED).exists()
    with supervised(store) as third:
        third.ended(0)
    assert not (tmp_path / ARMED).exists()


def test_the_counter_of_a_control_group_of_either_version(tmp_path):
    membership, mounted = tmp_path / "cgroup", tmp_path / "mounted"
    membership.write_text("4:memory:/a/b\n1:cpu:/x\n0::/job\n")
    assert num_oom_kills(membership, mounted) is None
    old = mounted / "memory" / "a" / "b"
    old.mkdir(parents=True)
    (old / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert num_oom_kills(membership, mounted) == 2
    (mounted / "job").mkdir()
    (mounted / "job" / "memory.events").write_text("low 0\nhigh 9\noom 7\noom_kill 5\n")
    assert num_oom_kills(membership, mounted) == 5
    assert num_oom_kills(tmp_path / "none", mounted) is None


def test_the_kernel_log_names_the_process():
    log = "[1.0] Out of memory: Killed process 41 (python) total-vm\n[2.0] Killed process 4 (x)\n"
    assert kernel_line(log, (41, 7)).startswith("[1.0] Out of memory: Killed process 41")
    assert kernel_line(log, (1, 7)) == ""
    assert kernel_line(log, ()) == ""


def test_times_of_steps_are_those_of_this_machine(files):
    before = time.monotonic()
    one = files(steps=2)
    assert before <= one.flight.steps[0][1] <= one.flight.steps[1][1] <= time.monotonic()
