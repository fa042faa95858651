"""How much memory this process can still have, read in one place: what the machine has free, what
its control groups leave it, and its own limits. The standard library alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

_OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|not enough memory|cannot allocate|std::bad_alloc"
    r"|status_alloc_failed",
    re.IGNORECASE,
)
_LIMITS: Mapping[str, tuple[str, str, str]] = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By controller: files of a limit and of what is used, and what of that the kernel gives back."""
_UNLIMITED = 2**60


def is_out_of_memory(name: str, message: str) -> bool:
    """Return whether an exception of this class, "" for none, says that memory was short."""
    said = "OutOfMemory" in name or name == "MemoryError"
    return said or bool(name and _OUT_OF_MEMORY.search(message))


def lacks_memory(error: BaseException | None) -> bool:
    """Return whether an exception says that memory was short."""
    return error is not None and is_out_of_memory(type(error).__name__, str(error))


def free_bytes(
    membership: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the host memory that this process can have without swapping; 0 where the system does
    not say.
    """
    machine = _machine_bytes()
    if not machine:
        return 0
    return max(0, min((machine, *_left_in_groups(membership, mounted), *_left_of_limits())))


def held_bytes() -> tuple[int, int]:
    """Return what this process holds in memory, and the most that it has held; 0 where the system
    does not say.
    """
    fields = _fields("/proc/self/status")
    return fields.get("VmRSS", 0), fields.get("VmHWM", 0)


def group_folders(
    membership: Path, mounted: Path, controllers: Sequence[str], *, around: bool = False
) -> Iterator[tuple[str, Path]]:
    """Yield each controller that this process is bound by, and the folders of its control groups;
    with ``around`` those of the groups that they are in as well.

    Version 2 ("") and version 1; inside a container the group itself may be mounted as the root.
    """
    with suppress(OSError, ValueError):
        for line in membership.read_text(errors="replace").splitlines():
            _, names, path = line.split(":", 2)
            for controller in controllers:
                if controller not in names.split(",") and names != controller:
                    continue
                below = mounted / controller
                own = below / path.lstrip("/")
                groups = own.parents if around else ()
                outer = (one for one in groups if one.is_relative_to(below))
                for folder in dict.fromkeys((own, *outer, below)):
                    yield controller, folder


def _machine_bytes() -> int:
    available = _fields("/proc/meminfo").get("MemAvailable", 0)
    if available:
        return available
    with suppress(ImportError, OSError):  # another system than Linux
        import psutil  # accelerate needs it

        return psutil.virtual_memory().available
    return 0


def _left_in_groups(membership: Path, mounted: Path) -> Iterator[int]:
    for controller, folder in _bounded_groups(membership, mounted):
        limit, used, given_back = _LIMITS[controller]
        most, present = _number(folder / limit), _number(folder / used)
        if most is not None and present is not None:
            yield most - present + _fields(folder / "memory.stat").get(given_back, 0)


@cache
def _bounded_groups(membership: Path, mounted: Path) -> tuple[tuple[str, Path], ...]:
    """Return the groups that have a limit. Looked up once: this is asked of healthy runs."""
    every = group_folders(membership, mounted, tuple(_LIMITS), around=True)
    limits = ((kind, folder, _number(folder / _LIMITS[kind][0])) for kind, folder in every)
    return tuple((k, folder) for k, folder, most in limits if most and most < _UNLIMITED)


def _left_of_limits() -> Iterator[int]:
    """Yield what the process's own limits on its address space and on its data leave it."""
    try:
        import resource  # not on Windows
    except ImportError:
        return
    for kind, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        most, _ = resource.getrlimit(kind)
        if most != resource.RLIM_INFINITY:
            held = _fields("/proc/self/status").get(used)
            if held is not None:
                yield most - held


def _fields(file: Any) -> dict[str, int]:
    """Return the numbers of a file of ``NAME: NUMBER kB`` or ``NAME NUMBER`` lines, in bytes."""
    found: dict[str, int] = {}
    with suppress(OSError):
        for line in Path(file).read_text(errors="replace").splitlines():
            name, number, *unit = (*line.split(), "", "")[:3]
            if number.isdigit():
                found[name.rstrip(":")] = int(number) * (1024 if unit == ["kB"] else 1)
    return found


def _number(file: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(file.read_text())
    return None
