"""Ranges of tensors of every kind, and the formats in which an op is repeated."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanstop.numerics import tensors as numerics
from nanstop.numerics.tensors import (
    bad_mask,
    dense_parts,
    format_limit,
    has_bad,
    is_measurable,
    measure,
    nonfinite,
    tensors,
    widened,
)

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_full_range(dtype):
    tiny = torch.finfo(dtype).tiny
    values = torch.tensor([[0.0, -3.0, NAN], [INF, -INF, tiny / 2], [INF, 0.0, 0.5]], dtype=dtype)
    stats = measure(values, "w")
    assert (stats.shape, stats.name, stats.device) == ((3, 3), "w", "cpu")
    assert (stats.nan, stats.posinf, stats.neginf, stats.zeros) == (1, 2, 1, 2)
    assert (stats.subnormal, stats.absmax, stats.absmin_nonzero) == (1, 3.0, tiny / 2)
    assert stats.minimum == -3.0
    assert (stats.first_bad, stats.num_bad, stats.finite) == ((0, 2), 4, False)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bit_formats(dtype):
    stats = measure(torch.tensor([2.0, NAN, -8.0]).to(dtype))
    assert (stats.dtype, stats.nan, stats.absmax) == (str(dtype)[6:], 1, 8.0)


def test_finite_values_have_no_first_bad():
    stats = measure(torch.tensor([1.0, 2.0]))
    assert stats.finite
    assert stats.first_bad is None
    assert stats.headroom_bits == pytest.approx(127.0, abs=0.01)


def test_float64_keeps_its_range():
    assert measure(torch.tensor([1e300], dtype=torch.float64)).absmax == 1e300


def test_all_zero_and_scalar():
    assert measure(torch.zeros(4)).absmin_nonzero == 0.0
    assert measure(torch.tensor(NAN)).first_bad == ()


def test_integers_report_their_range_and_zeros():
    stats = measure(torch.tensor([-7, 0, 3]))
    assert (stats.absmax, stats.zeros, stats.dtype, stats.finite) == (7.0, 1, "int64", True)
    assert measure(torch.tensor([True, False])).absmax == 1.0


def test_complex_counts_parts():
    stats = measure(torch.tensor([complex(1, NAN), complex(-4, INF)]).conj())
    assert (stats.dtype, stats.nan, stats.neginf, stats.absmax) == ("complex64", 1, 1, 4.0)


def sparse():
    return torch.sparse_coo_tensor([[0, 2]], [1.0, NAN], (4,))


@pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant)")
def test_sparse_tensors_are_measured_by_their_entries():
    assert measure(sparse()).nan == 1
    assert measure(sparse()).shape == (4,)
    assert has_bad(torch.tensor([[0.0, INF]]).to_sparse_csr())
    assert nonfinite({"s": sparse(), "t": torch.ones(2)}) == ("s",)


def test_wrapper_tensors_are_opened():
    pair = TwoTensor(torch.ones(2), torch.tensor([1.0, INF]))
    assert [tuple(part.shape) for part in dense_parts(pair)] == [(2,), (2,)]
    assert has_bad(pair)
    assert not is_measurable(pair)


CANNOT_BE_LOOKED_AT = {
    "empty": lambda: torch.empty(0),
    "meta": lambda: torch.empty(3, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
}


@pytest.mark.filterwarnings("ignore:.*(deprecated|prototype)")
@pytest.mark.parametrize("kind", CANNOT_BE_LOOKED_AT)
def test_what_cannot_be_looked_at_is_finite_and_zero(kind):
    tensor = CANNOT_BE_LOOKED_AT[kind]()
    stats = measure(tensor)
    assert (stats.finite, stats.absmax) == (True, 0.0)
    assert not has_bad(tensor)


def test_norm_that_overflows_is_confirmed():
    huge = torch.full((8,), 3e38)
    named = [("huge", huge), ("nan", torch.tensor([1.0, NAN])), ("ids", torch.ones(2).long())]
    assert nonfinite(dict(named)) == ("nan",)
    assert nonfinite({"half": torch.full((4096,), 6e4).half()}) == ()
    assert nonfinite({"wide": torch.tensor([1e300], dtype=torch.float64)}) == ()
    assert nonfinite({"c": torch.tensor([complex(0, NAN)]), "f": torch.ones(1)}) == ("c",)
    assert nonfinite({}) == ()


@pytest.mark.parametrize(
    ("formats", "wide"),
    [
        ({torch.float16}, {torch.float16: torch.float32}),
        ({torch.float16, torch.float32}, {torch.float16: torch.float32}),
        ({torch.bfloat16}, {torch.bfloat16: torch.float64}),
        (
            {torch.bfloat16, torch.float32},
            {torch.bfloat16: torch.float64, torch.float32: torch.float64},
        ),
        ({torch.float32, torch.int64}, {torch.float32: torch.float64}),
        ({torch.float8_e5m2, torch.float32}, {torch.float8_e5m2: torch.float32}),
        ({torch.int64}, {}),
    ],
)
def test_widened(formats, wide):
    assert widened(formats) == wide


def test_format_limit():
    assert format_limit(torch.float16) == 65504.0
    assert format_limit(torch.int64) == math.inf


def test_tensors_are_found_in_whatever_holds_them():
    one, two, three, four = torch.arange(4.0).split(1)

    class Held:
        def __init__(self):
            self.first, self.rest, self.own = one, {"two": [two, 2]}, self
            self.net, self.of_a_class = torch.nn.Linear(2, 2), Held

    @dataclass
    class Row:
        value: object

    found = tensors((Held(), Row(three), [None, "x", four]))
    assert [t.item() for t in found] == [0.0, 1.0, 2.0, 3.0]


def test_long_containers_of_objects_are_not_looked_into():
    class DataSet:
        def __init__(self):
            self.rows = [torch.zeros(1)] * 1000

    assert list(tensors(DataSet())) == []
    assert len(list(tensors([torch.zeros(1)] * 1000))) == 1000


def at_once(values, shape):
    """Return what ``measure`` says of the values of a tensor, from all of them together."""
    tiny = torch.finfo(values.dtype).tiny
    values = values if values.dtype is torch.float64 else values.float()
    bad = ~values.isfinite()
    size = values.abs().masked_fill(bad, 0.0)
    absmin = float(size.masked_fill(size == 0, INF).min())
    first = bad.flatten().nonzero().flatten().tolist()
    return {
        "nan": int(values.isnan().sum()),
        "posinf": int((values == INF).sum()),
        "neginf": int((values == -INF).sum()),
        "absmax": float(size.max()),
        "absmin_nonzero": 0.0 if absmin == INF else absmin,
        "minimum": float(values.masked_fill(bad, float(size.max())).min()),
        "zeros": int((values == 0).sum()),
        "subnormal": int(((size > 0) & (size < tiny)).sum()),
        "first_bad": tuple(map(int, torch.unravel_index(torch.tensor(first[0]), shape)))
        if first
        else None,
    }


@pytest.mark.parametrize("seed", range(40))
def test_a_large_tensor_is_measured_piece_by_piece(monkeypatch, seed):
    """Pieces of 7 elements have the figures of the whole, whatever the order in memory."""
    draw = torch.Generator().manual_seed(seed)
    dtype = (torch.float16, torch.bfloat16, torch.float32, torch.float64)[seed % 4]
    values = torch.randn(3, 4, 5, generator=draw).to(dtype)
    odd = torch.tensor([NAN, INF, -INF, 0.0, -0.0, torch.finfo(dtype).tiny / 4, 3e4]).to(dtype)
    share = (0.0, 0.1, 0.7, 1.0)[seed // 4 % 4]
    chosen = torch.rand(values.shape, generator=draw) < share
    drawn = odd[torch.randint(0, 3 if seed % 5 == 0 else 7, values.shape, generator=draw)]
    values = torch.where(chosen, drawn, values)
    forms = (values, values.permute(2, 0, 1), values[:, 1:, ::2], values[:1].expand(6, 4, 5))
    whole = [(measure(form), bad_mask(form)) for form in forms]
    monkeypatch.setattr(numerics, "_PIECE", 7)
    for form, (stats, mask) in zip(forms, whole, strict=True):
        assert measure(form) == stats
        assert torch.equal(bad_mask(form), mask)
        expected = at_once(form, form.shape)
        assert {name: getattr(stats, name) for name in expected} == expected
    ids = torch.randint(-9, 9, (4, 5), generator=draw)
    pieces = measure(ids), measure(ids.t())
    monkeypatch.undo()
    assert pieces == (measure(ids), measure(ids.t()))


def test_no_look_at_a_large_tensor_makes_as_much_as_it_is(monkeypatch):
    largest = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            view = func._schema.returns[0].alias_info is not None if func._schema.returns else True
            if isinstance(made, torch.Tensor) and not view:
                largest.append(made.numel())
            return made

    values = torch.randn(64, 100).half()
    values[9, 9] = INF
    monkeypatch.setattr(numerics, "_PIECE", 256)
    for form in (values, values.t(), values.to(torch.int32)):
        with Sizes():
            measure(form)
    assert 200 <= max(largest) <= 256
