"""All rewrites, by family."""

from __future__ import annotations

from variants import arithmetic, calls, loops, models, naming, python, trainers
from variants.script import Rewrite, Script, Variant, variant_of

FAMILIES: dict[str, tuple[Rewrite, ...]] = {
    "layout and Python": python.REWRITES,
    "names": naming.REWRITES,
    "quotients, roots and powers": arithmetic.REWRITES,
    "calls of torch": calls.REWRITES,
    "training loop": loops.REWRITES,
    "model": models.REWRITES,
    "trainer": trainers.REWRITES,
}


def variants_of(script: Script) -> list[Variant]:
    """Return the script under every rewrite that changes it."""
    made = [variant_of(script, one) for family in FAMILIES.values() for one in family]
    return [one for one in made if one is not None]
