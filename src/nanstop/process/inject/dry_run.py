"""A script run up to its first training, in a child process, and a job done there in place of
the training.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from nanstop.decide.policy import Policy
from nanstop.errors import NanstopError
from nanstop.process.children.command import resolve_command
from nanstop.process.inject.progress import PROGRESS, Follow, told
from nanstop.process.inject.variables import DRY_RUN, watching
from nanstop.records.codec import from_json
from nanstop.store.files import MAX_JSON_BYTES, read_text

_STDERR = 2
_LOOKS_A_SECOND = 5
_MOST_BYTES = 4000
"""The end of what a child wrote, where it is shown after all."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """``job``: the module that does it.

    ``options``: plain values for it; ``out``: where its answer goes.

    ``keeps_watch``: whether the script's own watch of a trainer stays:
    to a doctor it is one of the guards.
    """

    job: str
    out: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    keeps_watch: bool = False


def current_dry_run(environment: Mapping[str, str] | None = None) -> DryRun | None:
    """Return the dry run that this process is, or None in an ordinary run."""
    text = (os.environ if environment is None else environment).get(DRY_RUN)
    return DryRun(**json.loads(text)) if text else None


def dry_run(
    command: Sequence[str],
    job: str,
    kind: type[T],
    *,
    options: Mapping[str, Any] | None = None,
    keeps_watch: bool = False,
    follow: Follow | None = None,
) -> T:
    """Run a script up to its first training, have ``job`` done with what it built, and return the
    job's record.

    The training itself never begins, and nothing of the script runs after it would have: nothing is
    saved or pushed. A raw loop ends at its first optimizer step, unless the job needs more of it.
    The child's output goes to standard error. ``job``: the module that offers it, see
    ``dry_run_child.JobModule``. ``kind``: class of the record. ``follow`` is called several times a
    second with how far the job is; of what the child writes, the end is shown then, and only where
    it has come to no answer. Errors: ``NanstopError`` NS001 for a command that cannot be started or
    a script that ends before any training, and whatever error the job itself ends with.
    """
    resolved = resolve_command(command)
    with TemporaryDirectory(prefix="nanstop-") as folder:
        answer = Path(folder, "answer.json")
        run = DryRun(job=job, options=options or {}, out=str(answer), keeps_watch=keeps_watch)
        code = _run(resolved, run) if follow is None else _followed(resolved, run, follow)
        if not answer.is_file():
            raise _never_trained(code)
        return _opened(json.loads(read_text(answer, MAX_JSON_BYTES)), kind)


def answered(*, result: str = "", error: NanstopError | None = None, crash: str = "") -> bytes:
    """Return what a job writes.

    Its record as JSON, an error that the user can act on, or a traceback.
    """
    said = (
        {"message": error.message, "code": error.code, "hint": error.hint}
        if error is not None
        else None
    )
    return json.dumps({"result": result, "error": said, "crash": crash}).encode()


def _opened(answer: Mapping[str, Any], kind: type[T]) -> T:
    if answer["error"] is not None:
        error = answer["error"]
        raise NanstopError(error["message"], code=error["code"], hint=error["hint"])
    if answer["crash"]:
        raise RuntimeError(answer["crash"])
    return from_json(kind, answer["result"])


def _run(command: Sequence[str], run: DryRun) -> int:
    """Run the child to its end and return its exit code."""
    try:
        variables = _variables(run)
        return subprocess.run(command, env=variables, stdout=_STDERR, check=False).returncode
    except OSError as error:
        raise _not_started(command, error) from error


def _followed(command: Sequence[str], run: DryRun, follow: Follow) -> int:
    """Return the exit code of the child, whose output is kept and shown where it did not answer."""
    folder = Path(run.out).parent
    file, written = folder / "progress.json", folder / "written"
    variables = {**_variables(run), PROGRESS: str(file)}
    began = time.monotonic()
    with written.open("wb") as output:
        try:
            child = subprocess.Popen(
                command, env=variables, stdout=output, stderr=subprocess.STDOUT
            )
        except OSError as error:
            raise _not_started(command, error) from error
        with child:
            try:
                while child.poll() is None:
                    follow(told(file), time.monotonic() - began)
                    with suppress(subprocess.TimeoutExpired):
                        child.wait(1 / _LOOKS_A_SECOND)
            except BaseException:
                child.kill()
                raise
    follow.clear()
    if not Path(run.out).is_file():
        sys.stderr.write(written.read_bytes()[-_MOST_BYTES:].decode(errors="replace"))
    return child.returncode


def _not_started(command: Sequence[str], error: OSError) -> NanstopError:
    return NanstopError(f"cannot start {command[0]}: {error.strerror or error}")


def _variables(run: DryRun) -> dict[str, str]:
    folder = Path(run.out).parent
    python_path = os.environ.get("PYTHONPATH", "")
    own = {name: value for name, value in os.environ.items() if name != "NANSTOP"}
    variables = watching(Policy(on_failure="observe"), folder, secrets.token_hex(8), python_path)
    # A tracker would publish an empty run.
    return own | variables | {"WANDB_MODE": "disabled", DRY_RUN: json.dumps(asdict(run))}


def _never_trained(code: int) -> NanstopError:
    if code:
        return NanstopError(
            f"the script ended with exit code {code} before its training",
            hint="what it wrote stands above; run it without nanstop to see whether it trains",
        )
    return NanstopError(
        "the script ended without training",
        hint="nanstop waits for train() of a transformers or TRL trainer, "
        "or for an optimizer's first step",
    )
