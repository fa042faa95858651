"""A language model from a folder on the disk, and token ids from a file, for a plan without a
script.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanstop.diagnose.evidence.reading import counted
from nanstop.errors import NanstopError

RANDOM = "random tokens: real ones may reach further"


def load_model(folder: Path) -> nn.Module:
    """Return the language model of a local checkpoint folder, in float32 and training mode.

    None of its code is run.

    Of an adapter's folder: its base with the adapter on it, which alone is trainable. Errors:
    ``NanstopError`` for a folder that transformers can't build a language model from, and where a
    part of it would be drawn at random.
    """
    if (folder / "adapter_config.json").is_file():
        return _with_adapter(folder)
    if not (folder / "config.json").is_file():
        raise NanstopError(
            f"{folder}: no checkpoint, it has no config.json",
            hint="give the folder of a transformers checkpoint, or a training script",
        )
    with as_one_error(folder, "transformers cannot build a language model from it"):
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
            f"{folder}: for a {type(model).__name__}, {counted(len(missing), 'tensor')} "
            f"would be drawn at random, `{missing[0]}` first",
            hint="a plan of numbers that no training has seen says nothing: "
            "give the training script",
        )
    return model.train()


def _class_for(folder: Path) -> Any:
    """Return the class that builds a language model of the folder's kind.

    An encoder may stand before its decoder.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    both = getattr(config, "is_encoder_decoder", False)
    return AutoModelForSeq2SeqLM if both else AutoModelForCausalLM


def _with_adapter(folder: Path) -> nn.Module:
    from peft import PeftConfig, PeftModel

    with as_one_error(folder, "peft cannot read its adapter"):
        named = str(PeftConfig.from_pretrained(str(folder)).base_model_name_or_path or "")
    places = (Path(named), folder / named)
    base = next((place for place in places if named and (place / "config.json").is_file()), None)
    if base is None:
        raise NanstopError(
            f"{folder}: an adapter, whose base `{named}` is no folder here",
            hint="merge it, or put the base's folder into adapter_config.json "
            "as base_model_name_or_path",
        )
    with as_one_error(folder, "peft cannot put its adapter on the base"):
        model: Any = PeftModel.from_pretrained(
            load_model(base), str(folder), is_trainable=True, local_files_only=True
        )
    return model.train()


@contextmanager
def as_one_error(folder: Path, what: str) -> Iterator[None]:
    """Make one error of whatever a library makes of damaged files and unknown kinds, and let it
    say nothing else.
    """
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
