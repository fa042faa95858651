"""What tokenizers of transformers are called with and give, of the first texts of a process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from nanstop.detect.texts import TEXTS
from nanstop.numerics.tensors import by_torch_alone
from nanstop.own_code import is_library
from nanstop.tracebacks import passes_through
from nanstop.tracing.places import user_line

__tracebackhide__ = passes_through


def tokenized(original: Any, tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what a tokenizer gives, and note the tokens of its texts with the script's line."""
    result = original(tokenizer, *args, **kwargs)
    if not TEXTS.is_full:
        with suppress(Exception), by_torch_alone():  # results of other classes hold anything
            line = user_line()
            is_own = line is not None and not is_library(line[0].co_filename)
            # What is cut off at the left has its end.
            ends = getattr(tokenizer, "truncation_side", "right") != "right"
            texts = ((ids, 0 if ends else num_cut) for ids, num_cut in _texts(result))
            TEXTS.add(texts, line if is_own else None)
    return result


def _texts(result: Any) -> Iterator[tuple[Sequence[int], int]]:
    """Yield the tokens of each text without padding, and how many were cut off."""
    for one in getattr(result, "encodings", None) or ():
        kept = [
            token for token, is_real in zip(one.ids, one.attention_mask, strict=True) if is_real
        ]
        yield kept, sum(sum(1 - m for m in part.special_tokens_mask) for part in one.overflowing)
    if getattr(result, "encodings", None):
        return
    ids = result["input_ids"] if isinstance(result, Mapping) else result
    ids = ids.tolist() if isinstance(ids, Tensor) else ids
    rows = ids if ids and isinstance(ids[0], list) else [ids]
    yield from ((row, 0) for row in rows)
