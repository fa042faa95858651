"""The training data around the places of a failure, where somebody asked to see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nanstop.records import Position
from nanstop.replay.step import Batch

_MOST_PLACES = 4
_AROUND = 8
_MOST_TOKENS = 48


def ids_as_text(ids: Sequence[int]) -> str:
    """Return token ids as they are: where no tokenizer is known."""
    return "ids " + " ".join(map(str, ids))


def text_around(
    batch: Batch, places: Sequence[Position], decode: Callable[[Sequence[int]], str]
) -> tuple[str, ...]:
    """Return what stands around each place, in the words of ``decode``. Synchronises the device."""
    tokens = _tokens(batch)
    if tokens is None:
        return ("the micro-batch holds no tokens to show",)
    found: list[str] = []
    for place in places[:_MOST_PLACES]:
        if place.sample >= tokens.shape[0]:
            continue
        first = place.first_token or 0
        last = place.last_token if place.last_token is not None else tokens.shape[1] - 1
        begin = max(first - _AROUND, 0)
        end = min(last + _AROUND + 1, tokens.shape[1], begin + _MOST_TOKENS)
        words = decode([int(one) for one in tokens[place.sample, begin:end]])
        found.append(f"sample {place.sample} tokens {begin}-{end - 1}: {words!r}")
    return tuple(found)


def _tokens(batch: Batch) -> Tensor | None:
    """Return the ids of a micro-batch [samples, tokens]: its ``input_ids``, else the only such
    tensor of whole numbers.
    """
    whole = (torch.int64, torch.int32)
    found = {n: v for n, v in batch.items() if isinstance(v, Tensor) and v.dtype in whole}
    ids = [value for value in found.values() if value.dim() == 2]
    named = found.get("input_ids")
    if named is not None and named.dim() == 2:
        return named
    return ids[0] if len(ids) == 1 else None
