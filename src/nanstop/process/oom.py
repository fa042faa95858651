"""Evidence that a process ended for want of memory, where it can be read."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

_FILES = {"": ("memory.events",), "memory": ("memory.oom_control",)}
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)

_OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|not enough memory|cannot allocate|std::bad_alloc",
    re.IGNORECASE,
)


def is_out_of_memory(name: str, message: str) -> bool:
    """Return whether an exception of this class, "" for none, says that memory was short."""
    said = "OutOfMemory" in name or name == "MemoryError"
    return said or bool(name and _OUT_OF_MEMORY.search(message))


def num_oom_kills(
    membership: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return how many out-of-memory kills the control groups of this process have counted.

    None if none says so.

    Version 2 (``memory.events``) and version 1 (``memory.oom_control``); inside a container the
    group itself may be mounted as the root.
    """
    try:
        lines = membership.read_text(errors="replace").splitlines()
    except OSError:
        return None
    counts = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller, names in _FILES.items():
            if controller not in controllers.split(",") and controllers != controller:
                continue
            below = mounted / controller
            places = dict.fromkeys((below / path.lstrip("/"), below))
            counts += [_count(place / name) for place in places for name in names]
    known = [count for count in counts if count is not None]
    return max(known) if known else None


def _count(file: Path) -> int | None:
    try:
        found = _COUNT.search(file.read_text(errors="replace"))
    except OSError:
        return None
    return int(found.group(1)) if found else None


def killed_by_kernel(pids: tuple[int, ...]) -> str:
    """Return the kernel's line about killing one of these processes, or "" where it has none or
    may not be read.
    """
    try:
        done = subprocess.run(
            ["dmesg"], capture_output=True, text=True, timeout=5, check=False, errors="replace"
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return kernel_line(done.stdout, pids)


def kernel_line(log: str, pids: tuple[int, ...]) -> str:
    """Return the last line of a kernel log that says that one of these processes was killed, or
    "".
    """
    named = re.compile(rf"[Kk]illed process ({'|'.join(map(str, pids))})\b") if pids else None
    lines = [line.strip() for line in log.splitlines() if named and named.search(line)]
    return lines[-1] if lines else ""
