"""Checksums of what tensors hold, bit for bit, made on their own device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_CHUNK = 1 << 21
"""Elements that are added up at a time: 16 MiB of integers, twice."""
_CACHED = 1 << 18
"""Elements of these that a processor multiplies at a time."""
_MADE = 1 << 14
"""Numbers of places that are made at a time."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""Of 64 bits at once, the highest in two places would cancel each other."""
_WORD = 1 << 64
_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Of the generator SplitMix64 (Steele, Lea, Flood, 2014)."""


@torch.no_grad()
def checksums(tensors: Iterable[Tensor]) -> list[int]:
    """Return a number of 64 bits for each dense tensor; one that differs in a single element, by
    whatever bits, has another.

    Each element's bits, read as integers, are multiplied by an odd number of its place and added
    up modulo 2 to the 64: sums of integers are the same in any order, on any device and number of
    threads. Tensors of equal elements in equal places have equal checksums, whatever their strides.
    Reads each once; synchronises each device once.
    """
    return Checksums().all_of(tensors)


class Checksums:
    """Makes them one at a time, to be read together. The numbers of places are made once."""

    def __init__(self) -> None:
        self._weights: dict[torch.device, Tensor] = {}

    @torch.no_grad()
    def of(self, tensor: Tensor) -> Tensor:
        """Return the checksum of a dense tensor as a scalar of int64 on its device. No
        synchronisation.
        """
        device, longest = tensor.device, min(_CHUNK, _num_words(tensor))
        known = self._weights.get(device)
        if known is None or known.numel() < longest:
            known = self._weights[device] = _weights(longest, device)
        return _checksum(tensor, known)

    def all_of(self, tensors: Iterable[Tensor]) -> list[int]:
        """Return the checksum of each dense tensor. Synchronises each device once."""
        given = list(tensors)
        longest_first = sorted(range(len(given)), key=lambda at: -_num_words(given[at]))
        sums = {at: self.of(given[at]) for at in longest_first}
        return self.values([sums[at] for at in range(len(given))])

    @staticmethod
    def values(sums: Sequence[Tensor]) -> list[int]:
        """Return the numbers of checksums. Synchronises each device once."""
        read: dict[torch.device, list[int]] = {}
        for device in {one.device for one in sums}:
            here = [one for one in sums if one.device == device]
            read[device] = torch.stack(here).tolist()
        return [read[one.device].pop(0) % _WORD for one in sums]


def _checksum(tensor: Tensor, weights: Tensor) -> Tensor:
    """Return the sum as a scalar of int64 on the tensor's device."""
    words = _words(tensor)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, start in enumerate(range(0, words.numel(), _CHUNK)):
        part = words[start : start + _CHUNK]
        chunk = _product(part, weights[: part.numel()])
        total += chunk * _signed(_mixed(number) | 1)
    return total


def _product(words: Tensor, weights: Tensor) -> Tensor:
    if words.device.type != "cpu":
        return (words * weights).sum()
    # A third of the time; other devices have it for floats alone. A wide copy of little is still
    # in the cache when it is read.
    pairs = zip(words.split(_CACHED), weights.split(_CACHED), strict=True)
    return torch.stack([torch.dot(part.to(torch.int64), by) for part, by in pairs]).sum()


def _words(tensor: Tensor) -> Tensor:
    values = tensor.detach()
    values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    flat = values.resolve_neg().contiguous().view(-1)
    return flat.view(_INTEGERS[flat.element_size()])


def _num_words(tensor: Tensor) -> int:
    return tensor.numel() * max(1, tensor.element_size() // 4)


def _weights(num: int, device: torch.device) -> Tensor:
    """Return odd numbers without a pattern, the same everywhere: ``_mixed`` of each place, which
    wraps around as integers of torch do.
    """
    made = torch.arange(1, num + 1, dtype=torch.int64, device=device)
    first, second, third = map(_signed, _MULTIPLIERS)
    for part in made.split(_MADE if device.type == "cpu" else num):  # as long as it is cached
        part.mul_(first)
        part.bitwise_xor_(_shifted(part, 30)).mul_(second)
        part.bitwise_xor_(_shifted(part, 27)).mul_(third)
        part.bitwise_xor_(_shifted(part, 31)).bitwise_or_(1)
    return made


def _shifted(words: Tensor, by: int) -> Tensor:
    """Return words shifted to the right, zeros coming in: torch's own shift brings the sign."""
    return (words >> by).bitwise_and_((1 << (64 - by)) - 1)


def _mixed(number: int) -> int:
    first, second, third = _MULTIPLIERS
    mixed = (number + 1) * first % _WORD
    mixed = (mixed ^ mixed >> 30) * second % _WORD
    mixed = (mixed ^ mixed >> 27) * third % _WORD
    return mixed ^ mixed >> 31


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word
