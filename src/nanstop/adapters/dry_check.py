"""The job of ``nanstop check``: facts of what a script was about to train."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from nanstop.adapters.dry import Target
from nanstop.run.environment import environment
from nanstop.run.preflight import Preflight


def run(target: Target, _options: Mapping[str, Any]) -> Preflight:
    """Return the facts of a target and of this machine; the findings are drawn from them by the process above."""
    began = time.perf_counter()
    facts = target.facts
    return Preflight(
        facts=facts,
        environment=environment(import_torch=True),
        seconds=time.perf_counter() - began,
    )
