"""What a script's exception leaves suspended: in torch 2.6 to 2.11 a checkpointed function that
raises leaves its hooks on saved tensors on for as long as its traceback is kept.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import nanstop
from nanstop.replay.conditions import end_checkpoints, frames_ended


def _begun() -> Iterator[None]:
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        yield


def suspended(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Call a function as ``torch.utils.checkpoint.checkpoint`` does in torch 2.6 to 2.11."""
    generator = _begun()
    next(generator)
    out = function(x)
    next(generator, None)
    return out


def hooks_are_on() -> bool:
    """Return whether anybody's hooks have what is saved here."""
    saved = torch.ones(1, requires_grad=True).square().grad_fn
    try:
        saved._raw_saved_self.register_hooks(lambda one: one, lambda one: one)
    except RuntimeError:
        return True
    return False


def refuse(_: Tensor) -> Tensor:
    raise ValueError("refused")


def test_what_raises_leaves_nothing_on() -> None:
    with pytest.raises(ValueError, match="refused") as kept:
        suspended(refuse, torch.ones(1))
    assert hooks_are_on()
    del kept
    gc.collect()
    with pytest.raises(ValueError, match="refused") as kept, frames_ended():
        suspended(refuse, torch.ones(1))
    assert kept is not None
    assert not hooks_are_on()


def test_what_is_handled_outside_keeps_its_frames() -> None:
    def fails() -> None:
        mine = 7
        raise KeyError(mine)

    try:
        fails()
    except KeyError as outer:
        with pytest.raises(ValueError, match="refused"), frames_ended():
            refuse(torch.ones(1))
        traceback = outer.__traceback__
        assert traceback is not None
        assert traceback.tb_next is not None
        assert traceback.tb_next.tb_frame.f_locals == {"mine": 7}


def test_checkpoints_end_and_frames_of_a_script_stay() -> None:
    def fails(x: Tensor) -> Tensor:
        mine = 2 * x
        return refuse(mine)

    x = torch.ones(1, requires_grad=True)
    with pytest.raises(ValueError, match="refused") as kept:
        torch.utils.checkpoint.checkpoint(fails, x, use_reentrant=False)
    end_checkpoints(kept.value)
    assert not hooks_are_on()
    frames = [entry.frame.f_locals for entry in kept.traceback]
    assert any("mine" in names for names in frames)


class Half(nn.Module):
    """A layer of float16 that takes nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4).half()

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is not torch.float16 or self.inner.weight.dtype is not torch.float16:
            raise TypeError("half precision only")
        return self.inner(x) + x.square()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Half() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = suspended(layer, x)
        return x.float().mean()


def test_a_trial_that_the_script_refuses_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    gc.collect()
    gc.disable()  # circles are collected at any time, and on any thread
    try:
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        with nanstop.watch(net, optimizer, out=tmp_path) as watch:
            for number in range(4):
                x = torch.full((2, 4), 300.0 if number == 2 else 0.5).half()
                watch.step(lambda batch: net(batch["x"]), {"x": x})
                watch.update()
                assert not hooks_are_on()
    finally:
        gc.enable()
    (report,) = watch.incidents
    assert report.diagnoses[0].code == "NS201"
    assert report.proof is not None
    assert any(trial.outcome == "crash" for trial in report.proof.tried)
