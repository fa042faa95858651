"""Every way of writing weights that a script may know, bound before anything is replaced.
Run beside a model.
"""

import os
import warnings
from pathlib import Path

import safetensors
import safetensors.numpy
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file, save_model
from torch import save as torch_save
from torch.distributed.checkpoint import save as dcp_save
from torch.export import save as export_save
from torch.jit import save as jit_save
from transformers import modeling_utils

from versions import older_than

TENSORS = {"w": torch.ones(2)}
EXPORTED = torch.export.export(torch.nn.Linear(2, 1), (torch.ones(1, 2),))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what is deprecated is still used
    SCRIPTED = torch.jit.script(torch.nn.Linear(2, 1))


def of_torch(at):
    yield lambda: torch.save(TENSORS, at("torch.pt"))
    yield lambda: torch_save(TENSORS, at("bound.pt"))
    yield lambda: torch_save(TENSORS, at("legacy.pt"), _use_new_zipfile_serialization=False)
    yield lambda: torch.jit.save(SCRIPTED, at("jit.pt"))
    yield lambda: jit_save(SCRIPTED, at("jit-bound.pt"))
    yield lambda: SCRIPTED.save(at("jit-method.pt"))
    yield lambda: torch.export.save(EXPORTED, at("export.pt2"))
    if not older_than("torch", "2.7"):  # which writes by Python's own zip files
        yield lambda: export_save(EXPORTED, at("export-bound.pt2"))
    yield lambda: dcp.save(TENSORS, checkpoint_id=at("dcp"))
    yield lambda: dcp_save(TENSORS, checkpoint_id=at("dcp-bound"))


def of_safetensors(at):
    yield lambda: safetensors.torch.save_file(TENSORS, at("a.safetensors"))
    yield lambda: save_file(TENSORS, at("b.safetensors"))
    yield lambda: save_model(torch.nn.Linear(2, 1), at("c.safetensors"))
    data = {"w": {"dtype": "float32", "shape": [1], "data": b"abcd"}}
    yield lambda: safetensors.torch.serialize_file(data, at("d.safetensors"))
    yield lambda: safetensors.serialize_file(data, at("e.safetensors"))
    yield lambda: safetensors.numpy.save_file({"w": TENSORS["w"].numpy()}, at("f.safetensors"))
    bound = getattr(modeling_utils, "safe_save_file", None)
    if bound is not None:
        yield lambda: bound(TENSORS, at("g.safetensors"))


def of_models(at, model, trainer=None):
    if hasattr(model, "save_pretrained"):
        yield lambda: model.save_pretrained(at("pretrained"))
        yield lambda: model.config.save_pretrained(at("config"))
        yield lambda: model.push_to_hub(at("nobody/nothing"))
    if trainer is not None:
        yield lambda: trainer.save_model(at("trainer"))
        yield trainer.save_state
        yield lambda: trainer._save_checkpoint(trainer.model, None)
        yield trainer.push_to_hub
        accelerator = trainer.accelerator
        yield lambda: accelerator.save_state(at("state"))
        yield lambda: accelerator.save_model(model, at("accelerated"))
        yield lambda: accelerator.save(TENSORS, at("accelerated.pt"))


def write_all(model, folder, trainer=None):
    """Try every writer; a path of its own for each, below ``folder``."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    at = lambda name: str(Path(folder, name))  # noqa: E731
    for group in (of_torch(at), of_safetensors(at), of_models(at, model, trainer)):
        for write in group:
            write()


def written(folder):
    """The files below a folder."""
    return sorted(
        str(file.relative_to(folder)) for file in Path(folder).rglob("*") if file.is_file()
    )
