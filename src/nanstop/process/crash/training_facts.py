"""``PID.facts.json`` of the live folder.

What the process that trains knows and the one above it does not.
"""

from __future__ import annotations

from nanstop.records import SCHEMA, Environment, RunFacts
from nanstop.records.record import record


@record
class TrainingFacts:
    """Facts of a training and of its machine, and the rank of the process among those that train
    together.
    """

    schema: int = SCHEMA
    facts: RunFacts
    environment: Environment
    rank: int = 0
