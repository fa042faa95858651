"""A checkpoint's folder again, its weights in another format: the same files and names, whole or
not at all.
"""

from __future__ import annotations

import errno
import json
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from nanstop.commands.scan.checkpoint_files import Checkpoint
from nanstop.errors import NanstopError
from nanstop.numerics.tensors import format_name
from nanstop.store.beside_weights import CARD, PLAN, append_to_card

_OF_TRAINERS = ("optimizer.", "scheduler.", "scaler.", "rng_state", "trainer_state.")
_OF_TRAINERS += ("training_args.", "global_step", "checkpoint-", "runs", PLAN)
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack")
_DTYPE_KEYS = ("dtype", "torch_dtype")


@dataclass(slots=True)
class Written:
    """``rounded``: values that the format does not hold exactly. ``left_out``: names of files."""

    num_bytes: int = 0
    rounded: int = 0
    left_out: list[str] = field(default_factory=list)


def write(
    opened: Checkpoint,
    out: Path,
    dtype: torch.dtype | None,
    *,
    card: str,
    check: Callable[[Path], None],
) -> Written:
    """Write a checkpoint in ``dtype``, None for its own, as the folder ``out``, which appears when
    all of it is there and ``check`` of it has passed.

    Errors: ``NanstopError`` where there is no room or the disk refuses; nothing is left then.
    """
    folder, made = opened.path, Written()
    beside = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _require_room(opened, out.parent, dtype)
        beside.mkdir()
        for source in sorted(folder.iterdir()):
            _put(source, beside / source.name, opened, dtype, made)
        if (beside / CARD).is_file():
            append_to_card(beside / CARD, card)
        made.num_bytes = sum(one.stat().st_size for one in beside.rglob("*") if one.is_file())
        check(beside)
        beside.rename(out)
    except OSError as error:
        full = error.errno == errno.ENOSPC
        said = "no space left on the disk" if full else error.strerror or str(error)
        raise NanstopError(f"cannot write {out}: {said}; nothing was written") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return made


def _require_room(opened: Checkpoint, place: Path, dtype: torch.dtype | None) -> None:
    needed = _bytes_in(opened, dtype)
    free = shutil.disk_usage(place).free
    if needed > free:
        raise NanstopError(
            f"{place}: {free / 1e9:.1f} GB are free, and {needed / 1e9:.1f} GB are needed; "
            "nothing was written"
        )


def _bytes_in(opened: Checkpoint, dtype: torch.dtype | None) -> int:
    """Return how many bytes a checkpoint's tensors take when the floating ones are in ``dtype``."""
    num_bytes = 0
    for one in opened.tensors:
        floating = one.dtype is None or one.dtype.is_floating_point
        written = (dtype if floating else None) or one.dtype or torch.float32
        num_bytes += torch.Size(one.shape).numel() * written.itemsize
    return num_bytes


def _put(
    source: Path, target: Path, opened: Checkpoint, dtype: torch.dtype | None, made: Written
) -> None:
    name = source.name
    weights = {file.name for file in opened.files}
    if name in weights and dtype is not None:
        made.rounded += _cast_file(source, target, dtype)
    elif name.startswith((".", *_OF_TRAINERS)) or (
        source.suffix in _WEIGHTS and name not in weights
    ):
        made.left_out.append(name)
    elif source.is_dir():
        shutil.copytree(source, target)
    elif name.endswith(".index.json") and dtype is not None:
        target.write_text(_sized(source, opened, dtype), encoding="utf-8")
    elif name == "config.json" and dtype is not None:
        target.write_text(_declaring(source, dtype), encoding="utf-8")
    elif source.is_file():
        shutil.copyfile(source, target)
    else:
        made.left_out.append(name)


def _cast_file(source: Path, target: Path, dtype: torch.dtype) -> int:
    """Write a file's tensors in ``dtype``; return how many values it does not hold exactly."""
    if source.suffix == ".safetensors":
        with safe_open(source, "pt") as stream:
            metadata: Any = stream.metadata()
            found = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118  (no mapping)
        cast = _Cast(dtype)
        save_file({name: cast(value) for name, value in found.items()}, target, metadata)
        return cast.rounded
    cast = _Cast(dtype)
    torch.save(_mapped(torch.load(source, map_location="cpu", weights_only=True), cast), target)
    return cast.rounded


class _Cast:
    """Casts tensors; one that is met twice is cast once, so that what is tied stays tied."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.rounded = 0
        self._dtype = dtype
        self._known: dict[Any, tuple[Tensor, Tensor]] = {}

    def __call__(self, value: Tensor) -> Tensor:
        if not value.is_floating_point() or value.dtype == self._dtype:
            return value
        place = value.data_ptr(), value.shape, value.stride(), value.dtype
        if place not in self._known:
            made = value.to(self._dtype)
            same = (made.to(value.dtype) == value) | (value.isnan() & made.isnan())
            self.rounded += int((~same).sum())
            self._known[place] = value, made
        return self._known[place][1]


def _mapped(value: Any, cast: _Cast) -> Any:
    """Return what ``torch.save`` wrote with each tensor cast, in containers of the same kinds."""
    if isinstance(value, Tensor):
        return cast(value)
    if isinstance(value, dict):
        made = value.copy()
        made.update({name: _mapped(one, cast) for name, one in value.items()})
        return made
    return value


def _sized(index: Path, opened: Checkpoint, dtype: torch.dtype) -> str:
    found = json.loads(index.read_text(encoding="utf-8"))
    if isinstance(found.get("metadata"), dict):
        found["metadata"]["total_size"] = _bytes_in(opened, dtype)
    return json.dumps(found, indent=2) + "\n"


def _declaring(config: Path, dtype: torch.dtype) -> str:
    """Return a config that says ``dtype`` wherever it names the format of the weights."""
    found = json.loads(config.read_text(encoding="utf-8"))
    name = format_name(dtype)
    places = [one for one in _objects(found) if any(key in one for key in _DTYPE_KEYS)]
    for place in places:
        place.update({key: name for key in _DTYPE_KEYS if key in place})
    if found not in places:
        found["torch_dtype"] = name  # which every version of transformers understands
    return json.dumps(found, indent=2) + "\n"


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield a config and the configs of its parts."""
    if isinstance(value, dict):
        yield value
        for name, one in value.items():
            if name.endswith("_config"):
                yield from _objects(one)
