"""What is found before a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from nanstop.records import (
    CONFIG,
    SCHEMA,
    Diagnosis,
    Environment,
    Probe,
    RunFacts,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """What is known of a run that has not begun, and what follows from it.

    ``probe``: None where nothing was run. ``failures``: what could not be looked at, with the reason. ``seconds``: of
    looking, without what the script itself took.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    schema: int = SCHEMA
    facts: RunFacts
    environment: Environment
    probe: Probe | None = None
    findings: tuple[Diagnosis, ...] = ()
    failures: tuple[str, ...] = ()
    seconds: float = 0.0
