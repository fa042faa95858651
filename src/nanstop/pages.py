"""The pages of the findings, by code or by name."""

from __future__ import annotations

from nanstop.rules.base import Rule
from nanstop.rules.catalogue import CATALOGUE
from nanstop.suggest import unknown


def find_rule(code: str) -> Rule:
    """Return the rule of a code ("NS201", in any case) or of a name ("fp16-overflow").

    Errors: ``NanstopError`` NS001 for one that does not exist, with the nearest.
    """
    for rule in CATALOGUE:
        if code.upper() == rule.code or code.lower() == rule.slug:
            return rule
    names = [name for rule in CATALOGUE for name in (rule.code, rule.slug)]
    raise unknown("finding", code.upper() if code[:2].upper() == "NS" else code, names)


def explain(code: str) -> str:
    """Return the page of a finding as Markdown, headed by its code and name. Errors: those of ``find_rule``."""
    rule = find_rule(code)
    return f"# {rule.code} {rule.slug}: {rule.title}\n\n{rule.page.strip()}\n"
