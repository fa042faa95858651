"""What a Trainer of transformers logs for each finding, and which findings fit what a log shows.

A loss and a gradient norm are one of: ``nan``; ``inf``; ``0``; ``finite``; ``huge``, from a million
on; ``none``, where the run ends before anything is logged. The table has the losses as they are.
With ``logging_nan_inf_filter``, which is on by default, a loss that is not finite is logged as 0
or, where several steps are logged as one, as a huge number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from nanstop.diagnose.catalogue import CATALOGUE
from nanstop.diagnose.evidence.log_filter import HUGE
from nanstop.diagnose.evidence.rule import Rule
from nanstop.errors import NanstopError, unknown

SERIES = ("loss", "grad_norm")
KINDS = ("nan", "inf", "0", "finite", "huge", "none")
FILTERED = {"nan": ("0", "huge"), "inf": ("0", "huge")}
"""What the filter makes of a loss."""

LOGGED: Mapping[str, str] = MappingProxyType(
    {
        "NS201": "nan/nan",
        "NS402": "nan/nan nan/inf inf/inf finite/finite",
        "NS503": "nan/0",
        "NS202": "nan/nan nan/finite",
        "NS404": "huge/huge huge/finite finite/huge finite/finite nan/nan",
        "NS301": "finite/inf finite/nan",
        "NS302": "nan/nan finite/nan finite/inf",
        "NS304": "finite/nan",
        "NS802": "0/finite",
        "NS701": "0/0",
        "NS602": "nan/nan finite/nan",
        "NS401": "nan/nan nan/inf",
        "NS801": "nan/nan nan/inf inf/inf finite/finite",
        "NS205": "nan/nan",
        "NS206": "nan/nan",
        "NS203": "nan/nan",
        "NS207": "inf/inf nan/nan",
        "NS702": "inf/nan nan/nan huge/huge",
        "NS501": "nan/nan",
        "NS506": "nan/nan inf/inf",
        "NS504": "inf/nan nan/nan huge/huge",
        "NS106": "nan/nan inf/inf",
        "NS105": "inf/inf nan/nan finite/huge",
        "NS305": "finite/nan finite/inf",
        "NS204": "nan/nan nan/finite",
        "NS704": "nan/nan",
        "NS403": "nan/nan finite/finite",
        "NS606": "finite/nan",
        "NS603": "nan/nan finite/nan",
        "NS108": "finite/finite finite/nan nan/nan none/none",
        "NS118": "finite/finite",
        "NS505": "nan/0 0/0 finite/finite",
        "NS114": "finite/0 finite/finite none/none",
        "NS303": "finite/0 finite/finite",
        "NS116": "finite/0 finite/finite nan/0",
        "NS112": "finite/0 finite/huge finite/finite",
        "NS209": "finite/finite finite/0",
        "NS601": "none/none",
        "NS604": "none/none",
        "NS605": "none/none",
        "NS502": "none/none",
        "NS113": "finite/finite finite/huge nan/nan",
        "NS102": "finite/finite",
        "NS110": "finite/finite",
        "NS306": "finite/finite finite/huge",
        "NS307": "finite/finite finite/inf",
        "NS111": "finite/finite",
        "NS117": "finite/finite",
        "NS115": "finite/finite",
        "NS101": "finite/finite",
        "NS107": "finite/finite nan/nan",
        "NS103": "finite/finite",
        "NS109": "finite/finite none/none",
        "NS208": "finite/finite",
        "NS703": "finite/finite",
        "NS104": "finite/finite",
        "NS607": "finite/finite",
        "NS119": "finite/finite",
        "NS000": "finite/nan nan/nan",
    }
)
"""``loss/grad_norm`` of each finding, what is usual first;
findings in about the order in which they are met.
"""


@dataclass(frozen=True, slots=True)
class Fit:
    """A finding that logs what was asked for. ``loss``: as it is, which the log may show as 0."""

    rule: Rule
    loss: str
    grad_norm: str


def findings_that_log(symptom: str) -> tuple[Fit, ...]:
    """Return the findings that fit "loss 0, grad_norm nan", or a line of a log as it stands there,
    most likely first; numbers stand for their kind.

    Errors: ``NanstopError`` NS001 for words that it does not know.
    """
    asked = _asked(symptom)
    rules = {rule.code: rule for rule in CATALOGUE}
    found = []
    for rank, (code, pairs) in enumerate(LOGGED.items()):
        for usual, pair in enumerate(pairs.split()):
            loss, grad_norm = pair.split("/")
            if asked.get("grad_norm", grad_norm) != grad_norm:
                continue
            shown = asked.get("loss", loss)
            if shown == loss or shown in FILTERED.get(loss, ()):
                found.append(((shown != loss, usual, rank), Fit(rules[code], loss, grad_norm)))
                break
    return tuple(fit for _, fit in sorted(found, key=lambda one: one[0]))


def _asked(symptom: str) -> dict[str, str]:
    asked = {}
    is_line = symptom.lstrip().startswith("{")
    told = re.sub(r"[{}'\"]|\bis\b", " ", re.sub(r"\s+and\s+", ", ", symptom))
    for part in filter(None, (part.strip() for part in told.split(","))):
        name, *value = part.replace("=", " ").replace(":", " ").split()
        if name not in SERIES:
            if is_line:
                continue
            raise unknown("series", name, SERIES)
        asked[name] = kind_of(" ".join(value))
    if not asked:
        raise NanstopError("no symptom", hint='such as "loss 0, grad_norm nan"')
    return asked


def kind_of(value: str) -> str:
    """Return the kind that a word or a number of a log stands for."""
    if value.lower() in KINDS:
        return value.lower()
    try:
        number = abs(float(value))
    except ValueError:
        raise unknown("value", value, KINDS) from None
    if number == 0.0:
        return "0"
    return "huge" if math.isfinite(number) and number >= HUGE else "finite"
