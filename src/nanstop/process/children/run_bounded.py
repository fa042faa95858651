"""Run as a program.

Bounds itself, has its process group end with its owner, and becomes the command it was given.

``python -I -S guard.py PIPE MEMORY COMMAND...``. Between the start of a process and the word about
it to anybody else its owner may die, so the process itself has to see to its end. Nothing but the
standard library is imported.
"""

from __future__ import annotations

import os
import sys

DONE = b"."
"""Written into the pipe: the process has ended and was waited for."""
_SIGKILL = 9
"""Every trial waits for what is imported here, and ``signal`` and ``contextlib`` take longer
than all the rest.
"""


def bound(memory_bytes: int | None) -> None:
    """Bound the private memory of this process and of those it starts (``RLIMIT_DATA``).

    No core file is written.

    Address space alone, which CUDA reserves far more of than it uses, is not counted.
    """
    import resource  # not on Windows, where the rest of this package can be imported

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))


def end_with_owner(pipe: int) -> None:
    """Have this process's group killed once nobody holds the other end of ``pipe``.

    ``DONE`` in it calls that off.

    The process that waits for this is no child of this one:
    a training may wait for all of its children.
    """
    group = os.getpgrp()
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return
    if os.fork():
        os._exit(0)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    try:
        if not os.read(pipe, 1):
            os.killpg(group, _SIGKILL)
    finally:  # a group that is gone already is no error
        os._exit(0)


def main() -> None:
    """Set the bounds and become the command (``exec``): never returns."""
    pipe, memory, *command = sys.argv[1:]
    bound(int(memory) or None)
    end_with_owner(int(pipe))
    os.close(int(pipe))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]}: {error.strerror or error}\n")
    os._exit(127)


if __name__ == "__main__":
    main()
