"""Weights that a script loaded under other names than the model has: what they are called is left
as it was drawn.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from nanstop.numerics.tensors import by_torch_alone, version
from nanstop.records import LoadFacts
from nanstop.tracing.places import source_line, user_line
from nanstop.tracing.source.bindings import elements_read_at
from nanstop.tracing.source.holders import script_frames


class LoadedWeights:
    """Stands in for ``Module.load_state_dict``, which it calls, and remembers what did not fit."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[nn.Module, tuple[LoadFacts, list[Any]]] = WeakKeyDictionary()

    def load(self, original: Any, module: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(module, given, *args, **kwargs)
        # Classes with a loading of their own return anything.
        with suppress(Exception), by_torch_alone():
            self._note(module, unmatched(module, given, result))
        return result

    def load_pretrained(self, original: Any, kind: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand in for ``PreTrainedModel.from_pretrained``, which it calls: what a folder on the
        disk lacks of a model of the very class that wrote it.
        """
        is_asked = kwargs.get("output_loading_info", False)
        result = original(kind, *args, **kwargs | {"output_loading_info": True})
        if not isinstance(result, tuple):  # a class with a loading of its own
            return result
        model, info = result
        with suppress(Exception), by_torch_alone():
            folder = Path(args[0] if args else kwargs["pretrained_model_name_or_path"])
            names = SimpleNamespace(
                missing_keys=sorted(info["missing_keys"]),
                unexpected_keys=sorted(info["unexpected_keys"]),
            )
            if names.missing_keys and _wrote(type(model), folder):
                self._note(model, unmatched(model, _spare(folder, names.unexpected_keys), names))
        return result if is_asked else model

    def _note(self, module: nn.Module, found: LoadFacts | None) -> None:
        self._known.pop(module, None)
        if found is not None:
            own = dict(module.named_parameters())
            marks = [(ref(own[name]), _mark(own[name])) for name in found.missing]
            self._known[module] = replace(found, at=source_line(user_line())), marks

    def facts(self, root: nn.Module) -> LoadFacts | None:
        """Return what a model, or a part of it, lacked when it was loaded and has not got since.
        No device work.
        """
        for module in root.modules():
            found, marks = self._known.get(module, (None, []))
            held = [(known(), mark) for known, mark in marks]
            if found and all(one is not None and _mark(one) == mark for one, mark in held):
                return found
        return None


def copied_by_hand(root: nn.Module) -> LoadFacts | None:
    """Return what a model lacked that a script copied weights into by itself, name by name, and
    has not got: a variable of a running function is a dict whose tensors of the model's names are
    equal to the model's. None where there is no such, or it has all. Synchronises the device where
    there is one.

    Asked ahead of the first update, when what was copied is still the same.
    """
    own = dict(root.named_parameters())
    for frame, _ in script_frames():
        for name, given in _dicts(frame):
            # Not by methods of the dict's own class: transformers' tables of models import them.
            entries = dict.items(given)
            held = {k: v for k, v in entries if isinstance(k, str) and isinstance(v, Tensor)}
            alike = [key for key in held.keys() & own.keys() if own[key].shape == held[key].shape]
            if not any(own[key].dim() > 1 for key in alike):
                continue
            if not all(_are_equal(own[key], held[key]) for key in alike):
                continue
            spare = [key for key in held if key not in own]
            missing = [key for key in own if key not in held]
            names = SimpleNamespace(missing_keys=missing, unexpected_keys=spare)
            found = unmatched(root, held, names)
            # What has the values of one of them was given it under its own name.
            was_given = any(_are_equal(own[m], held[key]) for m in missing for key in spare)
            if found is not None and not was_given:
                read = elements_read_at(frame, name)
                return replace(found, at=read[-1] if read else None)
    return None


def _dicts(frame: FrameType) -> list[tuple[str, dict[Any, Any]]]:
    found = [(name, one) for name, one in frame.f_locals.items() if isinstance(one, dict)]
    if sys.version_info < (3, 13) and frame.f_code.co_flags & CO_OPTIMIZED:
        frame.f_locals.clear()  # a copy that the frame keeps would hold the step's graph (PEP 667)
    return [(name, one) for name, one in found if not name.startswith("__")]


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return one.device == other.device and torch.equal(one.detach(), other.detach().to(one.dtype))


LOADED = LoadedWeights()
"""Of this process: a model is loaded before anybody knows who will train it."""


def unmatched(module: nn.Module, given: Mapping[str, Tensor], result: Any) -> LoadFacts | None:
    """Return the trained tensors that a state dict lacks and those that it has too many, where
    there are as many of the same shapes: the same ones under other names. None where it fits, or
    where what is left over is something else (another head, a decoder that is not used).
    """
    own = dict(module.named_parameters())
    missing = [name for name in result.missing_keys if name in own]
    spare = [name for name in result.unexpected_keys if isinstance(given.get(name), Tensor)]
    wanted = Counter(own[name].shape for name in missing)
    if not missing or not wanted <= Counter(given[name].shape for name in spare):
        return None
    # One number, or a few, is no fingerprint of a layer.
    if not any(len(shape) > 1 for shape in wanted):
        return None
    return LoadFacts(missing=tuple(missing), unexpected=tuple(spare), num_tensors=len(own))


def _wrote(kind: type, folder: Path) -> bool:
    """Return whether a folder says that a model of this class was written to it. Another one is to
    have another head: what the old one had too many is no name of what the new one lacks.
    """
    config = json.loads((folder / "config.json").read_text())
    return kind.__name__ in (config.get("architectures") or ())


def _spare(folder: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """Return tensors without values for those of some names that a folder's files hold."""
    from safetensors import safe_open  # of transformers: a loop without it has no use for it

    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as stream:
            own = set(stream.keys())
            for name in own.intersection(names):
                shape = stream.get_slice(name).get_shape()
                found[name] = torch.empty(shape, device="meta")
    return found


def _mark(tensor: Tensor) -> tuple[int, int]:
    return version(tensor), tensor.data_ptr()
