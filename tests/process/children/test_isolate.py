"""Children that end in every way there is; none outlives its trial."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanstop.errors import NanstopError
from nanstop.process.children.isolate import ERRORS, OUTPUT, BoundedCommand, end_of, spawn
from processes import commands_with

OUT_OF_MEMORY = """
class OutOfMemoryError(RuntimeError): pass
raise OutOfMemoryError("CUDA out of memory.")
"""


def start(folder, code, **options):
    command = [sys.executable, "-c", code]
    return spawn(
        BoundedCommand(command=command, folder=folder, environment=dict(os.environ), **options)
    )


def finish(child):
    deadline = time.monotonic() + 30
    while (end := child.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return end


def gone(pid):
    """Whether a process has ended (a zombie that nobody has reaped has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize(
    ("code", "kind", "name", "message", "exit_code"),
    [
        ("print(1)", "clean", "", "", 0),
        ("raise KeyError('x')", "exception", "KeyError", "'x'", 1),
        (
            "class Bad(ValueError): pass\nraise Bad('a\\nb')",
            "exception",
            "Bad",
            "a",
            1,
        ),
        ("import sys; sys.exit(3)", "exit", "exit code 3", "", 3),
        ("import sys; sys.exit('no data')", "exit", "exit code 1", "no data", 1),
        ("import os; os.kill(os.getpid(), 8)", "signal", "SIGFPE", "", 136),
        ("import os; os.abort()", "signal", "SIGABRT", "", 134),
        ("raise MemoryError", "oom", "MemoryError", "", 1),
        (OUT_OF_MEMORY, "oom", "OutOfMemoryError", "CUDA out of memory.", 1),
    ],
)
def test_the_end_of_a_real_child(tmp_path, code, kind, name, message, exit_code):
    end = finish(start(tmp_path, code))
    assert (end.kind, end.name, end.message, end.code) == (kind, name, message, exit_code)
    assert 0 < end.seconds < 30
    assert end.peak_bytes > 2**20


def test_output_goes_to_files_and_input_is_empty(tmp_path):
    end = finish(
        start(tmp_path, "import sys; print(sys.stdin.read() == ''); sys.stderr.write('e')")
    )
    assert end.kind == "clean"
    assert ((tmp_path / OUTPUT).read_text(), (tmp_path / ERRORS).read_text()) == ("True\n", "e")


def test_memory_is_bounded_and_no_core_is_written(tmp_path):
    code = "import time; time.sleep(0.3); x = bytearray(400 * 2**20)"
    end = finish(start(tmp_path, code, memory_bytes=200 * 2**20))
    assert (end.kind, end.name) == ("oom", "MemoryError")
    code = "import resource, time; time.sleep(0.3); print(resource.getrlimit(resource.RLIMIT_CORE))"
    assert finish(start(tmp_path, code)).kind == "clean"
    assert (tmp_path / OUTPUT).read_text() == "(0, 0)\n"


FAMILY = """
import os, signal, subprocess, sys, time
{deaf}
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
{then}
"""
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def family(folder, *, then, deaf="", **options):
    child = start(folder, FAMILY.format(deaf=deaf, then=then), **options)
    deadline = time.monotonic() + 20
    while not (text := (folder / OUTPUT).read_text()).endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return child, int(text)


def all_gone(pid):
    deadline = time.monotonic() + 5
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return gone(pid)


@pytest.mark.parametrize("deaf", ["", DEAF])
def test_a_hang_is_ended_with_all_it_started(tmp_path, deaf):
    child, worker = family(tmp_path, then="time.sleep(600)", deaf=deaf, timeout=1.0)
    end = finish(child)
    assert (end.kind, end.name) == ("timeout", "timeout")
    assert 1.0 <= end.seconds < 10
    assert all_gone(worker)


@pytest.mark.parametrize("then", ["pass", "os.kill(os.getpid(), signal.SIGSEGV)"])
def test_workers_do_not_outlive_the_process_that_started_them(tmp_path, then):
    child, worker = family(tmp_path, then=then)
    assert finish(child).kind in ("clean", "signal")
    assert all_gone(worker)


def test_stopped_on_request(tmp_path):
    child, worker = family(tmp_path, then="time.sleep(600)")
    assert child.poll() is None
    assert child.stop().kind == "stopped"
    assert all_gone(worker)


def test_a_kill_is_the_kernels_only_when_it_counted_one():
    assert end_of(-signal.SIGKILL, "").kind == "signal"
    assert end_of(-signal.SIGKILL, "", oom_killed=True).kind == "oom"
    assert end_of(-signal.SIGSEGV, "", oom_killed=True).kind == "signal"


def test_the_last_exception_of_a_chain_counts_and_text_that_only_looks_like_one_does_not():
    chain = (
        "Traceback (most recent call last):\n  File 'x', line 1\nKeyError: 1\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n  File 'x', line 2\n    f()\n    ^^^\n"
        "torch.AcceleratorError: CUDA error: device-side assert triggered\nsome advice\n"
    )
    end = end_of(1, chain)
    assert (end.name, end.message) == (
        "AcceleratorError",
        "CUDA error: device-side assert triggered",
    )
    assert end_of(2, "usage: train.py\ntrain.py: error: no --config\n").kind == "exit"


def test_the_last_line_before_a_signal_counts_only_if_it_tells_something():
    assert end_of(-signal.SIGABRT, "x\nwhat(): bad size\n").message == "what(): bad size"
    assert end_of(-signal.SIGFPE, "  warnings.warn(\n").message == ""


def test_a_command_that_is_not_there(tmp_path):
    with pytest.raises(NanstopError, match="cannot start /no/such/program"):
        spawn(BoundedCommand(command=["/no/such/program"], folder=tmp_path, environment={}))


OWNER = """
import sys, time
from pathlib import Path
from nanstop.process.children.isolate import BoundedCommand, spawn
import os
words = [sys.executable, "-c", sys.argv[2]]
child = spawn(BoundedCommand(command=words, folder=Path(sys.argv[1]), environment=dict(os.environ)))
print(child.pid, flush=True)
while child.poll() is None:
    time.sleep(0.01)
time.sleep(600)
"""


def test_nothing_is_left_where_the_owner_is_killed(tmp_path):
    code = FAMILY.format(deaf=DEAF, then="time.sleep(600)")
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path), code], stdout=subprocess.PIPE, text=True
    )
    pid = int(owner.stdout.readline())
    deadline = time.monotonic() + 20
    while not (text := (tmp_path / OUTPUT).read_text()).endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not gone(pid)
    assert not gone(int(text))
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert all_gone(pid)
    assert all_gone(int(text))


def test_an_owner_that_dies_at_once_leaves_nothing_either(tmp_path):
    """The owner is killed at any moment while its child is being started."""
    late = tmp_path / "late"
    code = f"import time; time.sleep(1.0); open({str(late)!r}, 'a').write('x')"
    for delay in (0.0, 0.005, 0.01, 0.02, 0.04, 0.08):
        owner = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(tmp_path), code], stdout=subprocess.PIPE, text=True
        )
        if delay > 0.01:
            owner.stdout.readline()
        time.sleep(delay)
        owner.kill()
        owner.wait()
        owner.stdout.close()
    time.sleep(1.5)
    assert not late.exists()


def test_nothing_watches_once_a_child_was_waited_for(tmp_path):
    finish(start(tmp_path, f"import time; time.sleep(0.2); {str(tmp_path)!r}"))
    deadline = time.monotonic() + 5
    while commands_with(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not commands_with(tmp_path)
