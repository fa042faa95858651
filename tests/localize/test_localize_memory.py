"""Where memory is short, a place is found from fewer looks, or is found and not tested: a run that
could not be completed takes nothing with it but itself.
"""

import pytest
import torch
from torch import nn

from fnstep import FnStep
from nanstop.errors import ShortOfMemoryError
from nanstop.localize import localize as place
from nanstop.localize import scene
from nanstop.tracing import op_details
from nanstop.tracing.op_details import Observer
from nanstop.tracing.op_patches import Filled, Patch, ReachedError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        hidden = self.up(x)
        return self.down(hidden.square() * 1e-3)


def overflowing(before=lambda: None):
    """Return a step whose second row overflows in `square`. ``before``: called with each run."""
    torch.manual_seed(0)
    net = Net().half()
    with torch.no_grad():
        net.up.weight[0, 0] = 500.0
    batch = {"x": 0.1 * torch.randn(4, 8).half()}
    batch["x"][1, 0] = 2.0

    def loss(net, batch):
        before()
        return net(batch["x"]).float().mean()

    return FnStep(net, loss, [batch])


def named(found):
    event = found.first_bad
    return found.key, found.origin, event.inputs, event.outputs, event.wider, found.reaches


def short_for(monkeypatch, kind, times=99):
    """Have memory be short for runs with a look of a kind, the first ``times`` of them; return what
    looks there were."""
    whole, seen = scene.look_again, []

    def again(step, micro, *looks, **options):
        met = [look for look in looks if isinstance(look, kind)]
        seen.extend(met)
        if met and len(seen) <= times:
            raise ShortOfMemoryError
        return whole(step, micro, *looks, **options)

    monkeypatch.setattr(scene, "look_again", again)
    return seen


def test_a_sparing_look_ends_with_the_last_operation_it_is_for(monkeypatch):
    """The first leaves the script where its step ends: what its hooks count is even there."""
    whole, ends, backwards = scene.look_again, [], []

    def again(step, micro, *looks, **options):
        before = len(backwards)
        failed, error = whole(step, micro, *looks, **options)
        if isinstance(looks[-1], Observer):
            ends.append((type(error), len(backwards) - before))
            if len(ends) == 1:
                raise ShortOfMemoryError
        return failed, error

    monkeypatch.setattr(scene, "look_again", again)
    step = overflowing()
    step.view.root.up.weight.register_hook(lambda _: backwards.append(1))
    found = place.localize(step, 0)
    assert (found.key.op, found.confidence) == ("aten.pow.Tensor_Scalar", "certain")
    assert ends == [(type(None), 1), (ReachedError, 0)]


def test_a_second_look_that_memory_is_short_for_is_made_again_with_fewer(monkeypatch):
    usual = place.localize(overflowing(), 0)
    looks, given_back = short_for(monkeypatch, Observer, times=1), []
    monkeypatch.setattr(place, "give_back", given_back.append)
    found = place.localize(overflowing(), 0)
    assert named(found) == named(usual)
    assert found.confidence == "certain"
    first, second = looks
    assert second._wanted <= first._wanted
    assert (second._on_device, given_back) == (0, ["cpu"])


def test_no_place_is_told_where_no_second_look_has_room(monkeypatch):
    looks = short_for(monkeypatch, Observer)
    with pytest.raises(ShortOfMemoryError):
        place.localize(overflowing(), 0)
    assert len(looks) == 2


def test_a_test_that_has_no_room_leaves_the_place_untested(monkeypatch):
    usual = place.localize(overflowing(), 0)
    short_for(monkeypatch, Patch)
    found = place.localize(overflowing(), 0)
    assert named(found) == named(usual)
    assert (usual.confidence, found.confidence) == ("certain", "likely")


def test_more_runs_that_have_no_room_are_left_out(monkeypatch):
    def none(*_):
        raise ShortOfMemoryError

    monkeypatch.setattr(place, "with_exact", none)
    short_for(monkeypatch, Filled)
    assert place.localize(overflowing(), 0).key.op == "aten.pow.Tensor_Scalar"


@pytest.mark.parametrize("number", [0, 1, 2])
def test_whichever_run_is_short_the_place_is_found(number):
    """An allocation that fails: where it is recorded, looked at again, or tested."""
    runs = []

    def before():
        runs.append(1)
        if len(runs) == 1 + number:
            raise RuntimeError("CUDA out of memory. Tried to allocate 446.00 MiB")

    found = place.localize(overflowing(before), 0)
    assert len(runs) > number
    assert found.key.op == "aten.pow.Tensor_Scalar"


def test_a_look_that_memory_is_too_short_for_leaves_the_others(monkeypatch):
    def none(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    usual = place.localize(overflowing(), 0)
    monkeypatch.setattr(op_details, "rerun_wider", none)
    found = place.localize(overflowing(), 0)
    assert found.first_bad.outputs == usual.first_bad.outputs
    assert found.positions == usual.positions
    assert (usual.first_bad.wider, found.first_bad.wider) == ("finite", "unknown")


def test_masks_that_wait_are_no_other_masks():
    """Wherever a mask waits, it is put right where the operation computes."""
    usual = Observer((1,), {})
    waits = Observer((1,), {}, on_device=0)
    values = torch.tensor([[1.0, float("inf")], [2.0, 3.0]])
    for look in (usual, waits):
        done = look(1, torch.ops.aten.mul.Tensor, (values, values), {})
        done(values * values)
    for kind in ("bad", "read"):
        pairs = zip(getattr(usual.seen[1], kind), getattr(waits.seen[1], kind), strict=True)
        assert all(torch.equal(own, other) for own, other in pairs)


def test_a_look_gives_back_what_it_took(monkeypatch):
    told = []
    monkeypatch.setattr(op_details, "give_back_after", lambda *given: told.append(given))
    values = torch.ones(2, 3)
    look = Observer((1,), {}, on_device=0)
    look(1, torch.ops.aten.mul.Tensor, (values, values), {})(values * values)
    ((tensors, least),) = told
    assert (len(tensors), least) == (3, 0)
