"""What waits elsewhere is bitwise what it was, and nobody who reads it is cut off."""

import errno

import pytest
import torch
from torch import nn

from nanstop.numerics import host_memory, parked, room
from nanstop.numerics.parked import Away, ParkedTensors, Parking, copied_to_host, is_tight


def gradients(*modules):
    leaves = [p for module in modules for p in module.parameters()]
    for p in leaves:
        p.grad = torch.randn_like(p)
    return leaves


FORMS = pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(100, 7).t(),
        torch.randn(3, 1).expand(3, 4),
        torch.tensor(3.0),
        torch.empty(0, 3),
        torch.randn(5, 2000).bfloat16(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor([float("nan"), float("inf"), -0.0]).half(),
    ],
)


@FORMS
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_copy_in_host_memory(tensor, device):
    given = tensor.to(device)
    copy = copied_to_host(given)
    assert (copy.device.type, copy.dtype, copy.shape) == ("cpu", tensor.dtype, tensor.shape)
    assert copy.stride() == given.to("cpu", copy=True).stride()
    assert copy.nan_to_num(7.0).equal(tensor.nan_to_num(7.0))
    assert device == "cuda" or copy.data_ptr() != given.data_ptr() or not given.numel()


@pytest.mark.parametrize("num", [0, 1, 999, 1000, 4321, 70_000])
def test_new_memory_is_written_to_the_last_byte_and_no_farther(num, monkeypatch):
    monkeypatch.setattr(parked, "_TOUCHED", 1000)
    whole = torch.full((num + 64,), 7, dtype=torch.uint8)
    parked._touch(
        torch.frombuffer(whole.numpy(), dtype=torch.uint8, count=num).untyped_storage()
        if num
        else torch.empty(0).untyped_storage()
    )
    assert not whole[:num].any()
    assert (whole[num:] == 7).all()


@FORMS
def test_what_was_parked_comes_back(tensor):
    values = Parking().put(tensor).values()
    assert torch.equal(values.nan_to_num(7.0), tensor.nan_to_num(7.0))
    assert values.dtype == tensor.dtype


def test_values_larger_than_a_piece_and_sums(monkeypatch):
    monkeypatch.setattr(parked, "_PIECE", 1000)
    monkeypatch.setattr(parked, "_READ", 300)
    one, held = torch.randn(77, 91), ParkedTensors()
    held.take("one", one.clone())
    held.take("one", one.clone())
    held.take("other", one[0].clone())
    assert torch.equal(held["one"], 2 * one)
    assert torch.equal(held["other"], one[0])
    held.take("other", torch.ones(2, 91)[:, 0:91][0])
    assert torch.equal(held["other"], one[0] + 1)
    held.take("one", one.t().contiguous().t())  # in another order of memory
    torch.testing.assert_close(held["one"], 3 * one)
    assert list(held) == ["one", "other"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_is_all_alike_waits_as_one_element(monkeypatch, dtype):
    """Bit for bit, a NaN as it is; the last element may be another."""
    monkeypatch.setattr(parked, "_PIECE", 8)
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    odd = torch.full((3, 7), -1, dtype=kind).view(dtype).t()
    put = Parking().put(odd)
    assert (put.copy, put.file) == (None, None)
    assert torch.equal(put.values().view(kind), odd.view(kind))
    assert put.values().stride() == odd.stride()
    odd[-1, -1] = 0.0
    put = Parking().put(odd)
    assert put.file is not None
    assert torch.equal(put.values().view(kind), odd.view(kind))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(5, 7),
        torch.randn(5, 7).t(),
        torch.randn(3, 1).expand(3, 4),
        torch.tensor([1.0, 2.0])[0],
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ],
)
def test_what_waits_in_host_memory_is_had_there(tensor):
    """As if it had come from a device, which may have no room for it."""
    put = Parking().put(tensor)
    flat = put.values().as_strided((tensor.numel(),), (1,))
    away = parked.Parked(put.form, flat, None, 0)
    assert torch.equal(away.nearest(), tensor)
    assert away.nearest().untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_what_is_not_finite_is_known_without_a_reading(monkeypatch):
    held = ParkedTensors()
    for name, value in {"fine": 1.0, "bad": float("inf"), "later": 2.0}.items():
        held.take(name, torch.tensor([value, 0.0]))
    held.take("later", torch.tensor([float("nan"), 0.0]))
    monkeypatch.setattr(parked.Parked, "values", None)
    assert held.nonfinite() == ("bad", "later")


def test_gradients_are_the_same_objects_again():
    leaves = gradients(nn.Linear(30, 40), nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))
    before = [(p.grad, p.grad.clone(), p.grad.stride(), p.grad._version) for p in leaves]
    away = Away(p.grad for p in leaves)
    assert all(p.grad.numel() == 0 for p in leaves)
    away.fetch()
    for p, (grad, values, strides, version) in zip(leaves, before, strict=True):
        assert p.grad is grad
        assert torch.equal(grad, values)
        assert (grad.stride(), grad._version) == (strides, version)


def test_what_somebody_else_reads_stays():
    [weight, bias] = gradients(nn.Linear(3, 2))
    row, bucket = weight.grad[0], torch.randn(10)
    bias.grad = bucket[:2]
    away = Away([weight.grad, bias.grad])
    assert weight.grad not in away
    assert bias.grad not in away
    assert row.data_ptr() == weight.grad.data_ptr()


def test_a_full_disk_leaves_gradients_where_they_are(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(Parking, "put", full)
    leaves = gradients(nn.Linear(3, 2))
    before = [p.grad.clone() for p in leaves]
    Away(p.grad for p in leaves).fetch()
    assert all(torch.equal(p.grad, was) for p, was in zip(leaves, before, strict=True))


def test_other_values_take_the_place_of_what_is_away():
    [weight, _] = gradients(nn.Linear(3, 2))
    grad, new = weight.grad, torch.ones(2, 3)
    away = Away([grad])
    away.replace(grad, new)
    away.fetch()
    assert torch.equal(grad, new)


@pytest.mark.parametrize(("left", "tight"), [(10, True), (10**9, False), (None, False)])
def test_it_is_tight_where_a_second_set_of_gradients_has_no_room(monkeypatch, left, tight):
    monkeypatch.setattr(room, "left_on", lambda _: left)
    monkeypatch.setattr(room, "most_beyond_now", lambda _: 0)
    assert is_tight(gradients(nn.Linear(30, 20))) is tight


def test_limits_of_groups_and_of_the_process_count(tmp_path, monkeypatch):
    resource = pytest.importorskip("resource")
    membership = tmp_path / "cgroup"
    membership.write_text("0::/outer/inner\n")
    group = tmp_path / "outer"
    (group / "inner").mkdir(parents=True)
    (group / "inner" / "memory.max").write_text("max\n")
    (group / "memory.max").write_text("5000000\n")
    (group / "memory.current").write_text("4000000\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 500000\n")
    assert host_memory.free_bytes(membership, tmp_path) == 1_500_000
    known = host_memory.free_bytes(tmp_path / "none", tmp_path)
    assert known > 2**20
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1, 1))
    assert host_memory.free_bytes(tmp_path / "none", tmp_path) == 0
