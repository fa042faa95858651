"""Evidence that a process ended for want of memory, where it can be read."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from nanstop.numerics.host_memory import group_folders

_FILES = {"": ("memory.events",), "memory": ("memory.oom_control",)}
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def num_oom_kills(
    membership: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return how many out-of-memory kills the control groups of this process have counted.

    None if none says so. Version 2 (``memory.events``) and version 1 (``memory.oom_control``).
    """
    groups = group_folders(membership, mounted, tuple(_FILES))
    counts = [_count(folder / name) for kind, folder in groups for name in _FILES[kind]]
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
