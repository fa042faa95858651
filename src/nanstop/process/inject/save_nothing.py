"""The one list of what writes weights to disk or to a hub, and the way to have none of it write."""

from __future__ import annotations

import sys
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanstop.hosts.patch_table import Table

WRITERS = (
    ("torch", "", "save"),
    ("torch.serialization", "", "save"),
    ("torch.jit", "", "save"),
    ("torch.jit", "RecursiveScriptModule", "save"),
    ("torch.jit", "RecursiveScriptModule", "save_to_buffer"),
    ("torch.export", "", "save"),
    ("torch.export.pt2_archive._package", "", "package_pt2"),
    ("torch.distributed.checkpoint", "", "save"),
    ("torch.distributed.checkpoint", "", "async_save"),
    ("torch.distributed.checkpoint.state_dict_saver", "", "_save_state_dict"),
    ("safetensors", "", "serialize_file"),
    ("safetensors.torch", "", "serialize_file"),
    ("safetensors.torch", "", "save_file"),
    ("safetensors.torch", "", "save_model"),
    ("safetensors.numpy", "", "serialize_file"),
    ("safetensors.numpy", "", "save_file"),
    ("transformers.modeling_utils", "PreTrainedModel", "save_pretrained"),
    ("transformers.configuration_utils", "PretrainedConfig", "save_pretrained"),
    ("transformers.tokenization_utils_base", "PreTrainedTokenizerBase", "save_pretrained"),
    ("transformers.processing_utils", "ProcessorMixin", "save_pretrained"),
    ("transformers.utils.hub", "PushToHubMixin", "push_to_hub"),
    ("transformers.trainer", "Trainer", "save_model"),
    ("transformers.trainer", "Trainer", "save_state"),
    ("transformers.trainer", "Trainer", "_save_checkpoint"),
    ("transformers.trainer", "Trainer", "push_to_hub"),
    ("peft", "PeftModel", "save_pretrained"),
    ("accelerate", "Accelerator", "save"),
    ("accelerate", "Accelerator", "save_state"),
    ("accelerate", "Accelerator", "save_model"),
)
"""(module, class or nothing, name); looked for where the module is imported.

The lowest functions stand here beside those that call them: a script or a library may have bound
``torch.save`` or ``save_file`` under a name of its own before.
"""


def save_nothing(table: Table, trainer: Any = None) -> None:
    """Have nothing that writes weights write any, until ``table`` is undone.

    Called again, it adds what was imported.

    ``trainer``: neither do the methods of this one, whose class may have its own. To be called when
    a job begins, no sooner: a script may save a tokenizer before it trains, and load it.
    """
    if "torch" in sys.modules:
        serialization = sys.modules["torch.serialization"]
        # What `torch.save` under another name opens before it writes anything.
        table.replace(serialization, "_open_zipfile_writer", _nowhere)
        table.replace(serialization, "_open_file_like", _unless_written)
        table.replace(serialization, "_legacy_save", _nothing)
        table.replace(serialization, "_save", _nothing)
    # A dependency: whoever imports its functions later gets none that write.
    import safetensors  # noqa: F401

    if "torch.export" in sys.modules:
        with suppress(ImportError):  # `torch.export.save` of torch before 2.8 needs none
            import_module("torch.export.pt2_archive._package")
    for module, kind, name in WRITERS:
        owner = sys.modules.get(module)
        owner = getattr(owner, kind, None) if kind else owner
        if owner is not None and hasattr(owner, name):
            table.replace(owner, name, _nothing)
        if trainer is not None and kind == "Trainer":
            table.replace(trainer, name, _nothing)


def _nothing(_original: Any, *_args: Any, **_options: Any) -> None:
    """Stand in for a writer."""


@contextmanager
def _nowhere(_original: Any, *_args: Any, **_options: Any) -> Iterator[None]:
    """Stand in for the opening of a file."""
    yield None


def _unless_written(original: Any, place: Any, mode: str) -> Any:
    """Open a file to be read; one that would be written is left as it is."""
    return original(place, mode) if "w" not in mode else _nowhere(original)
