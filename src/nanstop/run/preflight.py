"""What will go wrong with a run, said before its first step: facts and a short probe against the findings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from nanstop.records import (
    CONFIG,
    SCHEMA,
    Diagnosis,
    Environment,
    Evidence,
    RunFacts,
)
from nanstop.rules.diagnose import examine


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """What is known of a run that has not begun, and what follows from it.

    ``failures``: what could not be looked at, with the reason.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    schema: int = SCHEMA
    facts: RunFacts
    environment: Environment
    findings: tuple[Diagnosis, ...] = ()
    failures: tuple[str, ...] = ()
    seconds: float = 0.0


def preflight(seen: Preflight, machine: Environment | None = None) -> Preflight:
    """Return ``seen`` with its findings. Pure: nothing is run or read here.

    ``machine``: the facts of another machine, for a run that will not happen on this one.
    """
    if machine is not None:
        seen = replace(seen, environment=machine)
    found = examine(Evidence(facts=seen.facts, environment=seen.environment), "static")
    return replace(seen, findings=found.diagnoses, failures=(*seen.failures, *found.failures))
