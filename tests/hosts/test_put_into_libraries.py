"""Functions of a script's own that stand where a library's stood."""

import functools
import sys

import torch
from torch import nn

from nanstop.hosts.put_into_libraries import put_into_libraries
from nanstop.replay.script_objects import script_objects_kept

calls = []


def counted(inner):
    @functools.wraps(inner)
    def outer(*args, **kwargs):
        calls.append(inner)
        outer.num = len(calls)
        return inner(*args, **kwargs)

    outer.num = 0
    return outer


PLACES = [
    (nn.functional, "layer_norm"),
    (torch, "matmul"),
    (torch.Tensor, "softmax"),
    (nn.Linear, "forward"),
    (nn.Module, "__call__"),
    (sys.modules[nn.Linear.__module__], "Parameter"),
]


def test_they_are_found_wherever_they_stand(monkeypatch):
    model = nn.Sequential(nn.Linear(2, 2))
    assert list(put_into_libraries(model.modules())) == []
    for owner, name in PLACES:
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    placed = [vars(owner)[name] for owner, name in PLACES]
    assert set(put_into_libraries(model.modules())) == set(placed)


def test_one_behind_another_is_found(monkeypatch):
    first = counted(nn.functional.layer_norm)
    second = counted(first)
    monkeypatch.setattr(nn.functional, "layer_norm", second)
    assert set(put_into_libraries([])) == {first, second}


def test_what_they_count_is_undone(monkeypatch):
    monkeypatch.setattr(nn.functional, "layer_norm", counted(nn.functional.layer_norm))
    model = nn.LayerNorm(2)
    model(torch.ones(2))
    before = len(calls), nn.functional.layer_norm.num
    with script_objects_kept(model.modules(), put_into_libraries(model.modules())):
        model(torch.ones(2))
        assert (len(calls), nn.functional.layer_norm.num) != before
    assert (len(calls), nn.functional.layer_norm.num) == before
