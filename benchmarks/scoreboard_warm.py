"""Runs commands as children forked from a process that has imported torch and more once:
``python scoreboard_warm.py PLAN``.

``PLAN`` is a JSON file: ``{"imports": [...], "jobs": [...], "at_once": 2}``; a job has a
``command`` (the words after ``python``: a script, or ``-m nanstop run ...``), a ``folder`` to run
in, an ``environment`` and a ``timeout``. Its output is left in ``folder`` as ``stdout``, ``stderr``
and ``ended.json``. A child is what its command would be by itself, but for what it need not import.
Under ``-m nanstop run`` the command line of nanstop runs as it is, and only its ``Popen`` forks:
this process was itself started with nanstop's injection on its path, so that torch is followed from
its import on.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from nanstop.process.children.fork_server_process import (
    STILL,
    cannot_fork,
    import_all,
    redirect,
    run_as_main,
)
from nanstop.process.children.isolate import reap

_STILL = {**STILL, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
_NAMES: Mapping[str, tuple[str, ...]] = {
    "transformers": ("LlamaForCausalLM", "PreTrainedTokenizerFast"),
    "trl": ("SFTTrainer", "DPOTrainer", "GRPOTrainer", "RewardTrainer", "KTOTrainer"),
    "peft": ("LoraConfig", "get_peft_model"),
}


@dataclass
class Running:
    """A job that is not done. ``deadline``: by ``time.monotonic``."""

    job: dict[str, Any]
    began: float
    deadline: float
    late: bool = False


def main() -> int:
    """Run all jobs of the plan, a few at a time; print a line for each that is done."""
    plan = json.loads(Path(sys.argv[1]).read_text())
    import_all(((name, list(_NAMES.get(name, ()))) for name in plan["imports"]), _STILL)
    refused = cannot_fork()
    assert not refused, refused
    gc.freeze()
    waiting, running = list(reversed(plan["jobs"])), dict[int, Running]()
    while waiting or running:
        while waiting and len(running) < plan["at_once"]:
            job = waiting.pop()
            now = time.monotonic()
            running[fork(job)] = Running(job, now, now + job["timeout"])
        _reap(running)
        time.sleep(0.02)
    return 0


@contextmanager
def scratch() -> Iterator[Path]:
    """Make a folder that is gone in the end, but not with a fork, which ends as a process does."""
    folder = Path(tempfile.mkdtemp())
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fork(job: Mapping[str, Any]) -> int:
    """Begin a job in a child and a process group of its own; return its number."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        os.setpgid(0, 0)
        folder = Path(job["folder"])
        redirect(folder / "stdout", folder / "stderr")
        os.chdir(folder)
        _environment(job["environment"])
        words = job["command"]
        _end(_run_nanstop if words[:2] == ["-m", "nanstop"] else _run_script, words)
    return pid


def _reap(running: dict[int, Running]) -> None:
    for pid, one in tuple(running.items()):
        if time.monotonic() > one.deadline and not one.late:
            one.late = True
            os.killpg(pid, signal.SIGKILL)
        ended = reap(pid, wait=False)
        if ended is None:
            continue
        del running[pid]
        seconds = time.monotonic() - one.began
        code = None if one.late else ended[0]
        found = {"code": code, "seconds": seconds}
        Path(one.job["folder"], "ended.json").write_text(json.dumps(found))
        print(json.dumps({"name": one.job["name"], **found}), flush=True)


def _environment(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    for folder in reversed(variables.get("PYTHONPATH", "").split(os.pathsep)):
        if folder and folder not in sys.path:
            sys.path.insert(1, folder)


def _end(run: Any, words: Sequence[str]) -> NoReturn:
    """Run something as the whole of this process:
    what is registered for its end happens, then it ends.
    """
    code: int = 1
    try:
        code = run(words)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # threads that are no daemons are waited for
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code & 0xFF)


def _run_script(words: Sequence[str]) -> int:
    """Run a script as ``__main__``."""
    script = str(Path(words[0]).absolute())
    sys.argv = [script, *words[1:]]
    sys.path[0] = str(Path(script).parent)
    run_as_main(script)
    return 0


def _run_nanstop(words: Sequence[str]) -> int:
    """Run the command line of nanstop; the command that it starts is a fork of this process."""
    import nanstop.__main__ as command_line
    from nanstop.commands.run import launch

    launch.subprocess = SimpleNamespace(  # type: ignore[attr-defined]
        Popen=Forked, TimeoutExpired=subprocess.TimeoutExpired
    )
    sys.argv = ["nanstop", *words[2:]]
    return command_line.main()


class Forked:
    """Stands in for ``subprocess.Popen`` of a Python script."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            _end(lambda words: _run_watched(words, env), command[1:])

    def wait(self, timeout: float | None = None) -> int:
        limit = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if limit is not None and time.monotonic() > limit:
                raise subprocess.TimeoutExpired("forked", timeout or 0.0)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run_watched(words: Sequence[str], variables: Mapping[str, str]) -> int:
    """Be the process that ``nanstop run`` starts: its injection has run, with these variables."""
    _environment(variables)
    from nanstop.process.inject.start import start

    try:
        start()
    except Exception:
        traceback.print_exc()
    return _run_script(words)


if __name__ == "__main__":
    sys.exit(main())
