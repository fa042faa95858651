"""Trials as tasks of a Ray cluster: each worker bounds and ends its trial as this machine would.

Every node sees the folder of the bisect, the script and this Python under the same paths, as on a
shared file system. Ray connects to the cluster that ``RAY_ADDRESS`` names or that runs on this
machine, else it starts one here. Source: https://docs.ray.io/en/latest/ray-core/tasks.html
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanstop.errors import NanstopError
from nanstop.process.children.isolate import BoundedCommand, End, ExitKind, spawn

_POLL_SECONDS = 0.05
_END_SECONDS = 10.0
_CONNECT_SECONDS = 5.0
_DEVICES = "CUDA_VISIBLE_DEVICES"


class RayTasks:
    """Hands commands to a cluster: one CPU each, and one GPU where the cluster has any."""

    forks = False
    why_not = "Ray starts each trial by itself"

    def __init__(self) -> None:
        self._own = set(os.environ)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
        # The future behaviour of Ray, which else warns: a task without GPUs keeps the variable.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            import ray  # pyright: ignore[reportMissingImports]  (an extra)
        except ImportError as error:
            raise NanstopError(
                "--executor ray needs Ray, which is not installed",
                hint='pip install "nanstop[ray]"',
            ) from error
        _require_answer(os.environ.get("RAY_ADDRESS", ""))
        self._ray: Any = ray
        self._began = not ray.is_initialized()
        try:
            if self._began:
                ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
            num_gpus = 1 if ray.cluster_resources().get("GPU") else 0
        except Exception as error:  # Ray has many: no such address, another version, no room
            raise NanstopError(f"no Ray cluster: {_last_line(error)}") from error
        self._task: Any = ray.remote(num_cpus=1, num_gpus=num_gpus, max_retries=0)(_run)

    def start(self, bounded: BoundedCommand) -> _Task:
        """Return the command as a task, which waits until a worker is free."""
        plain = {
            name: text
            for name, text in bounded.environment.items()
            if name in self._own or not name.startswith("RAY_")
        }
        bounded = replace(bounded, command=list(bounded.command), environment=plain)
        return _Task(self._ray, self._task.remote(bounded, str(Path.cwd())), bounded.folder)

    def stop_forking(self, why: str) -> None:
        """Do nothing: there is no fork."""

    def close(self) -> None:
        """Let go of the cluster; one that was started here ends."""
        if self._began:
            self._ray.shutdown()


class _Task:
    """A trial on the cluster."""

    forked = False

    def __init__(self, ray: Any, result: Any, folder: Path) -> None:
        self.folder = folder
        self._ray, self._result = ray, result
        self._began = time.monotonic()

    def poll(self) -> End | None:
        """Return how the trial ended, or None while it waits or runs.

        Errors: ``NanstopError`` NS001 of the worker.
        """
        return self._end() if self._is_over(0.0) else None

    def stop(self, kind: ExitKind = "stopped") -> End:
        """End the trial; one that still waits never begins."""
        self._ray.cancel(self._result)
        if not self._is_over(_END_SECONDS):
            with suppress(Exception):  # over meanwhile
                self._ray.cancel(self._result, force=True)
        return End(kind=kind, name=kind, seconds=time.monotonic() - self._began)

    def _is_over(self, seconds: float) -> bool:
        return bool(self._ray.wait([self._result], timeout=seconds)[0])

    def _end(self) -> End:
        try:
            end: End | NanstopError = self._ray.get(self._result)
        except self._ray.exceptions.RayTaskError as error:
            raise NanstopError(f"a Ray worker cannot run a trial: {_last_line(error)}") from error
        except self._ray.exceptions.RayError as error:
            return End(kind="lost", name="lost", message=_last_line(error))
        if isinstance(end, NanstopError):
            raise end
        return end


def _run(bounded: BoundedCommand, folder: str) -> End | NanstopError:
    """Run a command in a worker, to its end or until the task is cancelled."""
    if not bounded.folder.is_dir() or not Path(folder).is_dir():
        return NanstopError(
            f"node {socket.gethostname()} does not see {bounded.folder}",
            hint="--executor ray needs folders that every node of the cluster shares",
        )
    os.chdir(folder)
    devices = {_DEVICES: os.environ[_DEVICES]} if _DEVICES in os.environ else {}
    child = None
    try:
        child = spawn(replace(bounded, environment={**bounded.environment, **devices}))
        while (end := child.poll()) is None:
            time.sleep(_POLL_SECONDS)
    except NanstopError as error:
        return error
    except BaseException:
        if child is not None:
            child.stop()
        raise
    return end


def _require_answer(address: str) -> None:
    """Raise ``NanstopError`` NS001 where nobody answers at an address.

    Ray itself tries for minutes.
    """
    host, _, port = address.rpartition("//")[2].rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except OSError as error:
        raise NanstopError(
            f"no Ray cluster at {address}: {error.strerror or error}",
            hint="RAY_ADDRESS names a cluster; without it one is started here",
        ) from error


def _last_line(error: BaseException) -> str:
    lines: Sequence[str] = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip() if lines else ''}"
