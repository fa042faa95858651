"""The process of ``fork_server``: imports, then forks a child for each request.

Requests and answers are lines of JSON in two pipes. A fork copies one thread only, so that none may
run beside the main one; and a device that is open in the parent cannot be used in its children.
Either is a refusal, said with its reason.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import json
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from select import select
from types import ModuleType
from typing import Any

from nanstop.process.children.isolate import ERRORS, OUTPUT, reap, signal_group
from nanstop.process.children.run_bounded import bound

STILL: Mapping[str, str] = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""While modules are imported: numpy and pyarrow start no thread, torch asks for devices without
opening one.

https://docs.pytorch.org/docs/stable/notes/cuda.html#device-agnostic-code
"""

_POLL_SECONDS = 0.01
_OPENED = ("/dev/nvidia-uvm", "/dev/kfd", "/dev/accel", "/dev/dri/render", "/dev/davinci")
"""Beginnings of what a process has open once it has initialised an accelerator;
asking how many there are does not.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRequest:
    """A request: what a child is to be."""

    command: list[str]
    folder: str
    environment: dict[str, str]
    memory_bytes: int | None


def main() -> None:
    """Serve until nobody asks any more; in a child, run the script."""
    requests, replies, plan = (json.loads(word) for word in sys.argv[1:])
    modules, defaults, variables, folder = plan
    _search_as_in(folder)
    import_all(modules, {**STILL, **defaults, **os.environ, **variables})
    # No child looks through what all of them share, which copies it and takes a second when each of
    # them ends.
    gc.freeze()
    request = _Server(requests, replies).serve()
    if request is not None:
        _become(request)


class _Server:
    """The loop of the parent."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._replies = requests, replies
        self._children: set[int] = set()
        self._unread = b""

    def serve(self) -> ForkRequest | None:
        """Return the request in a child.

        None in the parent, when nobody asks any more and all children are ended.
        """
        self._say(refused=reason) if (reason := cannot_fork()) else self._say(ready=True)
        while (request := self._next()) is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            if reason := cannot_fork():
                self._say(refused=reason)
                continue
            pid = os.fork()
            if not pid:
                os.setpgid(0, 0)
                os.close(self._requests)
                os.close(self._replies)
                return ForkRequest(**request)
            with suppress(
                OSError
            ):  # whichever comes first; the group is there before anybody hears of it
                os.setpgid(pid, pid)
            self._children.add(pid)
            self._say(pid=pid)
        for pid in self._children:
            signal_group(pid, signal.SIGKILL)
        return None

    def _next(self) -> dict[str, Any] | None:
        """Return the next request, None after the last; on the way tell how children end."""
        while b"\n" not in self._unread:
            if select([self._requests], [], [], _POLL_SECONDS if self._children else None)[0]:
                data = os.read(self._requests, 65536)
                if not data:
                    return None
                self._unread += data
            for pid in tuple(self._children):
                if (ended := reap(pid, wait=False)) is not None:
                    self._children.discard(pid)
                    self._say(end=(pid, *ended))
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def _say(self, **message: Any) -> None:
        data = json.dumps(message).encode() + b"\n"
        with suppress(BrokenPipeError):  # the next request is the end of all
            while data:
                data = data[os.write(self._replies, data) :]


def _search_as_in(folder: str) -> None:
    """Have modules found as in a script of ``folder``."""
    sys.path[:] = [entry for entry in sys.path if entry]
    if folder and not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)


def import_all(modules: Iterable[tuple[str, list[str]]], environment: Mapping[str, str]) -> None:
    """Import modules and the names that are taken from them.

    What cannot be imported is the script's to find out.
    """
    own = dict(os.environ)
    os.environ.update(environment)
    try:
        for name, members in modules:
            with suppress(Exception):
                module = importlib.import_module(name)
                for member in members:
                    _take(module, member)
    finally:
        os.environ.clear()
        os.environ.update(own)


def _take(module: ModuleType, member: str) -> None:
    try:
        getattr(module, member)  # lazy packages import now
    except AttributeError:
        importlib.import_module(f"{module.__name__}.{member}")


def cannot_fork() -> str:
    """Return why a child of this process might not be what a process of its own is.

    Empty where it would.
    """
    try:
        threads = [Path(place, "comm").read_text().strip() for place in _listed("/proc/self/task")]
        files = [str(place.readlink()) for place in _listed("/proc/self/fd") if place.is_symlink()]
    except OSError:
        return "whether threads are running cannot be told here"
    if len(threads) != 1:
        return f"an import has started threads ({', '.join(sorted(threads))})"
    device = next((file for file in files if file.startswith(_OPENED)), None)
    if device is not None:
        return f"an import has opened {device}"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "an import has initialised CUDA"
    return ""


def _listed(folder: str) -> list[Path]:
    return list(Path(folder).iterdir())


def _become(request: ForkRequest) -> None:
    """Be the process of a command: ends like it, by ``SystemExit`` or whatever kills it."""
    folder = Path(request.folder)
    redirect(folder / OUTPUT, folder / ERRORS)
    bound(request.memory_bytes)
    os.environ.clear()
    os.environ.update(request.environment)
    if (
        "numpy" in sys.modules
    ):  # Python's own generator is seeded anew by fork itself, torch's is a constant
        sys.modules["numpy"].random.seed()
    sys.argv, sys.orig_argv = list(request.command[1:]), list(request.command)
    try:
        run_as_main(str(Path(request.command[1]).absolute()))
    except SystemExit:
        raise
    except BaseException as error:
        _uncaught(error)
        raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else 1) from None


def run_as_main(script: str) -> None:
    """Run a script as ``__main__``. Raises what it raises."""
    main = ModuleType("__main__")
    loader = SourceFileLoader("__main__", script)
    vars(main).update(
        __file__=script,
        __loader__=loader,
        __builtins__=builtins,
        __annotations__={},
        __cached__=None,
        __spec__=None,
    )
    sys.modules["__main__"] = main
    exec(compile(loader.get_data(script), script, "exec", dont_inherit=True), vars(main))


def _uncaught(error: BaseException) -> None:
    """Do what the interpreter does, without the frames of this file in the traceback."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, traceback
    sys.excepthook(type(error), error.with_traceback(traceback), traceback)


def redirect(out: Path, errors: Path) -> None:
    """Read nothing, and write into these files."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for stream, file in ((0, Path(os.devnull)), (1, out), (2, errors)):
        handle = os.open(file, flags if stream else os.O_RDONLY, 0o666)
        os.dup2(handle, stream)
        os.close(handle)
