"""What is found before a run."""

from __future__ import annotations

from nanstop.records import (
    SCHEMA,
    Diagnosis,
    Environment,
    Probe,
    RunFacts,
)
from nanstop.records.record import record


@record
class Preflight:
    """What is known of a run that has not begun, and what follows from it.

    ``probe``: None where nothing was run. ``failures``: what could not be looked at, with the
    reason. ``seconds``: of looking, without what the script itself took.
    """

    schema: int = SCHEMA
    facts: RunFacts
    environment: Environment
    probe: Probe | None = None
    findings: tuple[Diagnosis, ...] = ()
    failures: tuple[str, ...] = ()
    seconds: float = 0.0
