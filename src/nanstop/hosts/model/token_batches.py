"""Token ids to run a checkpoint on where there is no script: from a file, or drawn at random."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanstop.errors import NanstopError
from nanstop.records.vocabulary import IGNORED_LABEL

_ROWS = 2
_TOKENS = 64


def random_batches(model: nn.Module, *, num: int = 2) -> list[dict[str, Tensor]]:
    """Return batches of uniformly random ids of a model's vocabulary, the same each time."""
    config: Any = model.config
    text = (
        config.get_text_config() if callable(getattr(config, "get_text_config", None)) else config
    )
    longest = getattr(text, "max_position_embeddings", None) or _TOKENS
    generator = torch.Generator().manual_seed(0)
    shape = _ROWS, max(2, min(_TOKENS, longest))
    ids = [torch.randint(0, text.vocab_size, shape, generator=generator) for _ in range(num)]
    inner: Any = getattr(
        model, "get_base_model", lambda: model
    )()  # PEFT's wrapper hides what it takes
    masked = "attention_mask" in inspect.signature(inner.forward).parameters
    masks = [{"attention_mask": torch.ones_like(one)} if masked else {} for one in ids]
    return [
        {"input_ids": one, **mask, "labels": one.clone()}
        for one, mask in zip(ids, masks, strict=True)
    ]


def batches_of(path: Path, *, vocab: int) -> list[dict[str, Tensor]]:
    """Return batches of the token ids in a file.

    One sequence a line (ids apart by spaces, or a JSON list), padded right.

    Errors: ``NanstopError`` that names the line for what is no id of the vocabulary.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise NanstopError(f"cannot read {path}: {error}") from error
    found = [
        _ids(line, vocab, f"{path}:{number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not found:
        raise NanstopError(f"{path}: holds no token ids")
    return list(_batched(found))


def _ids(line: str, vocab: int, where: str) -> list[int]:
    try:
        words: Any = json.loads(line) if line.lstrip().startswith(("[", "{")) else line.split()
        words = words["input_ids"] if isinstance(words, dict) else words
        ids = [int(word) for word in words]
    except (ValueError, TypeError, KeyError) as error:
        raise NanstopError(f"{where}: not a line of token ids") from error
    wrong = next((one for one in ids if not 0 <= one < vocab), None)
    if wrong is not None:
        raise NanstopError(f"{where}: id {wrong} is not in the vocabulary of {vocab}")
    if len(ids) < 2:
        raise NanstopError(f"{where}: a sequence needs two ids at least")
    return ids


def _batched(sequences: Sequence[list[int]]) -> Iterator[dict[str, Tensor]]:
    for start in range(0, len(sequences), _ROWS):
        chosen = sequences[start : start + _ROWS]
        longest = max(map(len, chosen))
        ids = torch.zeros(len(chosen), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, sequence in enumerate(chosen):
            ids[row, : len(sequence)] = torch.tensor(sequence)
            mask[row, : len(sequence)] = 1
        labels = ids.masked_fill(mask == 0, IGNORED_LABEL)
        yield {"input_ids": ids, "attention_mask": mask, "labels": labels}
