"""A language model from a folder on the disk, and token ids from a file, for a plan without a script."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanstop.commands.plan.calibration import model_loss
from nanstop.errors import NanstopError
from nanstop.replay.batches import IGNORED

RANDOM = "random tokens: real ones may reach further"
_ROWS, _TOKENS = 2, 64


def load_model(folder: Path) -> nn.Module:
    """Return the language model of a local checkpoint folder, in float32 and training mode; none of its code is run.

    Of an adapter's folder: its base with the adapter on it, which alone is trainable. Errors: ``NanstopError`` for a folder
    that transformers can't build a language model from, and where a part of it would be drawn at random.
    """
    if (folder / "adapter_config.json").is_file():
        return _with_adapter(folder)
    if not (folder / "config.json").is_file():
        raise NanstopError(
            f"{folder}: no checkpoint, it has no config.json",
            hint="give the folder of a transformers checkpoint, or a training script",
        )
    with _told(folder, "transformers cannot build a language model from it"):
        model, notes = _class_for(folder).from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            dtype=torch.float32,
            output_loading_info=True,
        )
    missing = sorted(notes["missing_keys"])
    if missing:
        raise NanstopError(
            f"{folder}: for a {type(model).__name__}, {_counted(len(missing), 'tensor')} would be drawn at random, "
            f"`{missing[0]}` first",
            hint="a plan of numbers that no training has seen says nothing: give the training script",
        )
    return model.train()


def _class_for(folder: Path) -> Any:
    """Return the class that builds a language model of the folder's kind: an encoder may stand before its decoder."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    both = getattr(config, "is_encoder_decoder", False)
    return AutoModelForSeq2SeqLM if both else AutoModelForCausalLM


def _with_adapter(folder: Path) -> nn.Module:
    from peft import PeftConfig, PeftModel

    with _told(folder, "peft cannot read its adapter"):
        named = str(PeftConfig.from_pretrained(str(folder)).base_model_name_or_path or "")
    places = (Path(named), folder / named)
    base = next((place for place in places if named and (place / "config.json").is_file()), None)
    if base is None:
        raise NanstopError(
            f"{folder}: an adapter, whose base `{named}` is no folder here",
            hint="merge it, or put the base's folder into adapter_config.json as base_model_name_or_path",
        )
    with _told(folder, "peft cannot put its adapter on the base"):
        model: Any = PeftModel.from_pretrained(
            load_model(base), str(folder), is_trainable=True, local_files_only=True
        )
    return model.train()


@contextmanager
def _told(folder: Path, what: str) -> Iterator[None]:
    """Make one error of whatever a library makes of damaged files and unknown kinds, and let it say nothing else."""
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except NanstopError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        raise NanstopError(f"{folder}: {what} ({said})") from error
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def require_runs(folder: Path, model: nn.Module, batch: Any) -> None:
    """Raise ``NanstopError`` where a model of a checkpoint cannot compute a loss of a batch of token ids."""
    with _told(folder, "the model cannot be run on token ids alone"), torch.no_grad():
        model_loss(model)(batch)


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


def batches_of(path: Path, *, vocab: int, rows: int = _ROWS) -> list[dict[str, Tensor]]:
    """Return batches of the token ids in a file: one sequence a line (ids apart by spaces, or a JSON list), padded right.

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
    return list(_batched(found, rows))


def _counted(num: int, what: str) -> str:
    return f"{num} {what}" if num == 1 else f"{num} {what}s"


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


def _batched(sequences: Sequence[list[int]], rows: int) -> Iterator[dict[str, Tensor]]:
    for start in range(0, len(sequences), rows):
        chosen = sequences[start : start + rows]
        longest = max(map(len, chosen))
        ids = torch.zeros(len(chosen), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, sequence in enumerate(chosen):
            ids[row, : len(sequence)] = torch.tensor(sequence)
            mask[row, : len(sequence)] = 1
        labels = ids.masked_fill(mask == 0, IGNORED)
        yield {"input_ids": ids, "attention_mask": mask, "labels": labels}
