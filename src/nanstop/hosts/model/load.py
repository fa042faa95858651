"""A model, and its tokenizer, from a folder on the disk: what is looked at without a script."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanstop.errors import NanstopError
from nanstop.wording import counted

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
        model, notes = _built(folder, _class_for(folder), torch.float32)
    missing = sorted(notes["missing_keys"])
    if missing:
        raise NanstopError(
            f"{folder}: for a {type(model).__name__}, {counted(len(missing), 'tensor')} "
            f"would be drawn at random, `{missing[0]}` first",
            hint="a plan of numbers that no training has seen says nothing: "
            "give the training script",
        )
    return model.train()


def load_as_user(folder: Path, dtype: torch.dtype) -> nn.Module:
    """Return the model of a local checkpoint folder as its user loads it: its own class, its own
    kernels, in evaluation mode. None of its code is run.

    Of an adapter's folder: its base with the adapter on it. Errors: ``NanstopError`` for what
    transformers or peft can't load.
    """
    adapted = (folder / "adapter_config.json").is_file()
    base = adapter_base(folder) if adapted else folder
    if not (base / "config.json").is_file():
        raise NanstopError(
            f"{folder}: no checkpoint of a model, it has no config.json",
            hint="give the folder that `save_pretrained` or a trainer wrote",
        )
    with as_one_error(base, "transformers cannot load it"):
        model, notes = _built(base, _own_class(base), dtype)
    missing = sorted(notes["missing_keys"])
    if missing:
        raise NanstopError(f"{base}: `{missing[0]}` is missing from its weights")
    if adapted:
        from peft import PeftModel

        with as_one_error(folder, "peft cannot put its adapter on the base"):
            model = PeftModel.from_pretrained(model, str(folder), local_files_only=True)
    return model.eval()


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer in a folder, None where there is none that can be loaded.

    None of its code is run.
    """
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    try:
        with as_one_error(folder, "its tokenizer cannot be loaded"):
            return AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except NanstopError:
        return None


def _built(folder: Path, kind: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    return kind.from_pretrained(
        folder,
        local_files_only=True,
        trust_remote_code=False,
        dtype=dtype,
        output_loading_info=True,
    )


def _own_class(folder: Path) -> Any:
    """Return the class of transformers that a folder's config names, else that of a language model
    of its kind.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    names = getattr(config, "architectures", None) or ()
    own = (getattr(transformers, name, None) for name in names)
    return next((kind for kind in own if kind is not None), None) or _class_for(folder)


def _class_for(folder: Path) -> Any:
    """Return the class that builds a language model of the folder's kind.

    An encoder may stand before its decoder.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    both = getattr(config, "is_encoder_decoder", False)
    return AutoModelForSeq2SeqLM if both else AutoModelForCausalLM


def _with_adapter(folder: Path) -> nn.Module:
    from peft import PeftModel

    base = adapter_base(folder)
    with as_one_error(folder, "peft cannot put its adapter on the base"):
        model: Any = PeftModel.from_pretrained(
            load_model(base), str(folder), is_trainable=True, local_files_only=True
        )
    return model.train()


def adapter_base(folder: Path) -> Path:
    """Return the folder of the model that an adapter was trained on.

    Errors: ``NanstopError`` where it isn't on this machine.
    """
    from peft import PeftConfig

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
    return base


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
