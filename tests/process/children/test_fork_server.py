"""Children forked from a fork server end, look and are bounded as spawned ones;
where they would not, they are refused.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanstop.process.children.fork_server import CannotForkError, ForkServer
from nanstop.process.children.isolate import ERRORS, OUTPUT, BoundedCommand, spawn
from nanstop.process.children.script_imports import Imports, imports_of

SCRIPT = """
import atexit, json, os, signal, sys, time
import numpy
import helper
atexit.register(lambda: print("at exit"))
main = sys.modules["__main__"]
class Here: pass
print(json.dumps([
    __name__, __file__, main.__file__, main.Here is Here, sys.argv, sys.path[0], __spec__,
    os.getcwd(), sorted(os.environ.items()), sys.stdin.read(), os.getpgrp() == os.getpid(),
    helper.__file__, sys.flags.isolated, __builtins__.len is len, __package__, __doc__,
    sys.stdout.line_buffering,
]))
sys.stdout.flush()
def fail(): raise ValueError("no\\nrows")
"""
ENDINGS = {
    "clean": "pass",
    "exception": "fail()",
    "chain": "try: fail()\nexcept ValueError as e: raise KeyError(2) from e",
    "exit": "sys.exit(3)",
    "words": "sys.exit('no data')",
    "signal": "signal.raise_signal(signal.SIGFPE)",
    "abort": "os.abort()",
    "memory": "x = bytearray(900 * 2**20)",
    "deaf": "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)",
}


def finish(child):
    deadline = time.monotonic() + 60
    while (end := child.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return end


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Write a script with an ending into a fresh working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper.py").write_text("import numpy\n")

    def write(ending="pass", text=SCRIPT):
        file = tmp_path / "scripts" / "train.py"
        file.parent.mkdir(exist_ok=True)
        (file.parent / "helper.py").write_text("")
        file.write_text(text + ending)
        return file

    return write


@pytest.fixture
def parents():
    """Make fork servers that are closed at the end."""
    made = []

    def make(imports, late=()):
        made.append(ForkServer(imports, environment=dict(os.environ), late=late))
        return made[-1]

    yield make
    for one in made:
        one.close()


def job(folder, command, environment=os.environ, **bounds):
    return BoundedCommand(command=command, folder=folder, environment=dict(environment), **bounds)


def both(parent, command, folder, **bounds):
    """How a command ends, and what it writes, forked and spawned."""
    seen = []
    for name, begin in (("forked", parent.fork), ("spawned", spawn)):
        place = folder / name
        place.mkdir(parents=True)
        end = finish(begin(job(place, command, **bounds)))
        seen.append((end, (place / OUTPUT).read_text(), (place / ERRORS).read_text()))
    return seen


@pytest.mark.slow
def test_a_forked_child_is_as_a_spawned_one_in_every_way_to_end(script, parents, tmp_path):
    parent = parents(imports_of(script()))
    command = [sys.executable, "scripts/train.py", "--lr", "1"]
    for name, ending in ENDINGS.items():
        script(ending)
        limits = {"timeout": 3.0} if name == "deaf" else {"timeout": 30.0}
        limits |= {"memory_bytes": 700 * 2**20} if name == "memory" else {}
        (end, out, errors), (other, other_out, other_errors) = both(
            parent, command, tmp_path / name, **limits
        )
        told = (end.kind, end.name, end.message, end.code)
        assert told == (other.kind, other.name, other.message, other.code), name
        assert out == other_out, name
        assert errors == other_errors, name
        assert end.peak_bytes > 2**20
    assert end.kind == "timeout"


def test_children_do_not_share_random_numbers(script, parents, tmp_path):
    text = "import numpy, random; print(random.random(), numpy.random.rand())"
    parent = parents(imports_of(script(text=text, ending="")))
    seen = set()
    for name in "ab":
        (tmp_path / name).mkdir()
        command = [sys.executable, "scripts/train.py"]
        finish(parent.fork(job(tmp_path / name, command)))
        seen |= set((tmp_path / name / OUTPUT).read_text().split())
    assert len(seen) == 4


def test_several_run_at_a_time_and_late_variables_reach_them(script, parents, tmp_path):
    text = "import numpy, os, time; time.sleep(0.3); print(os.environ['PLACE'])"
    parent = parents(imports_of(script(text=text, ending="")), late=("PLACE",))
    children = []
    for name in "abc":
        (tmp_path / name).mkdir()
        environment = {**os.environ, "PLACE": name}
        command = [sys.executable, "scripts/train.py"]
        children.append(parent.fork(job(tmp_path / name, command, environment)))
    assert [finish(child).kind for child in reversed(children)] == ["clean"] * 3
    assert [(tmp_path / name / OUTPUT).read_text() for name in "abc"] == ["a\n", "b\n", "c\n"]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            "from threading import Event, Thread; Thread(target=Event().wait, daemon=True).start()",
            "started threads",
        ),
        ("import os; os._exit(3)", "is gone"),
    ],
)
def test_a_parent_that_is_not_fit_refuses(tmp_path, parents, code, reason):
    (tmp_path / "unfit.py").write_text(code)
    parent = parents(Imports(modules=(("unfit", ()),), folder=str(tmp_path)))
    with pytest.raises(CannotForkError, match=reason):
        parent.fork(job(tmp_path, [sys.executable, "x.py"]))
    with pytest.raises(CannotForkError, match=reason):
        parent.fork(job(tmp_path, [sys.executable, "x.py"]))


def test_what_was_imported_under_other_settings_is_no_parent(tmp_path, parents):
    parent = parents(Imports())
    environment = {**os.environ, "OMP_NUM_THREADS": "7"}
    with pytest.raises(CannotForkError, match="OMP_NUM_THREADS may be read while"):
        parent.fork(job(tmp_path, [sys.executable, "x.py"], environment))
    with pytest.raises(CannotForkError, match="only a Python script"):
        parent.fork(job(tmp_path, [sys.executable, "-m", "x"]))


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def all_gone(*pids):
    deadline = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(alive, pids))


def test_a_child_whose_parent_is_killed_is_lost_and_ended(script, parents, tmp_path):
    parent = parents(imports_of(script("time.sleep(600)")))
    command = [sys.executable, "scripts/train.py"]
    child = parent.fork(job(tmp_path, command))
    assert child.poll() is None
    parent._server.kill()
    assert finish(child).kind == "lost"
    assert all_gone(child.pid)
    with pytest.raises(CannotForkError, match="is gone"):
        parent.fork(job(tmp_path, command))


OWNER = """
import os, sys, time
from pathlib import Path
from nanstop.process.children.script_imports import imports_of
from nanstop.process.children.fork_server import ForkServer
from nanstop.process.children.isolate import BoundedCommand
parent = ForkServer(imports_of(Path(sys.argv[1])), environment=os.environ)
words = [sys.executable, sys.argv[1]]
job = BoundedCommand(command=words, folder=Path(sys.argv[2]), environment=os.environ)
child = parent.fork(job)
print(child.pid, parent._server.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_where_the_owner_is_killed(script, tmp_path, number):
    file = script("signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)")
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(file), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    pids = [int(word) for word in owner.stdout.readline().split()]
    assert all(map(alive, pids))
    owner.send_signal(number)
    owner.wait()
    owner.stdout.close()
    assert all_gone(*pids)


@pytest.mark.slow
def test_torch_and_trainers_leave_a_parent_that_can_be_forked(script, parents, tmp_path):
    text = (
        "import torch\nfrom transformers import Trainer\nfrom trl import GRPOTrainer\n"
        "torch.set_num_threads(2)\nx = torch.randn(400, 400, requires_grad=True)\n"
        "(x @ x).sum().backward()\nprint(x.grad.isfinite().all().item())\n"
        "from torch.utils.data import DataLoader\n"
        "print(len(list(DataLoader(list(range(4)), num_workers=2))))\n"
    )
    parent = parents(imports_of(script(text=text, ending="")))
    command = [sys.executable, "scripts/train.py"]
    child = parent.fork(job(tmp_path, command))
    assert finish(child).kind == "clean"
    assert (tmp_path / OUTPUT).read_text() == "True\n4\n"
