"""The smallest region, over opaque items:
found, minimal, and verified even where more is not better.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from nanstop.commands.plan.regions import ModuleGroups, RegionTrial, smallest_region
from nanstop.prove.bench import Budget

ITEMS = tuple(f"{block}.{part}" for block in "abcd" for part in ("norm", "attn", "mlp"))
GROUPS = tuple(tuple(i for i in ITEMS if i.endswith(part)) for part in ("norm", "attn", "mlp"))


def inside(item, outer):
    return item == outer or item.startswith(f"{outer}.")


def parts(item):
    return tuple(f"{item}.{n}" for n in "qkv") if item.endswith("attn") else ()


TERRAIN = ModuleGroups(groups=GROUPS, inside=inside, parts=parts)


def covered(needed, items):
    return all(any(inside(one, item) for item in items) for one in needed)


@given(st.sets(st.sampled_from(ITEMS), max_size=5), st.booleans())
def test_the_region_is_what_is_needed_and_no_more(needed, told):
    def look(items):
        missing = tuple(one for one in needed if not covered((one,), items))
        return RegionTrial(not missing, missing[:1] if told else ())

    found = smallest_region(look, TERRAIN)
    assert found is not None
    assert found.minimal
    assert covered(needed, found.items)
    assert len(found.items) == len(needed)


def test_suspects_lead_there_in_few_trials():
    needed = {"a.norm", "c.mlp", "d.attn"}

    def look(items):
        missing = tuple(sorted(needed - set(items)))
        return RegionTrial(not missing, missing)

    found = smallest_region(look, TERRAIN)
    assert set(found.items) == needed
    assert found.trials <= 6


def test_a_block_gives_way_to_a_run_of_its_parts():
    found = smallest_region(lambda items: RegionTrial(covered(("b.attn.k",), items)), TERRAIN)
    assert found.items == ("b.attn.k",)


def test_parts_that_do_not_lie_together_stay_one_block():
    needed = ("b.attn.q", "b.attn.v")
    found = smallest_region(lambda items: RegionTrial(covered(needed, items)), TERRAIN)
    assert found.items == ("b.attn",)


def test_what_is_suspected_itself_is_kept_whole():
    def look(items):
        return RegionTrial(covered(("b.attn.k",), items), ("b.attn",))

    assert smallest_region(look, TERRAIN).items == ("b.attn",)


def test_nothing_works():
    assert smallest_region(lambda _: RegionTrial(passes=False), TERRAIN) is None
    assert (
        smallest_region(lambda items: RegionTrial(False, ITEMS[: len(items) + 1]), TERRAIN) is None
    )


@settings(max_examples=60)
@given(st.sets(st.frozensets(st.sampled_from(ITEMS), max_size=4), min_size=1, max_size=12))
def test_what_is_returned_was_tried_and_fails_without_any_one_item(passing):
    """More is not better here: only the sets drawn pass, and everything together."""

    def look(items):
        return RegionTrial(frozenset(items) in passing or set(items) == set(ITEMS))

    found = smallest_region(look, ModuleGroups(groups=GROUPS, inside=inside, parts=lambda _: ()))
    assert look(found.items).passes
    for item in found.items:
        assert not look(tuple(other for other in found.items if other != item)).passes


def test_a_budget_that_ends_gives_what_passed():
    asked = []

    def look(items):
        asked.append(items)
        missing = tuple(one for one in ("a.norm", "b.norm") if one not in items)
        return RegionTrial(not missing, ITEMS)

    found = smallest_region(look, TERRAIN, budget=Budget(trials=2))
    assert found.items == ITEMS
    assert not found.minimal
    assert len(asked) == 2
    assert smallest_region(look, TERRAIN, budget=Budget(trials=1)) is None
