"""What a checkpoint is run on: the user's token ids, else texts through its own tokenizer, and ids
of its whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanstop.errors import NanstopError
from nanstop.hosts.model.load import adapter_base, load_tokenizer
from nanstop.hosts.model.token_batches import batches_of, random_batches

_TEXTS = (
    "The committee met on 14 March 2019 to discuss the report.\n\n1. What was measured?\n2. How?\n",
    "def mean(values):\n    # an empty list has none\n    return sum(values) / len(values)\n",
    "Wie spät ist es? — Il est midi. 今天天气很好。 Сегодня хорошая погода.",
    "User: Which planet is the largest?\nAssistant: Jupiter; its mass is 1.898e27 kg.",
)
_LONGEST = 128


@dataclass(frozen=True, slots=True)
class Inputs:
    """``batches``: keyword arguments of the model. ``words``: what they are, for the report."""

    batches: tuple[dict[str, Tensor], ...]
    words: tuple[str, ...]


def inputs_for(folder: Path, model: nn.Module, data: Path | None) -> Inputs:
    """Return what to run a model on. nanstop keeps no data of a run, so that they are never those
    of an incident unless ``data``, a file of token ids, holds them.
    """
    rows = _num_rows(model)
    if data is not None:
        found = batches_of(data, vocab=rows)
        return Inputs(tuple(_fed(found, model)), (f"token ids of {data}",))
    random = [one for one in random_batches(model, num=1) if int(one["input_ids"].max()) < rows]
    texts = list(_texts(folder, rows))
    words = (
        *([f"{len(texts)} texts through its own tokenizer"] if texts else []),
        "random ids of its vocabulary",
    )
    return Inputs(tuple(_fed((*texts, *random), model)), words)


def _num_rows(model: nn.Module) -> int:
    find: Any = getattr(model, "get_input_embeddings", None)
    try:
        return len(find().weight)
    except Exception as error:
        raise NanstopError(f"{type(model).__name__} takes no token ids") from error


def _texts(folder: Path, rows: int) -> Iterator[dict[str, Tensor]]:
    """Yield each text by itself; none where there is no tokenizer, or one of other ids."""
    tokenizer = load_tokenizer(folder)
    if tokenizer is None and (folder / "adapter_config.json").is_file():
        tokenizer = load_tokenizer(adapter_base(folder))
    if tokenizer is None:
        return
    for text in _TEXTS:
        ids = tokenizer(text)["input_ids"][:_LONGEST]
        if len(ids) > 1 and max(ids) < rows:
            given = torch.tensor([ids])
            yield {"input_ids": given, "attention_mask": torch.ones_like(given)}


def _fed(batches: Any, model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield batches without labels, which a decoder behind an encoder alone needs."""
    both = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    for batch in batches:
        plain = {name: value for name, value in batch.items() if name != "labels"}
        yield plain | ({"decoder_input_ids": plain["input_ids"]} if both else {})
