"""The machine that is measured, and what it lacks."""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "trl",
    "bitsandbytes",
    "triton",
    "liger-kernel",
    "torchao",
    "mindstudio-probe",
)
Row = dict[str, Any]
"""One line of a table: its columns by name."""


@dataclass
class Machine:
    """``device``: "cuda" or "cpu". ``toy``: sizes that a CPU goes through in seconds, whose figures
    say nothing. ``minutes``: after which a part begins nothing new.
    """

    device: str
    toy: bool
    minutes: float
    lacks: list[str] = field(default_factory=list)
    _until: float = 0.0

    @property
    def has_cuda(self) -> bool:
        return self.device == "cuda"

    def begin(self) -> None:
        """Begin a part: its minutes run from now on."""
        self.lacks.clear()
        self._until = time.monotonic() + 60.0 * self.minutes

    def goes_on(self, what: str) -> bool:
        """Return whether there is time for more, and note ``what`` is left out where there is
        none.
        """
        if time.monotonic() < self._until:
            return True
        self.lack(f"{what}: no time was left of {self.minutes:g} minutes")
        return False

    def lack(self, what: str) -> None:
        """Note what is not measured here, and why."""
        if what not in self.lacks:
            self.lacks.append(what)

    def has(self, package: str, what: str) -> bool:
        """Return whether a package is there, and note that ``what`` is left out where not."""
        there = find_spec(package) is not None
        if not there:
            self.lack(f"{what}: {package} is not installed")
        return there

    def synchronise(self) -> None:
        if self.has_cuda:
            torch.cuda.synchronize()

    def milliseconds(self, work: Callable[[], object]) -> float:
        """Return how long some work takes, with all that it started on the device."""
        self.synchronise()
        began = time.perf_counter()
        work()
        self.synchronise()
        return 1e3 * (time.perf_counter() - began)

    @contextmanager
    def within_memory(self, what: str) -> Iterator[None]:
        """Note what does not fit, and go on; free all that was used on the way out."""
        try:
            yield
        except torch.OutOfMemoryError:
            self.lack(f"{what}: does not fit into the device's memory")
        finally:
            gc.collect()
            if self.has_cuda:
                torch.cuda.empty_cache()


def present(*, toy: bool, minutes: float) -> Machine:
    """Return this machine: its CUDA device if it has one, else its CPU, on which all is a toy."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Machine(device, toy or device == "cpu", minutes)


def described(machine: Machine) -> Row:
    """Return the device and the versions of what matters to it."""
    versions = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    known: Row = {"device": machine.device, "toy": machine.toy, "python": platform.python_version()}
    if machine.has_cuda:
        properties = torch.cuda.get_device_properties(0)
        known |= {
            "name": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return known | {"versions": versions}
