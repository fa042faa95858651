"""Checksums of tensors: the same for the same bits, another for any other bits."""

import pytest
import torch

from nanstop.numerics import checksums as module
from nanstop.numerics.checksums import checksums

FORMATS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.complex64,
]


def drawn(dtype, num=1000):
    generator = torch.Generator().manual_seed(0)
    size = torch.empty((), dtype=dtype).element_size()
    return torch.randint(0, 256, (num * size,), generator=generator, dtype=torch.uint8).view(dtype)


def by_python(tensor):
    """The same sum in Python's own integers."""
    words = tensor.contiguous().view(-1).view(torch.int32).tolist()
    total = 0
    for at, word in enumerate(words):
        number, place = divmod(at, module._CHUNK)
        total += word * (module._mixed(place) | 1) * (module._mixed(number) | 1)
    return total % 2**64


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_any_bit_shows(dtype):
    values = drawn(dtype, 5)
    others = []
    for byte in range(values.numel() * values.element_size()):
        for bit in range(8):
            others.append(values.clone())
            others[-1].view(torch.uint8)[byte] ^= 1 << bit
    found = checksums([values, *others])
    assert len(set(found)) == len(found)


def test_places_and_zeros_show():
    x = torch.zeros(8)
    x[1] = 1.0
    swapped, negative = x.roll(1), x.clone()
    negative[5] = -0.0
    assert len(set(checksums([x, swapped, negative]))) == 3


def test_layout_and_what_stands_beside_do_not():
    x = torch.randn(4, 3, 5, 6, generator=torch.Generator().manual_seed(0))
    last, many = x.to(memory_format=torch.channels_last), torch.zeros(9000)
    assert checksums([last]) == checksums([x])
    assert checksums([many, x])[1] == checksums([x])[0]
    assert checksums([x.requires_grad_(), x.detach()[None]])[0] == checksums([x])[0]


def test_threads_and_chunks_do_not(monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 1 << 12)
    monkeypatch.setattr(module, "_CACHED", 1000)
    monkeypatch.setattr(module, "_MADE", 300)
    x, threads = drawn(torch.float32, 20_001), torch.get_num_threads()
    try:
        found = set()
        for num in (1, 2, 3):
            torch.set_num_threads(num)
            found.update(checksums([x]))
    finally:
        torch.set_num_threads(threads)
    assert found == {by_python(x)}


def test_nothing_and_numbers():
    assert checksums([]) == []
    empty, number = checksums([torch.empty(0, 3), torch.tensor(1.5)])
    assert (empty, number) == (0, by_python(torch.tensor([1.5])))
