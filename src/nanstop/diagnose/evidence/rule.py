"""What a finding is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nanstop.records import Diagnosis, Evidence


@dataclass(frozen=True, slots=True)
class Rule:
    """A finding: its code, its name (the bad thing, in kebab case), its check and its page (a Markdown docstring).

    ``when``: "static" rules look at ``RunFacts`` before and during a run, "incident" rules at a failure, "gauge" rules
    at sampled ranges and logs of a run that has not failed.
    """

    code: str
    slug: str
    title: str
    check: Callable[[Evidence], Diagnosis | None]
    when: tuple[str, ...]
    page: str
