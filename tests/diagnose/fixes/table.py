"""Every fix of every page: how it is shown to cure."""

import re
from itertools import chain

from diagnose.fixes import (
    data,
    forward,
    gradients,
    objectives,
    runtime,
    setup_course,
    setup_formats,
    setup_training,
    values,
    weights,
)
from nanstop.diagnose.catalogue import CATALOGUE

FAMILIES = (
    *(setup_formats, setup_training, setup_course, forward, values, gradients, weights, data),
    *(runtime, objectives),
)

PROOFS = {}
for family in FAMILIES:
    for key, each in family.FIXES.proofs.items():
        PROOFS.setdefault(key, []).extend(each)
TESTED = {key: each for family in FAMILIES for key, each in family.FIXES.tested.items()}
WORDS = {key: each for family in FAMILIES for key, each in family.FIXES.words.items()}
COSTS = list(chain.from_iterable(family.FIXES.costs for family in FAMILIES))


def numbered():
    """(code, number) of each fix that a page has."""
    for rule in CATALOGUE:
        fixes = rule.page.partition("## Fix\n")[2].partition("## Fix safety")[0]
        for number in re.findall(r"^(\d+)\. ", fixes, re.MULTILINE):
            yield rule.code, int(number)
