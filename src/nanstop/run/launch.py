"""Runs any training command in a child process that is watched; its streams and its exit code stay its own."""

from __future__ import annotations

import difflib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, cast

from nanstop.errors import NanstopError
from nanstop.report.codec import to_json
from nanstop.run.opening import incident_folder, switched_off
from nanstop.run.policy import OnFailure, Policy
from nanstop.run.store import Store, load_summary
from nanstop.run.summary import Summary

INJECTION = Path(__file__).parent.parent / "adapters" / "injection"
"""The folder that holds nothing but ``sitecustomize.py``."""

_PYTHON_FILES = (".py", ".pyw", ".pyz", ".zip")
_LAUNCHERS = ("accelerate", "deepspeed", "python", "torchrun", "trl")


def launch(
    command: Sequence[str],
    *,
    policy: Policy,
    out: str | os.PathLike[str] | None = None,
    as_json: bool = False,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run ``command`` watched and return its exit code; 128 + n, as a shell says it, if signal n ended it.

    ``as_json``: the run's summary follows on stdout. ``environment``: of the child, the present one by default; what
    watching needs is added. Errors: ``NanstopError`` NS001 for a command that cannot be started.
    """
    resolved = resolve_command(command)
    given = dict(os.environ if environment is None else environment)
    if switched_off(given):
        return _run(resolved, given)
    folder = Path(out or given.get("NANSTOP_DIR") or incident_folder()).absolute()
    run_id = secrets.token_hex(8)
    store = Store(folder, run_id)
    store.reset()
    began = time.monotonic()
    code = _run(resolved, given | watching(policy, folder, run_id, given.get("PYTHONPATH", "")))
    summary = _close(store, code, time.monotonic() - began)
    if as_json:
        sys.stdout.write(f"{to_json(summary)}\n")
    return code


def watching(policy: Policy, folder: Path, run_id: str, python_path: str = "") -> dict[str, str]:
    """Return the environment variables under which every Python process below is watched."""
    return {
        "PYTHONPATH": os.pathsep.join(part for part in (str(INJECTION), python_path) if part),
        "NANSTOP_RUN": run_id,
        "NANSTOP_DIR": str(folder),
        "NANSTOP_ON_FAILURE": policy.on_failure,
        "NANSTOP_ALLOW": ",".join(policy.allow),
    }


def watched_policy(environment: Mapping[str, str]) -> Policy:
    """Return the policy that ``watching`` wrote down."""
    allow = tuple(name for name in environment.get("NANSTOP_ALLOW", "").split(",") if name)
    word = cast("OnFailure", environment.get("NANSTOP_ON_FAILURE", "repair"))  # Policy checks it
    return Policy(on_failure=word, allow=allow)


def resolve_command(args: Sequence[str]) -> list[str]:
    """Return the command to start: a script or ``-m MODULE`` under this Python, else a program and its arguments.

    A program is looked for on PATH, then beside this Python. Errors: ``NanstopError`` NS001 for one that is not there.
    """
    if not args:
        raise NanstopError("nothing to run", hint="nanstop run SCRIPT | -m MODULE | COMMAND ...")
    first, *rest = args
    if first == "-m":
        if not rest:
            raise NanstopError("-m needs the name of a module")
        return [sys.executable, *args]
    if first.startswith("-"):
        raise NanstopError(f"unknown option: `{first}`", hint="options of nanstop: nanstop run -h")
    path = Path(first)
    if _is_python(path):
        return [sys.executable, *args]
    program = shutil.which(first) or shutil.which(first, path=str(Path(sys.executable).parent))
    if program is None:
        raise _missing(first)
    return [program, *rest]


def _is_python(path: Path) -> bool:
    if path.suffix in _PYTHON_FILES:
        if not path.exists():
            raise _missing(str(path))
        return True
    if path.is_dir():
        if not (path / "__main__.py").is_file():
            raise NanstopError(f"{path} is a folder without __main__.py")
        return True
    return path.is_file() and not os.access(path, os.X_OK)


def _missing(name: str) -> NanstopError:
    path = Path(name)
    folder = path.parent if path.parent.is_dir() else Path()
    scripts = [str(folder / one.name) for one in folder.glob("*.py")]
    is_script = path.suffix in _PYTHON_FILES or path.name != name
    near = difflib.get_close_matches(name, scripts if is_script else [*scripts, *_LAUNCHERS], n=1)
    what = "script" if is_script else "program"
    return NanstopError(
        f"no such {what}: {name}", hint=f"did you mean `{near[0]}`?" if near else ""
    )


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    try:
        child = subprocess.Popen(command, env=dict(environment))
    except OSError as error:
        raise NanstopError(f"cannot start {command[0]}: {error.strerror or error}") from error
    with _forwarding(child):
        code = child.wait()
    return code if code >= 0 else 128 - code


@contextmanager
def _forwarding(child: subprocess.Popen[Any]) -> Iterator[None]:
    """Pass SIGTERM and SIGINT on. What is typed at the terminal reaches the child without us."""

    def forward(number: int, _frame: FrameType | None) -> None:
        if not (number == signal.SIGINT and _typed()):
            child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _typed() -> bool:
    """Return whether a SIGINT now comes from the terminal, which sends it to the whole foreground group."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):
        return False


def _close(store: Store, code: int, seconds: float) -> Summary:
    """Write down how the run ended; an empty summary if nothing of it was ever watched."""
    try:
        summary = load_summary(store.folder / "summary.json")
    except NanstopError:
        summary = Summary()
    summary = replace(summary, exit=code, seconds=max(summary.seconds, seconds))
    store.write_summary(summary)
    return summary
