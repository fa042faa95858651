"""nanstop: fine-tuning that does not stop for NaN.

Everything public is listed in ``_HOMES`` and imported when first used, so that ``import nanstop``
costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanstop.api import Callback, check, investigate, load, load_plan, plan, watch
    from nanstop.commands.compare.side_by_side import compare
    from nanstop.decide.policy import Policy
    from nanstop.diagnose.pages import explain
    from nanstop.errors import NanstopError, TrainingStopped
    from nanstop.records import Report

    __version__: str

__all__ = [
    "Callback",
    "NanstopError",
    "Policy",
    "Report",
    "TrainingStopped",
    "__version__",
    "check",
    "compare",
    "explain",
    "investigate",
    "load",
    "load_plan",
    "plan",
    "watch",
]

_HOMES = {
    "Callback": "nanstop.api",
    "NanstopError": "nanstop.errors",
    "Policy": "nanstop.decide.policy",
    "Report": "nanstop.records",
    "TrainingStopped": "nanstop.errors",
    "check": "nanstop.api",
    "compare": "nanstop.commands.compare.side_by_side",
    "explain": "nanstop.diagnose.pages",
    "investigate": "nanstop.api",
    "load": "nanstop.api",
    "load_plan": "nanstop.api",
    "plan": "nanstop.api",
    "watch": "nanstop.api",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("nanstop")
    if name not in _HOMES:
        raise AttributeError(f"module 'nanstop' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext nanstop``: records as pages, and ``%%nanstop`` for cells that train."""
    from nanstop.jupyter import load

    load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """``%unload_ext nanstop``."""
    from nanstop.jupyter import unload

    unload(shell)
