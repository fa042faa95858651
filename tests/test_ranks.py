"""Rank and world size as launchers say them, whatever a shell has left in their variables."""

import pytest

from nanstop import ranks


@pytest.mark.parametrize("said", [None, "", "0"])
def test_the_first_of_one(monkeypatch, said):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    if said is not None:
        monkeypatch.setenv("RANK", said)
    assert (ranks.rank(), ranks.is_first()) == (0, True)
    assert ranks.num_launched() == 1


def test_a_later_one(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (ranks.rank(), ranks.is_first(), ranks.num_launched()) == (3, False, 4)


@pytest.mark.parametrize(("node", "local", "expected"), [("0", "1", 1), ("1", "0", 4), ("", "", 0)])
def test_processes_that_lightning_launches_have_no_rank_of_all(monkeypatch, node, local, expected):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("NODE_RANK", node)
    monkeypatch.setenv("LOCAL_RANK", local)
    assert (ranks.rank(), ranks.is_first()) == (expected, expected == 0)
