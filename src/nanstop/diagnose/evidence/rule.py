"""What a finding is made of."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any, Literal

from nanstop.frozen import frozen
from nanstop.records import Atom, Change, Confidence, Diagnosis, Evidence, SourceLine

Role = Literal["cause", "chance", "symptom", "log", "unexplained"]
"""What made a failure; that it comes and goes, so that no replay says what made it; how it shows;
how a log shows it; that nothing else explains it."""


@frozen
class Reason:
    """What one branch of a check has found. ``fix``: what to do about it, in a line. ``source``:
    the line of the script that is to be changed, where it is known; ``behind``: lines that gave it
    what it works with. ``trains_nothing``, ``remedies``: see ``Diagnosis``.
    """

    confidence: Confidence
    title: str
    cause: str
    fix: str
    source: SourceLine | None = None
    behind: tuple[SourceLine, ...] = ()
    trains_nothing: bool = False
    remedies: tuple[tuple[Atom, ...], ...] = ()

    def diagnosis(self, code: str, **known: Any) -> Diagnosis:
        """Return it as the diagnosis of a finding. ``known``: further fields."""
        return Diagnosis(
            code=code,
            title=self.title,
            cause=self.cause,
            confidence=self.confidence,
            lines=(
                *(line.quoted for line in self.behind),
                *(() if self.trains_nothing else (self.fix,)),
            ),
            usual_cure=self.fix if self.trains_nothing else "",
            trains_nothing=self.trains_nothing,
            remedies=self.remedies,
            **known,
        ).at(self.source)


@frozen
class Rule:
    """A finding: its code, its name (the bad thing, in kebab case), its check, and what others mean
    to it.

    ``when``: "static" rules look at ``RunFacts`` before and during a run, "incident" rules at a
    failure, "gauge" rules at sampled ranges and logs of a run that has not failed, "account" rules
    at what became of its gradients. ``yields_to``: codes that are more specific; where one of them
    is more than possible, this one is withdrawn. ``beside``: codes of standing facts that can have
    caused this, named beside it. ``confirm``: the change of what the first bad operation read after
    which it must be finite if the finding is true, None where there is no such; without it, or
    before it was made, a finding that has one is likely at most, and one that it speaks against is
    withdrawn. ``at_failure``: asked at a failure in place of ``check``: whether the standing fact
    was seen to make it.
    """

    code: str
    slug: str
    title: str
    check: Callable[[Evidence], Diagnosis | None]
    when: tuple[str, ...]
    role: Role = "cause"
    yields_to: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    confirm: Callable[[Evidence], Change | None] | None = None
    at_failure: Callable[[Evidence], Diagnosis | None] | None = None

    @property
    def page(self) -> str:
        """The docstring of the file of the check, in Markdown; empty under ``python -OO``."""
        return sys.modules[self.check.__module__].__doc__ or ""

    @property
    def usual_cure(self) -> str:
        """The first item under "Fix" of the page, on one line and without its cost."""
        _, _, fixes = self.page.partition("\n## Fix\n1. ")
        first = re.split(r"\n(?:\d+\. |\n|$)", fixes, maxsplit=1)[0]
        return " ".join(first.split()).partition(" Cost: ")[0]
