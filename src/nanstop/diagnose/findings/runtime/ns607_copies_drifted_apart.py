"""Copies of a model that ranks keep alike have drifted apart.

## What happened
TODO: what a user sees.

## Why it happens
TODO: the arithmetic, with numbers.

## Example
```python
TODO: a few lines that show it, with what they print
```

## Fix
1. TODO: in the order to try. Cost: TODO.

## Fix safety
TODO: what the fix changes in the training.

## Not to be confused with
TODO: findings that look alike, and what tells them apart.

## References
- https://TODO.example/an-issue-or-a-paper
"""

from __future__ import annotations

from nanstop.diagnose.evidence.reading import standing
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Diagnosis, Evidence


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if copies of a model differ between ranks."""
    found = standing(evidence).replicas
    if found is None:
        return None
    return Diagnosis(
        code="NS607",
        title="copies of a model that ranks keep alike have drifted apart",
        cause=f"{found}",
        confidence="likely",
    )


RULE = Rule(
    "NS607",
    "copies-drifted-apart",
    "copies of a model that ranks keep alike have drifted apart",
    check,
    ("static",),
)
