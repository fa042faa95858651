"""``PID.facts.json`` of the live folder: what the process that trains knows and the one above it does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from nanstop.records import CONFIG, SCHEMA, Environment, RunFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFacts:
    """Facts of a training and of its machine, and the rank of the process among those that train together."""

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    schema: int = SCHEMA
    facts: RunFacts
    environment: Environment
    rank: int = 0
