"""Where an exception was raised that ended a process: in what other processes come to as well."""

from __future__ import annotations

from collections.abc import Sequence
from traceback import walk_tb

from nanstop.own_code import is_library
from nanstop.process.crash.flight_file import Exchange

_MEETS = ("torch.distributed", "torch.nn.parallel")


def exchange_of(error: BaseException) -> Exchange | None:
    """Return what raised an exception, if it may have waited for other processes; else None.

    The backward of a model that several processes share exchanges its gradients.
    """
    frames = [(frame, line) for frame, line in walk_tb(error.__traceback__)]
    own = [one for one in frames if not is_library(one[0].f_code.co_filename)]
    within = _within([frame.f_globals.get("__name__", "") for frame, _ in frames])
    if not within or not own:
        return None
    frame, line = own[-1]
    return Exchange(
        within=within, at=f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
    )


def _within(modules: Sequence[str]) -> str:
    """Return what the innermost of some modules' code was for, "" for nothing that waits for
    others: below it there is no code of Python's.
    """
    if not modules:
        return ""
    if _is_of(modules[-1], "torch.autograd"):
        return "backward"
    if not any(_is_of(modules[-1], one) for one in _MEETS):
        return ""
    return "forward" if "torch.nn.modules.module" in modules else "collective"


def _is_of(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")
